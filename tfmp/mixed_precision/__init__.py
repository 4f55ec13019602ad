"""What computes in half precision: autocast for raw TensorFlow, levels for Keras, and float32 storage of variables."""

from tfmp.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
