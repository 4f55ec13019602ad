"""Loss scaling for mixed-precision training with TensorFlow, on one device or many.

Each public name is imported on its first use. So `import tfmp` is fast, and it works without TensorFlow, as the source
rewriter `tfmp.migrate` requires.
"""

import warnings
from typing import Any

from tfmp.keras_registration import register_when_imported
from tfmp.lazy import names_of_stub
from tfmp.moved_names import MOVED

__version__ = "0.3.0"

_name_of_stub, _names_and_packages, _names = names_of_stub(__name__, __file__)
__all__ = [*_names, "__version__"]  # noqa: PLE0604 - the names of a stub are strings

register_when_imported()


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute may be anything
    if name not in MOVED:
        return _name_of_stub(name)
    package, new_name = MOVED[name]
    message = f"tfmp.{name} is deprecated: write tfmp.{package}.{new_name}."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(_name_of_stub(package), new_name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_names_and_packages()})
