"""Updates of variables by Keras' optimizers, in programs that XLA compiles where that saves time."""

from tfmp.core.updates.update import JitCompile as JitCompile
from tfmp.core.updates.update import OptimizerUpdate as OptimizerUpdate
from tfmp.core.updates.update import Updates as Updates
