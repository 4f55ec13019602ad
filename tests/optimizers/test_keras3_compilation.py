from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf

from tfmp.optimizers.keras3_compilation import can_be_compiled, run_compiled, worth_compiling
from tfmp.types import Gradient, Gradients


def _sums_into(total: tf.Variable, traced: list[int]) -> Callable[[Gradient], None]:
    """Return a function that adds half of a gradient's sum to `total`; each trace of it appends to `traced`."""

    def update(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        traced.append(1)
        (grad,), (factor,) = grads, tensors
        total.assign_add(factor * tf.reduce_sum(tf.convert_to_tensor(grad)))

    return lambda grad: run_compiled(update, [grad], [0.5])


def test_sparse_gradients_of_unknown_size_are_summed_correctly() -> None:
    total, traced = tf.Variable(0.0), []
    run = _sums_into(total, traced)

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)])
    def step(values: tf.Tensor, indices: tf.Tensor) -> None:
        run(tf.IndexedSlices(values, indices, tf.constant([4, 2])))

    for count in (5, 6, 7, 2, 0):
        step(np.ones([count, 2], np.float32), np.full([count], 1, np.int32))
    assert float(total) == 20
    assert len(traced) == 1


def test_each_trace_of_a_function_compiles_its_own_program() -> None:
    total, traced = tf.Variable(0.0), []
    run = _sums_into(total, traced)
    step = tf.function(run)
    for length in (2, 2, 4):
        step(tf.ones([length]))
    assert float(total) == 4
    assert len(traced) == 2


def test_update_is_not_compiled_in_eager_mode_under_xla_or_by_replicas(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    seen = [can_be_compiled()]
    tf.function(lambda: two_replicas.run(lambda: seen.append(can_be_compiled())))()
    tf.function(lambda: seen.append(can_be_compiled()), jit_compile=True)()
    assert seen == [False] * 4
    tf.function(lambda: seen.append(can_be_compiled()))()
    assert seen[-1]


@pytest.mark.parametrize(
    ("shapes", "worth"),
    [([[2**20]], True), ([[2**20 - 1]], False), ([[2**14]] * 65, True), ([[2**13]] * 200, False), ([], False)],
)
def test_update_is_worth_compiling_for_many_values_in_large_variables(shapes: list[list[int]], worth: bool) -> None:
    assert worth_compiling([tf.Variable(tf.zeros(shape)) for shape in shapes]) is worth


def test_variables_on_several_devices_are_not_compiled(two_replicas: tf.distribute.MirroredStrategy) -> None:
    variables = []
    for device in two_replicas.extended.worker_devices:
        with tf.device(device):
            variables.append(tf.Variable(tf.zeros([2**20])))
    assert not worth_compiling(variables)
    assert worth_compiling(variables[:1])
