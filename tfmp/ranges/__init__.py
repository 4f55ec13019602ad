"""Which powers of two weights, activations and gradients take, and what of them float16 can hold."""

from tfmp.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
