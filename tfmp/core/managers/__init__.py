"""Loss-scale managers: the rules that decide the loss scale.

A manager consists of a small state, the variables that hold it, and a pure function `next_state`, which computes the
state after a step from the state before it. No other code of the package computes a loss scale.
"""

from tfmp.core.managers.base import LossScaleManager as LossScaleManager
from tfmp.core.managers.exponential import ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager
from tfmp.core.managers.exponential import LossScaleState as LossScaleState
from tfmp.core.managers.fixed import FixedLossScaleManager as FixedLossScaleManager
from tfmp.core.managers.from_config import Specification as Specification
from tfmp.core.managers.from_config import dynamic_manager as dynamic_manager
from tfmp.core.managers.from_config import get_loss_scale_manager as get_loss_scale_manager
from tfmp.core.managers.from_config import manager_of_wrapper as manager_of_wrapper
from tfmp.core.managers.log_max import LogMaxLossScaleManager as LogMaxLossScaleManager
from tfmp.core.managers.log_max import LogMaxState as LogMaxState

#: The managers that this package defines, as opposed to those that users write.
OWN_MANAGERS: tuple[type[LossScaleManager], ...] = (
    FixedLossScaleManager,
    ExponentialUpdateLossScaleManager,
    LogMaxLossScaleManager,
)
