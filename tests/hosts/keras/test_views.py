"""Optimizers of Keras with other settings, and variables of Keras as those of TensorFlow."""

from types import ModuleType

import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, variable

from tfmp.hosts.keras.views import of_tensorflow, view_of

pytestmark = pytest.mark.essential


@for_every_keras()
def test_what_a_view_sets_is_set_on_the_optimizer_but_for_the_settings_of_the_view(keras: ModuleType) -> None:
    opt = optimizer(keras, clipvalue=1.0)
    with view_of(opt, clipvalue=None) as view:
        assert (view.clipvalue, opt.clipvalue, view.iterations is opt.iterations) == (None, 1, True)
        vars(view).update(clipvalue=2.0, clipnorm=3.0, counted=4)
    assert (opt.clipvalue, opt.clipnorm, opt.counted) == (1, 3, 4)


@for_every_keras()
def test_what_a_view_has_set_before_an_error_is_set_on_the_optimizer(keras: ModuleType) -> None:
    opt = optimizer(keras, clipvalue=1.0)

    def fail() -> None:
        with view_of(opt, clipvalue=None) as view:
            vars(view).update(clipvalue=2.0, counted=4)
            raise RuntimeError("of the update")

    with pytest.raises(RuntimeError, match="of the update"):
        fail()
    assert (opt.clipvalue, opt.counted) == (1, 4)


@for_every_keras()
def test_variable_of_any_keras_has_one_of_tensorflow(keras: ModuleType) -> None:
    weight = tf.Variable(1.0)
    assert of_tensorflow(weight) is weight
    assert isinstance(of_tensorflow(variable(keras, 1.0)), tf.Variable)
