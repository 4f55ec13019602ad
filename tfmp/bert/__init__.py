"""A replacement for the `optimization.py` of TF1's BERT scripts, with the signatures of NVIDIA's version.

In the script, write `import tfmp.bert as optimization` in place of `import optimization`. For Google's scripts, write
`from tfmp.bert import google as optimization`. Each name is imported on its first use.

The two optimizer classes increment the global step in `apply_gradients`, which the original classes do not. A script
that keeps its own `create_optimizer`, and replaces only the optimizer class, must therefore delete its line that
assigns `global_step + 1`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tfmp.environment import require_tensorflow

if TYPE_CHECKING:
    from tfmp.bert.lamb import LAMBOptimizer as LAMBOptimizer
    from tfmp.bert.normalization import layer_norm as layer_norm
    from tfmp.bert.optimizers import AdamWeightDecayOptimizer as AdamWeightDecayOptimizer
    from tfmp.bert.schedule import warm_up_then_decay as warm_up_then_decay
    from tfmp.bert.throughput import Throughput as Throughput
    from tfmp.bert.training import NOT_DECAYED as NOT_DECAYED
    from tfmp.bert.training import Training as Training
    from tfmp.bert.training import build_training as build_training
    from tfmp.bert.training import create_optimizer as create_optimizer

_MODULE_OF = {
    "AdamWeightDecayOptimizer": "tfmp.bert.optimizers",
    "LAMBOptimizer": "tfmp.bert.lamb",
    "NOT_DECAYED": "tfmp.bert.training",
    "Throughput": "tfmp.bert.throughput",
    "Training": "tfmp.bert.training",
    "build_training": "tfmp.bert.training",
    "create_optimizer": "tfmp.bert.training",
    "layer_norm": "tfmp.bert.normalization",
    "warm_up_then_decay": "tfmp.bert.schedule",
}

__all__ = [*_MODULE_OF]  # noqa: PLE0604 - the names of a table are strings


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute may be anything
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tfmp.bert' has no attribute {name!r}.")
    require_tensorflow()
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
