"""Loss scaling for mixed-precision training with TensorFlow, on one device or many.

Each public name is imported on its first use. So `import tfmp` is fast, and it works without TensorFlow, as the source
rewriter `tfmp.migrate` requires.
"""

from tfmp.keras_registration import register_when_imported
from tfmp.lazy import names_of_stub

__version__ = "0.3.0"

__getattr__, _names_and_packages, _names = names_of_stub(__name__, __file__)
__all__ = [*_names, "__version__"]  # noqa: PLE0604 - the names of a stub are strings

register_when_imported()


def __dir__() -> list[str]:
    return sorted({*__all__, *_names_and_packages()})
