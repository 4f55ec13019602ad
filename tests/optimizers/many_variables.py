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


def assert_train_alike(opt: Any, plain: Any, keras: ModuleType, *, eagerly: bool = False) -> None:
    """Assert that each variable, its slots and the count of steps end as without a wrapper."""
    variables, plain_variables = make_variables(keras), make_variables(keras)
    opt.build(variables)
    plain.build(plain_variables)

    def step(grads: list[Any]) -> None:
        apply(opt, variables, grads)

    def plain_step(grads: list[Any]) -> None:
        plain.apply_gradients(zip(grads, plain_variables, strict=True))

    # Nadam of Keras 2 counts steps in Python while a function is traced, so both are traced.
    steps = [step, plain_step] if eagerly else [tf.function(step), tf.function(plain_step)]
    for seed in range(4):
        for take_step in steps:
            take_step(gradients(seed))
    pairs = zip([*variables, *opt.inner_optimizer.variables], [*plain_variables, *plain.variables], strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
