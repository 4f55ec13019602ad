"""Updates of variables by Keras' optimizers, in programs that XLA compiles where that saves time."""

from tfmp.core.updates.conditions import view_of as view_of
from tfmp.core.updates.keras_program import KerasProgram as KerasProgram
from tfmp.core.updates.keras_program import ProgramsTogether as ProgramsTogether
from tfmp.core.updates.own_code import is_foreign as is_foreign
from tfmp.core.updates.own_code import is_of_keras as is_of_keras
from tfmp.core.updates.replicas import ProgramOfReplicas as ProgramOfReplicas
from tfmp.core.updates.replicas import apply_on_replicas as apply_on_replicas
from tfmp.core.updates.update import JitCompile as JitCompile
from tfmp.core.updates.update import OptimizerUpdate as OptimizerUpdate
from tfmp.core.updates.update import Updates as Updates
from tfmp.core.updates.update import validated_jit_compile as validated_jit_compile
