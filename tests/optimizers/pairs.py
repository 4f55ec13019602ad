"""Optimizers in the wrapper beside the same ones without it, and many variables that both train."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from kerases import SCALE, variable

import tfmp
from tfmp.core.gradients import arithmetic

#: The shapes of the variables: five of one, which take programs for two and for one, and three of another.
SHAPES = [(2, 3), (3,), (2, 3), (2, 3), (3,), (2, 3), (3,), (2, 3), (4,)]


def many_variables(keras: ModuleType) -> list[Any]:
    """Return variables of these shapes."""
    rng = np.random.default_rng(0)
    return [variable(keras, rng.normal(size=shape), f"w{place}") for place, shape in enumerate(SHAPES)]


def many_gradients(seed: int, last: float | None = None) -> list[Any]:
    """Return dense gradients of the variables; `last` is the last value of the last one."""
    rng = np.random.default_rng(seed)
    grads = [rng.normal(size=shape) for shape in SHAPES]
    grads[-1][-1] = grads[-1][-1] if last is None else last
    return [tf.constant(grad, tf.float32) for grad in grads]


class Pair:
    """An optimizer in tfmp's wrapper, whose updates are compiled, and a bare one, with variables of their own."""

    def __init__(self, make: Callable[[], Any], variables_of: Callable[[], list[Any]]) -> None:
        self.bare, self.inner = make(), make()
        self.opt = tfmp.LossScaleOptimizer(self.inner, tfmp.FixedLossScaleManager(SCALE), jit_compile=True)
        self.bare_variables, self.variables = variables_of(), variables_of()
        self.bare.build(self.bare_variables)
        self.opt.build(self.variables)

    def apply(self, grads: Sequence[Any]) -> None:
        """Apply the gradients of a loss that is scaled, as a wrapper of each Keras takes them."""
        apply(self.opt, self.variables, grads)

    def apply_bare(self, grads: Sequence[Any]) -> None:
        """Apply the gradients by the optimizer without a wrapper."""
        self.bare.apply_gradients(zip(grads, self.bare_variables, strict=True))

    def assert_alike(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Assert that the variables have the same values."""
        for one, other in zip(self.variables, self.bare_variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol, atol)


def apply(opt: Any, variables: Sequence[Any], grads: Sequence[Any]) -> None:
    """Apply the gradients of a loss that is scaled, as a wrapper of each Keras takes them."""
    scaled = [arithmetic.map_values(lambda values: values * SCALE, grad) for grad in grads]
    if not hasattr(opt, "apply"):
        scaled = opt.get_unscaled_gradients(scaled)
    opt.apply_gradients(zip(scaled, variables, strict=True))
