"""Keeps TensorFlow's global random seed as it was."""

import contextlib
from collections.abc import Iterator

# An internal module: TensorFlow (2.15 to 2.21) has no public way to save what `tf.random.set_seed` began, and
# setting the seed again would start from its beginning.
from tensorflow.python.eager import context


@contextlib.contextmanager
def global_seed_unchanged() -> Iterator[None]:
    """Give eager code that draws random numbers afterwards the same ones as if the block had not run."""
    # Not there before eager code has run, as in a program of TF1 graphs.
    generator = getattr(context.context(), "_rng", None)
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
