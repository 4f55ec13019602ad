"""Readers for what other systems, and older versions of tfmp, saved."""

from tfmp.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
