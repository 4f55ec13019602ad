"""Many variables, of which several are alike, and optimizers that update them."""

from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
from kerases import SCALE, variable

import tfmp
from tfmp.core.gradients import arithmetic

#: The shapes of the variables: five of one, which take programs for two and for one, and three of another.
SHAPES = [(2, 3), (3,), (2, 3), (2, 3), (3,), (2, 3), (3,), (2, 3), (4,)]


def make_variables(keras: ModuleType) -> list[Any]:
    """Return variables of these shapes."""
    rng = np.random.default_rng(0)
    return [variable(keras, rng.normal(size=shape), f"w{place}") for place, shape in enumerate(SHAPES)]


def gradients(seed: int) -> list[Any]:
    """Return dense gradients of the variables."""
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in SHAPES]


def wrapped(inner: Any, **settings: Any) -> Any:
    """Return an optimizer in tfmp's wrapper, whose updates are compiled."""
    return tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE), jit_compile=True, **settings)


def apply(opt: Any, variables: list[Any], grads: list[Any]) -> None:
    """Apply the gradients of a loss that is scaled, as a wrapper of each Keras takes them."""
    scaled = [arithmetic.map_values(lambda values: values * SCALE, grad) for grad in grads]
    if not hasattr(opt, "apply"):
        scaled = opt.get_unscaled_gradients(scaled)
    opt.apply_gradients(zip(scaled, variables, strict=True))
