"""Optimizers of Keras 3: they apply gradients in true magnitude, by a program or by themselves."""

from types import ModuleType

import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, values, variable

from tfmp.core.adapters import Keras3Adapter
from tfmp.core.updates import OptimizerUpdate

pytestmark = pytest.mark.essential


@for_every_keras("keras3")
@pytest.mark.parametrize("jit_compile", [True, False])
def test_gradients_in_true_magnitude_are_applied_as_they_are(keras: ModuleType, jit_compile: bool) -> None:
    opt, kernel = optimizer(keras), variable(keras, [1.0, 2.0])
    adapter = Keras3Adapter(opt, [kernel], update=OptimizerUpdate(opt, jit_compile))
    grads = [tf.constant([1.0, 2.0])]
    adapter.prepare([kernel])
    assert adapter.program(grads).is_compiled is jit_compile
    adapter.apply(grads)
    assert values([kernel]) == [[0.5, 1]]
    assert int(opt.iterations) == 1
