"""Optimizers of every Keras: which programs they have, sums over replicas, and `iterations`."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, values, variable

from tfmp.hosts.keras.adapters import Keras2Adapter, Keras3Adapter, KerasAdapter
from tfmp.hosts.keras.compiler import UpdateCompiler

pytestmark = pytest.mark.essential

_for_every_keras_2 = for_every_keras("keras2", "tf_keras")


def _adapter(opt: Any, variables: Sequence[Any], jit_compile: bool = False) -> KerasAdapter:
    return KerasAdapter(opt, variables, compiler=UpdateCompiler(opt, jit_compile))


@for_every_keras()
@pytest.mark.parametrize(
    ("of_variable", "of_grad", "unscales"),
    [
        ("float32", "float32", True),
        ("float32", "float16", True),
        ("float32", None, True),
        ("float64", "float64", True),
        # A gradient that is finite could overflow the type of the variable when it is cast.
        ("float32", "float64", False),
        ("float16", "float16", False),
        ("float16", None, False),
        ("bfloat16", "bfloat16", False),
    ],
)
def test_gradient_is_unscaled_late_if_it_then_stays_finite_in_its_variables_type(
    keras: ModuleType, of_variable: str, of_grad: str | None, unscales: bool
) -> None:
    kernel, bias = variable(keras, [1.0], dtype=of_variable), variable(keras, [1.0])
    grad = None if of_grad is None else tf.constant([1.0], of_grad)
    program = _adapter(optimizer(keras), [bias, kernel]).program([tf.constant([1.0]), grad])
    assert (program is not None) is unscales


@for_every_keras()
def test_next_value_of_a_variable_is_not_unscaled_late(keras: ModuleType) -> None:
    kernel, scale = variable(keras, [1.0]), variable(keras, [1.0])
    scale.overwrite_with_gradient = True
    assert _adapter(optimizer(keras), [kernel, scale]).program([tf.ones([1])] * 2) is None


@for_every_keras()
def test_replicas_unscale_before_the_check(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        adapter = _adapter(optimizer(keras), [variable(keras, [1.0])])
    found = []
    two_replicas.run(lambda: found.append(adapter.program([tf.constant([1.0])])))
    assert found == [None, None]
    assert adapter.program([tf.constant([1.0])]) is not None


@for_every_keras()
def test_program_unscales_and_clips_by_what_it_measured(keras: ModuleType) -> None:
    opt, kernel = optimizer(keras, global_clipnorm=0.5), variable(keras, [1.0, 2.0])
    adapter, grads, loss_scale = (
        _adapter(opt, [kernel], jit_compile=True),
        [tf.constant([24.0, 32.0])],
        tf.constant(8.0),
    )
    adapter.prepare([kernel])
    program = adapter.program(grads)
    measures = program.measure(grads, loss_scale)
    assert [measure.numpy().tolist() for measure in measures] == [[(24**2 + 32**2) / 2]]
    program.apply(grads, loss_scale, measures)
    np.testing.assert_allclose(kernel.numpy(), [1 - 0.15, 2 - 0.2], rtol=1e-6)


@_for_every_keras_2
def test_gradients_are_applied_and_the_step_is_counted(keras: ModuleType) -> None:
    opt, variables = optimizer(keras), [variable(keras, [1.0, 2.0]), variable(keras, [3.0], "bias")]
    adapter = Keras2Adapter(opt, variables)
    adapter.prepare(variables)
    adapter.apply([tf.constant([1.0, 1.0]), tf.constant([2.0])])
    assert values(variables) == [[0.5, 1.5], [2]]
    assert int(opt.iterations) == 1


@_for_every_keras_2
def test_iterations_count_skipped_steps_only_if_they_are_to(keras: ModuleType) -> None:
    opt, kernel = optimizer(keras), variable(keras, 1.0)
    assert Keras2Adapter(opt, [kernel]).on_step(tf.constant(False)) is None
    assert int(opt.iterations) == 0
    adapter = Keras2Adapter(opt, [kernel], counts_skipped_steps=True)
    iterations = []
    for applied in (False, True, False):
        adapter.on_step(tf.constant(applied))
        iterations.append(int(opt.iterations))
    # The optimizer itself counts a step that it applies.
    assert iterations == [1, 1, 2]


@_for_every_keras_2
@pytest.mark.parametrize("aggregates", [True, False])
def test_reduce_sums_over_replicas_unless_gradients_are_summed_already(
    keras: ModuleType, aggregates: bool, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        opt, kernel = optimizer(keras), variable(keras, 1.0)

    def reduced() -> tf.Tensor:
        adapter = Keras2Adapter(opt, [kernel], aggregates=aggregates)
        # Either way the core must not expect the optimizer to sum when it applies them.
        assert adapter.sums_first
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        (grad,) = adapter.reduce([tf.cast(replica, tf.float32) + 1])
        return grad

    found = tf.function(lambda: two_replicas.experimental_local_results(two_replicas.run(reduced)))()
    assert [float(grad) for grad in found] == ([3, 3] if aggregates else [1, 2])


@_for_every_keras_2
def test_reduce_averages_what_is_not_averaged_yet(keras: ModuleType) -> None:
    adapter = Keras2Adapter(optimizer(keras), [variable(keras, 1.0)], average=lambda grads: [grads[0] / 2])
    assert [float(grad) for grad in adapter.reduce([tf.constant(3.0)])] == [1.5]


@_for_every_keras_2
def test_replicas_apply_a_sum_as_it_is(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        opt, kernel = optimizer(keras), variable(keras, 4.0)
        opt.build([kernel])

    def step() -> None:
        Keras2Adapter(opt, [kernel]).apply([tf.constant(2.0)])

    tf.function(lambda: two_replicas.run(step))()
    assert [float(value) for value in two_replicas.experimental_local_results(kernel)] == [3, 3]


@for_every_keras("keras3")
@pytest.mark.parametrize("jit_compile", [True, False])
def test_gradients_in_true_magnitude_are_applied_as_they_are(keras: ModuleType, jit_compile: bool) -> None:
    opt, kernel = optimizer(keras), variable(keras, [1.0, 2.0])
    adapter = Keras3Adapter(opt, [kernel], compiler=UpdateCompiler(opt, jit_compile))
    grads = [tf.constant([1.0, 2.0])]
    adapter.prepare([kernel])
    assert (adapter.compiled_program(grads) is not None) is jit_compile
    adapter.apply(grads)
    assert values([kernel]) == [[0.5, 1]]
    assert int(opt.iterations) == 1


@for_every_keras()
def test_variables_that_have_a_gradient_decide_whether_the_program_is_compiled(keras: ModuleType) -> None:
    opt, large = optimizer(keras), variable(keras, np.zeros([1024, 1024]))
    # So many small ones, none like another, that compiling the update of all would take longer than it saves.
    variables = [large, *(variable(keras, np.ones([index]), f"small_{index}") for index in range(64))]
    adapter = KerasAdapter(opt, variables, compiler=UpdateCompiler(opt, "auto"), leaves_out_none=True)
    opt.build(variables)
    grads, small = tf.zeros([1024, 1024]), [tf.ones([index]) for index in range(64)]
    for given, is_compiled in [([grads, *[None] * 64], True), ([grads, *small], False), ([None, *small], False)]:
        assert adapter.program(given).is_compiled is is_compiled


@for_every_keras()
def test_optimizer_itself_clips_what_nobody_measured(keras: ModuleType) -> None:
    # The sum of the squares is infinite in float32, and Keras' factor is then 0 or NaN.
    opts, grads = [optimizer(keras, global_clipnorm=1.0) for _ in range(2)], [tf.fill([2], 1e20)]
    (plain,), (kernel,) = [variable(keras, [0.0, 0.0])], [variable(keras, [0.0, 0.0])]
    opts[0].build([plain])
    opts[1].build([kernel])
    opts[0].apply_gradients(zip(grads, [plain], strict=True))
    adapter = _adapter(opts[1], [kernel], jit_compile=True)
    assert adapter.compiled_program(grads) is not None
    adapter.apply(grads)
    np.testing.assert_array_equal(kernel.numpy(), plain.numpy())
