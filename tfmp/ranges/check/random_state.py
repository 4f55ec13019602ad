"""Keeps TensorFlow's global random seed as it was."""

import contextlib
from collections.abc import Iterator

from tfmp.core.tensorflow_internals import global_random_generator


@contextlib.contextmanager
def global_seed_unchanged() -> Iterator[None]:
    """Give eager code that draws random numbers afterwards the same ones as if the block had not run."""
    generator = global_random_generator()
    if generator is None:
        # Without a seed, random numbers cannot be repeated anyway.
        yield
        return
    state = generator.getstate()
    # Other seeds within: a kernel that TensorFlow keeps for a seed goes on where it stopped.
    generator.seed(repr(state))
    try:
        yield
    finally:
        generator.setstate(state)
