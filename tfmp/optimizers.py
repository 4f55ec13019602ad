"""The classes behind `tfmp.LossScaleOptimizer`: one front-end for each framework whose optimizers it wraps."""

from tfmp.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
