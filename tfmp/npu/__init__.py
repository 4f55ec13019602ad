"""The NPU bridge's names for loss scaling, and those that one process on CPU or GPU can do without.

A script that was written for the bridge runs on CPU and GPU after its imports are changed:
`from npu_bridge.npu_init import *` becomes `from tfmp.npu import *`, and
`from npu_bridge.estimator.npu import npu_loss_scale_optimizer` becomes
`from tfmp.npu import npu_loss_scale_optimizer`.

The bridge's star import also defines names that do not exist here. To import one of them from `tfmp.npu` raises an
ImportError that says what to use in its place. `hasattr(tfmp.npu, name)` raises the same error for such a name and does
not return False. The other modules of the bridge do not exist here.

Examples:
    >>> from tfmp.npu import npu_rnn
    Traceback (most recent call last):
        ...
    ImportError: tfmp.npu has no npu_rnn: use tf.compat.v1.nn.static_rnn.
"""

from typing import Any

from tfmp.environment import require_tensorflow
from tfmp.lazy import names_of_stub
from tfmp.npu.advice import ADVICE

# Of the stub's names, `__dir__` has also the two modules that have the names of the bridge's modules.
_name_of_stub, __dir__, __all__ = names_of_stub(__name__, __file__)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute may be anything
    if name in ADVICE:
        # Not an AttributeError: `from tfmp.npu import name` would replace that by an ImportError without the advice. A
        # call of hasattr cannot be told apart from such an import, so it raises this error as well, by design.
        raise ImportError(f"tfmp.npu has no {name}: {ADVICE[name]}.")
    if name in __dir__():
        require_tensorflow()
    # For all other names, submodules too: Python itself and tools use hasattr to ask for them, and must get False.
    return _name_of_stub(name)
