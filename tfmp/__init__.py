"""Loss scaling for mixed-precision training with TensorFlow, on one device or many.

Each public name is imported on its first use. So `import tfmp` is fast, and it works without TensorFlow, as the source
rewriter `tfmp.migrate` requires.
"""

from tfmp.keras_registration import register_when_imported
from tfmp.lazy import names_of_stub

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
__all__ += ["__version__"]

register_when_imported()
