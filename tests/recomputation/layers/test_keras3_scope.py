"""The scope that notes which variables of Keras 3 a layer uses and assigns to."""

import keras
import pytest
import tensorflow as tf

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

from tfmp.recomputation.layers.keras3_scope import NotingScope


def test_variables_are_noted_and_do_not_change() -> None:
    own, read, assigned = (keras.Variable(value) for value in (1.0, 2.0, 3.0))
    with NotingScope([(own, tf.constant(10.0))]) as scope:
        assigned.assign(own + read)
        own.assign_add(1.0)
        seen = [float(own.value), float(assigned.value)]
    assert seen == [11.0, 12.0]
    assert [float(each) for each in (own, read, assigned)] == [1.0, 2.0, 3.0]
    assert [(variable is own, float(value)) for variable, value in scope.updates] == [(False, 12.0), (True, 11.0)]
    assert {id(each) for each in scope.borrowed.values()} == {id(read), id(assigned)}


def test_no_gradient_flows_to_what_was_assigned() -> None:
    statistic, x = keras.Variable(0.0, trainable=False), tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with NotingScope([]):
            statistic.assign(x)
            y = x * statistic
    assert float(tape.gradient(y, x)) == 2.0
