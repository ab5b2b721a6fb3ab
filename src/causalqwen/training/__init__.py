"""Training by transformers' Trainer, on features kept on disk or through the backbone."""

from causalqwen.training.features import FactStore, TokenFacts, stream_facts
from causalqwen.training.run import METRICS, train
from causalqwen.training.scores import LEVELS, score_tokens, score_values
from causalqwen.training.settings import LoraStage, TrainSettings, ValueStage

__all__ = [
    "LEVELS",
    "METRICS",
    "FactStore",
    "LoraStage",
    "TokenFacts",
    "TrainSettings",
    "ValueStage",
    "score_tokens",
    "score_values",
    "stream_facts",
    "train",
]
