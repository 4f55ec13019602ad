"""What the tests of recomputed layers share."""

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture
def same_rounding() -> Iterator[None]:
    """Keep TensorFlow from rewriting graphs in ways that round differently.

    It rewrites what only one op reads. In the first call of a recomputed block the gradients read no intermediate
    results, so it rewrites more there: it computes a layer together with its activation ("remapping"), and multiplies
    the constants of an activation and of Dropout with each other ("arithmetic_optimization").
    """
    rewritings = ("remapping", "arithmetic_optimization")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(rewritings, False))
    yield
    tf.config.optimizer.set_experimental_options(dict.fromkeys(rewritings, True))
