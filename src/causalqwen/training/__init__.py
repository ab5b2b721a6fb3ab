"""Training by transformers' Trainer, on features kept on disk or through the backbone."""

from causalqwen.numbers.law import LEVELS
from causalqwen.training.anchor import text_chunks
from causalqwen.training.features import FactStore, TokenFacts, stream_facts
from causalqwen.training.run import train
from causalqwen.training.scores import score_tokens, score_values
from causalqwen.training.settings import BackboneStage, HeadStage, LoraStage, TrainSettings, ValueStage
from causalqwen.training.stages import METRICS
from causalqwen.training.voices import learn_voices

__all__ = [
    "LEVELS",
    "METRICS",
    "BackboneStage",
    "FactStore",
    "HeadStage",
    "LoraStage",
    "TokenFacts",
    "TrainSettings",
    "ValueStage",
    "learn_voices",
    "score_tokens",
    "score_values",
    "stream_facts",
    "text_chunks",
    "train",
]
