"""Loss scaling for hand-written training loops, with the methods of torch.amp."""

from tfmp.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
