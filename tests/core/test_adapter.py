"""What an adapter tells the core of an optimizer, and how it applies gradients."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, values, variable

from tfmp.core.adapter import OptimizerAdapter, names_of


class _Descent:
    """An optimizer of a user, which returns what its assignments return."""

    def apply_gradients(self, grads_and_vars: Iterable[tuple[tf.Tensor, tf.Variable]], rate: float = 1.0) -> list[Any]:
        return [weight.assign_sub(grad * rate) for grad, weight in grads_and_vars]


@for_every_keras()
def test_names_are_the_paths_of_keras_3_and_the_names_of_other_variables(keras: ModuleType) -> None:
    layer = keras.layers.Dense(1, name="dense")
    layer.build([1])
    of_keras = ["dense/kernel", "dense/bias"] if keras.__version__[0] == "3" else ["kernel:0", "bias:0"]
    assert names_of([*layer.variables, tf.Variable(1.0, name="own")]) == [*of_keras, "own:0"]


@pytest.mark.graph
def test_dtype_of_a_reference_variable_is_that_of_its_values(session: tf.compat.v1.Session) -> None:
    del session
    variables = [
        tf.compat.v1.Variable(tf.constant(1.0, dtype), use_resource=use_resource)
        for dtype in (tf.float16, tf.float32)
        for use_resource in (False, True)
    ]
    assert OptimizerAdapter(None, variables).dtypes == [tf.float16, tf.float16, tf.float32, tf.float32]


def test_gradients_are_cast_to_their_variables_types_but_next_values_are_not() -> None:
    half, scale = tf.Variable(1.0, dtype=tf.float16), tf.Variable(1.0, dtype=tf.float16)
    scale.overwrite_with_gradient = True
    adapter = OptimizerAdapter(None, [half, tf.Variable(1.0), half, scale])
    assert adapter.overwritten == {3}
    grads = [tf.constant(70000.0), None, tf.IndexedSlices(tf.constant([2.0]), tf.constant([0])), tf.constant(70000.0)]
    overflowed, none, sparse, next_value = adapter.typed(grads)
    assert (overflowed.dtype, float(overflowed)) == (tf.float16, float("inf"))
    assert none is None
    assert isinstance(sparse, tf.IndexedSlices)
    assert (sparse.dtype, sparse.values.numpy().tolist()) == (tf.float16, [2.0])
    assert next_value is grads[3]


@for_every_keras()
def test_prepare_makes_an_optimizers_variables_once(keras: ModuleType) -> None:
    opt, kernel = optimizer(keras, momentum=0.5), variable(keras, [1.0, 2.0])
    adapter = OptimizerAdapter(opt, [kernel])
    adapter.prepare([kernel])
    made = list(map(id, opt.variables))
    momenta = [each for each in opt.variables if tuple(each.shape) == (2,)]
    assert values(momenta) == [[0, 0]]
    adapter.prepare([kernel])
    assert list(map(id, opt.variables)) == made


def test_optimizer_of_a_user_is_applied_without_none_and_with_its_arguments_and_leaves_the_rest_to_the_core() -> None:
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    adapter, grads = OptimizerAdapter(_Descent(), [a, b], {"rate": 0.5}), [None, tf.constant(0.5)]
    # It has no `build`, and needs none.
    adapter.prepare([a, b])
    assert adapter.apply(grads) is None
    assert (float(a), float(b)) == (1, 0.75)
    assert (adapter.program(grads), adapter.sums_first) == (None, False)
    assert (adapter.reduce(grads), adapter.on_step(tf.constant(True))) == (grads, None)
