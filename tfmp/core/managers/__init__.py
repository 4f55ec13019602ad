"""Loss-scale managers: what decides the loss scale.

A manager is a pure rule on a small state, and the variables that hold the state. `next_state` is the rule; nothing
else computes a scale.
"""

from tfmp.core.managers.base import LossScaleManager as LossScaleManager
from tfmp.core.managers.base import validated_manager as validated_manager
from tfmp.core.managers.exponential import ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager
from tfmp.core.managers.exponential import LossScaleState as LossScaleState
from tfmp.core.managers.fixed import FixedLossScaleManager as FixedLossScaleManager
from tfmp.core.managers.log_max import LogMaxLossScaleManager as LogMaxLossScaleManager
from tfmp.core.managers.log_max import LogMaxState as LogMaxState
from tfmp.core.managers.specification import Specification as Specification
from tfmp.core.managers.specification import dynamic_manager as dynamic_manager
from tfmp.core.managers.specification import get_loss_scale_manager as get_loss_scale_manager
from tfmp.core.managers.specification import manager_of_wrapper as manager_of_wrapper

#: The managers that are no user's own.
OWN_MANAGERS: tuple[type[LossScaleManager], ...] = (
    FixedLossScaleManager,
    ExponentialUpdateLossScaleManager,
    LogMaxLossScaleManager,
)
