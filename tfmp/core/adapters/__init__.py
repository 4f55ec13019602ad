"""Adapters: how the core works with the optimizers of each host framework, one class for each host."""

from tfmp.core.adapters.base import OptimizerAdapter as OptimizerAdapter
from tfmp.core.adapters.base import is_overwritten as is_overwritten
from tfmp.core.adapters.base import names_of as names_of
from tfmp.core.adapters.base import takes_float32_gradients as takes_float32_gradients
from tfmp.core.adapters.keras import KerasAdapter as KerasAdapter
from tfmp.core.adapters.keras2 import Keras2Adapter as Keras2Adapter
from tfmp.core.adapters.keras3 import Keras3Adapter as Keras3Adapter
from tfmp.core.adapters.program import Program as Program
from tfmp.core.adapters.program import ProgramOnSums as ProgramOnSums
from tfmp.core.adapters.tf1 import StepCounter as StepCounter
from tfmp.core.adapters.tf1 import TF1Adapter as TF1Adapter
from tfmp.core.adapters.together import AdaptersTogether as AdaptersTogether
