"""The model: embedding, backbone, abduction, action, and the processor that feeds it."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor

from causalqwen.modeling.abduction import AbductionNetwork
from causalqwen.modeling.backbones import DEFAULT_BACKBONE
from causalqwen.modeling.choices import Choice
from causalqwen.modeling.configuration import STARTS, CausalQwenConfig
from causalqwen.modeling.embedding import NumericEmbedding
from causalqwen.modeling.encoded import NumericEncoding
from causalqwen.modeling.model import CausalQwenForCausalLM
from causalqwen.modeling.outputs import CausalQwenOutput, GenerateCausalBeamOutput, GenerateCausalOutput
from causalqwen.modeling.prediction import NumberPrediction
from causalqwen.modeling.processor import CausalQwenProcessor
from causalqwen.modeling.reading import Observation
from causalqwen.modeling.scores import ActionNetwork
from causalqwen.modeling.streaming import NumberTextIteratorStreamer, NumberTextStreamer
from causalqwen.modeling.survey import Question
from causalqwen.modeling.worlds import Intervention, World
from causalqwen.parts.branch import ValueBranch

AutoConfig.register("causalqwen", CausalQwenConfig)
AutoModelForCausalLM.register(CausalQwenConfig, CausalQwenForCausalLM)
AutoProcessor.register(CausalQwenConfig, CausalQwenProcessor)

__all__ = [
    "DEFAULT_BACKBONE",
    "STARTS",
    "AbductionNetwork",
    "ActionNetwork",
    "CausalQwenConfig",
    "CausalQwenForCausalLM",
    "CausalQwenOutput",
    "CausalQwenProcessor",
    "Choice",
    "GenerateCausalBeamOutput",
    "GenerateCausalOutput",
    "Intervention",
    "NumberPrediction",
    "NumberTextIteratorStreamer",
    "NumberTextStreamer",
    "NumericEmbedding",
    "NumericEncoding",
    "Observation",
    "Question",
    "ValueBranch",
    "World",
]
