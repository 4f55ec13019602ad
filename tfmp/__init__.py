"""Loss scaling for mixed-precision training with TensorFlow, on one device or many.

Each public name is imported on its first use. So `import tfmp` is fast, and it works without TensorFlow, as the source
rewriter `tfmp.migrate` requires.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfmp.environment import require_tensorflow
from tfmp.keras_registration import register_when_imported

if TYPE_CHECKING:
    from tfmp.checkpoints.names import checkpoint_variable_map as checkpoint_variable_map
    from tfmp.checkpoints.states import read_loss_scale_state as read_loss_scale_state
    from tfmp.core.accumulation.accumulator import GradientAccumulator as GradientAccumulator
    from tfmp.core.gradients.clipping import clip_by_global_norm as clip_by_global_norm
    from tfmp.core.gradients.clipping import clip_by_norm as clip_by_norm
    from tfmp.core.gradients.clipping import clip_by_value as clip_by_value
    from tfmp.core.managers import ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager
    from tfmp.core.managers import FixedLossScaleManager as FixedLossScaleManager
    from tfmp.core.managers import LogMaxLossScaleManager as LogMaxLossScaleManager
    from tfmp.core.managers import LossScaleManager as LossScaleManager
    from tfmp.core.managers import get_loss_scale_manager as get_loss_scale_manager
    from tfmp.core.managers.step_counters import LossScaleStatus as LossScaleStatus
    from tfmp.core.overflow.detectors import NonFiniteDetector as NonFiniteDetector
    from tfmp.core.overflow.detectors import OverflowDetector as OverflowDetector
    from tfmp.core.overflow.detectors import SaturationDetector as SaturationDetector
    from tfmp.core.overflow.overflow_counts import OverflowReport as OverflowReport
    from tfmp.grad_scaler.replay import replay as replay
    from tfmp.grad_scaler.scaled_gradients import ScaledGradientsOptimizer as ScaledGradientsOptimizer
    from tfmp.grad_scaler.scaler import GradScaler as GradScaler
    from tfmp.mixed_precision.autocast.lists import AutocastLists as AutocastLists
    from tfmp.mixed_precision.autocast.lists import autocast_lists as autocast_lists
    from tfmp.mixed_precision.autocast.scope import autocast as autocast
    from tfmp.mixed_precision.levels.existing_models import PolicyReport as PolicyReport
    from tfmp.mixed_precision.levels.existing_models import set_precision as set_precision
    from tfmp.mixed_precision.levels.scope import precision as precision
    from tfmp.mixed_precision.storage import float32_variable_storage_getter as float32_variable_storage_getter
    from tfmp.monitoring.callbacks import LossScaleCallback as LossScaleCallback
    from tfmp.monitoring.hooks import LossScaleLoggingHook as LossScaleLoggingHook
    from tfmp.monitoring.stuck import LossScaleStuckError as LossScaleStuckError
    from tfmp.optimizer_state.half_state import half_state as half_state
    from tfmp.optimizers.base import LossScaleOptimizer as LossScaleOptimizer
    from tfmp.ranges.check.precision_check import check_precision as check_precision
    from tfmp.ranges.histogram import RangeHistogram as RangeHistogram
    from tfmp.ranges.histogram import RangeShares as RangeShares
    from tfmp.ranges.histogram import exponent_counts as exponent_counts
    from tfmp.ranges.probes import probe as probe
    from tfmp.ranges.report import LayerPrecision as LayerPrecision
    from tfmp.ranges.report import PrecisionReport as PrecisionReport
    from tfmp.recomputation.functions.function import recompute as recompute
    from tfmp.recomputation.layers.layer import Recompute as Recompute
    from tfmp.recomputation.layers.model import recompute_layers as recompute_layers

__version__ = "0.3.0"

_MODULE_OF = {
    "AutocastLists": "tfmp.mixed_precision.autocast.lists",
    "ExponentialUpdateLossScaleManager": "tfmp.core.managers",
    "FixedLossScaleManager": "tfmp.core.managers",
    "GradScaler": "tfmp.grad_scaler.scaler",
    "GradientAccumulator": "tfmp.core.accumulation.accumulator",
    "LayerPrecision": "tfmp.ranges.report",
    "LogMaxLossScaleManager": "tfmp.core.managers",
    "LossScaleCallback": "tfmp.monitoring.callbacks",
    "LossScaleLoggingHook": "tfmp.monitoring.hooks",
    "LossScaleManager": "tfmp.core.managers",
    "LossScaleOptimizer": "tfmp.optimizers.base",
    "LossScaleStuckError": "tfmp.monitoring.stuck",
    "LossScaleStatus": "tfmp.core.managers.step_counters",
    "NonFiniteDetector": "tfmp.core.overflow.detectors",
    "OverflowDetector": "tfmp.core.overflow.detectors",
    "OverflowReport": "tfmp.core.overflow.overflow_counts",
    "PolicyReport": "tfmp.mixed_precision.levels.existing_models",
    "PrecisionReport": "tfmp.ranges.report",
    "RangeHistogram": "tfmp.ranges.histogram",
    "RangeShares": "tfmp.ranges.histogram",
    "Recompute": "tfmp.recomputation.layers.layer",
    "SaturationDetector": "tfmp.core.overflow.detectors",
    "ScaledGradientsOptimizer": "tfmp.grad_scaler.scaled_gradients",
    "autocast": "tfmp.mixed_precision.autocast.scope",
    "autocast_lists": "tfmp.mixed_precision.autocast.lists",
    "check_precision": "tfmp.ranges.check.precision_check",
    "checkpoint_variable_map": "tfmp.checkpoints.names",
    "clip_by_global_norm": "tfmp.core.gradients.clipping",
    "clip_by_norm": "tfmp.core.gradients.clipping",
    "clip_by_value": "tfmp.core.gradients.clipping",
    "exponent_counts": "tfmp.ranges.histogram",
    "float32_variable_storage_getter": "tfmp.mixed_precision.storage",
    "get_loss_scale_manager": "tfmp.core.managers",
    "half_state": "tfmp.optimizer_state.half_state",
    "precision": "tfmp.mixed_precision.levels.scope",
    "probe": "tfmp.ranges.probes",
    "read_loss_scale_state": "tfmp.checkpoints.states",
    "recompute": "tfmp.recomputation.functions.function",
    "recompute_layers": "tfmp.recomputation.layers.model",
    "replay": "tfmp.grad_scaler.replay",
    "set_precision": "tfmp.mixed_precision.levels.existing_models",
}

__all__ = [*_MODULE_OF, "__version__"]  # noqa: PLE0604 - the names of a table are strings


register_when_imported()


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute may be anything
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tfmp' has no attribute {name!r}.")
    require_tensorflow()
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
