"""The NPU bridge's names for loss scaling, for scripts that were written for it.

A script that was written for the bridge runs on CPU and GPU after its imports are changed:
`from npu_bridge.npu_init import *` becomes `from tfmp.npu import *`, and
`from npu_bridge.estimator.npu import npu_loss_scale_optimizer` becomes
`from tfmp.npu import npu_loss_scale_optimizer`.

The bridge's star import also defines names that do not exist here. To import one of them from `tfmp.npu` raises an
ImportError that says what to use in its place. `hasattr(tfmp.npu, name)` raises the same error for such a name and does
not return False. The other modules of the bridge do not exist here.

Examples:
    >>> from tfmp.npu import NPURunConfig
    Traceback (most recent call last):
        ...
    ImportError: tfmp.npu has no NPURunConfig: use tf.estimator.RunConfig (TensorFlow has Estimator up to 2.15), without
    the settings that it does not know.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfmp.environment import require_tensorflow
from tfmp.npu.advice import ADVICE

if TYPE_CHECKING:
    from tfmp.npu import npu_loss_scale_manager as npu_loss_scale_manager
    from tfmp.npu import npu_loss_scale_optimizer as npu_loss_scale_optimizer
    from tfmp.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager
    from tfmp.npu.npu_loss_scale_manager import FixedLossScaleManager as FixedLossScaleManager
    from tfmp.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer as NPULossScaleOptimizer

_MODULE_OF = {
    "ExponentialUpdateLossScaleManager": "tfmp.npu.npu_loss_scale_manager",
    "FixedLossScaleManager": "tfmp.npu.npu_loss_scale_manager",
    "NPULossScaleOptimizer": "tfmp.npu.npu_loss_scale_optimizer",
}

# Modules that have the names of the bridge's modules, available as attributes too.
_MODULES = ("npu_loss_scale_manager", "npu_loss_scale_optimizer")

__all__ = [*_MODULE_OF]  # noqa: PLE0604 - the names of a table are strings


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute may be anything
    if name in _MODULE_OF:
        require_tensorflow()
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name in _MODULES:
        require_tensorflow()
        return importlib.import_module(f"tfmp.npu.{name}")
    if name in ADVICE:
        # Not an AttributeError: `from tfmp.npu import name` would replace that by an ImportError without the advice. A
        # call of hasattr cannot be told apart from such an import, so it raises this error as well, by design.
        raise ImportError(f"tfmp.npu has no {name}: {ADVICE[name]}.")
    # For all other names, submodules too: Python itself and tools use hasattr to ask for them, and must get False.
    raise AttributeError(f"module 'tfmp.npu' has no attribute {name!r}.")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
