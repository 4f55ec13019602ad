"""Accumulation of gradients by the wrapper, in every Keras: a window of micro-batches is one step."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    fit_linear,
    for_every_keras,
    gradients,
    kernel_and_bias,
    linear_model,
    optimizer,
    take_step,
    values,
    values_but_state,
    variable,
)

import tfmp
from tfmp.core.accumulation.settings import accumulation_settings
from tfmp.optimizers.keras.accumulation import KerasAccumulation, variables_of_each_replica

_EXECUTIONS: dict[str, Callable[..., Any]] = {
    "eager": lambda step: step,
    "function": tf.function,
    "xla": lambda step: tf.function(step, jit_compile=True),
}
for_every_policy = pytest.mark.parametrize("overflow_drops", ["window", "micro_batch"])


def _accumulating(inner: Any, accumulation_steps: int = 2, *, scale: float = SCALE, **options: Any) -> Any:
    """Wrap an optimizer, with a manager that halves the scale at each overflow."""
    manager = tfmp.ExponentialUpdateLossScaleManager(scale, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(inner, manager, accumulation_steps=accumulation_steps, **options)


def _mean(*parts: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.add_n(grads) / len(grads) for grads in zip(*parts, strict=True)]


def _counts(opt: Any) -> tuple[float, int, int, int]:
    applied, skipped = int(opt.applied_steps), int(opt.skipped_steps)
    return float(opt.loss_scale), int(opt.iterations.numpy()), applied, skipped


@pytest.mark.parametrize(("name", "execution"), [("SGD", "eager"), ("SGD", "function"), ("Adam", "function")])
@for_every_keras()
def test_window_trains_as_one_large_batch(keras: ModuleType, name: str, execution: str) -> None:
    opt, plain = _accumulating(optimizer(keras, name), 4), optimizer(keras, name)
    trained, expected = kernel_and_bias(keras), kernel_and_bias(keras)
    opt.build(trained)
    step = _EXECUTIONS[execution](lambda grads: take_step(opt, trained, grads))
    for window in range(2):
        parts = [gradients(4 * window + part) for part in range(4)]
        at_start = values(trained)
        for part in parts:
            # Before the window ends only the buffers change.
            assert values(trained) == at_start
            assert int(opt.iterations) == window
            step(part)
        take_step(plain, expected, _mean(*parts))
        for one, other in zip([*trained, *opt.inner_optimizer.variables], [*expected, *plain.variables], strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0 if name == "SGD" else 1e-6)
    assert _counts(opt) == (SCALE, 2, 2, 0)


@pytest.mark.parametrize(
    ("overflow_drops", "execution"),
    [("window", "eager"), ("window", "function"), ("micro_batch", "function"), ("micro_batch", "xla")],
)
@for_every_keras()
def test_overflow_drops_the_window_or_the_micro_batch(keras: ModuleType, overflow_drops: str, execution: str) -> None:
    opt = _accumulating(optimizer(keras, momentum=0.5), 4, overflow_drops=overflow_drops)
    plain = optimizer(keras, momentum=0.5)
    trained, expected = kernel_and_bias(keras), kernel_and_bias(keras)
    opt.build(trained)
    step = _EXECUTIONS[execution](lambda grads: take_step(opt, trained, grads))
    before: list[Any] = []
    for window, overflows in enumerate([(), (1, 2), ()]):
        before = [*values(trained), *values_but_state(opt)]
        parts = [gradients(4 * window + part) for part in range(4)]
        for part, grads in enumerate(parts):
            step(gradients(4 * window + part, (math.inf, math.nan)[part % 2]) if part in overflows else grads)
        if overflows and overflow_drops == "window":
            assert [*values(trained), *values_but_state(opt)] == before
        else:
            take_step(plain, expected, _mean(*(part for index, part in enumerate(parts) if index not in overflows)))
        assert values(trained) == values(expected)
    dropped = overflow_drops == "window"
    # The manager is updated once for each window, so the scale is halved once.
    assert _counts(opt) == (SCALE / 2, 3 - dropped, 3 - dropped, int(dropped))


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize("execution", ["function", "xla"])
@for_every_keras()
def test_sparse_gradients_and_none_are_accumulated(keras: ModuleType, execution: str) -> None:
    table, unused = variable(keras, np.ones([4, 1]), "table"), variable(keras, [1.0], "unused")
    of_tensorflow = [getattr(table, "value", table) if keras.__version__.startswith("3.") else table]
    opt = _accumulating(optimizer(keras))
    opt.build([table, unused])

    @_EXECUTIONS[execution]
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scaled = opt.scale_loss(tf.reduce_sum(tf.gather(of_tensorflow[0], rows)))
        [grad] = tape.gradient(scaled, of_tensorflow)
        assert isinstance(grad, tf.IndexedSlices)
        opt.apply_gradients([(grad, table), (None, unused)])

    for rows in ([0, 1], [1, 1], [3, 3], [3, 3]):
        step(tf.constant(rows))
    assert values([table, unused]) == [[[0.75], [0.25], [1], [0]], [1]]
    assert _counts(opt) == (SCALE, 2, 2, 0)


@for_every_keras()
def test_last_window_of_an_epoch_divides_by_its_number_of_micro_batches(keras: ModuleType) -> None:
    weight = variable(keras, 0.0)
    opt = _accumulating(optimizer(keras, learning_rate=1.0), 4, micro_batches_per_epoch=102)
    opt.build([weight])
    step = tf.function(lambda grad: take_step(opt, [weight], [grad]))
    # The last window of the epoch has two micro-batches, 6 and 2.
    for grad in [*[1.0] * 100, 6.0, 2.0, *[1.0] * 3]:
        step(tf.constant(grad))
    assert values([weight]) == [-25 - 4]
    step(tf.constant(5.0))
    assert values([weight]) == [-25 - 4 - 2]
    assert _counts(opt) == (SCALE, 27, 27, 0)


@pytest.mark.parametrize(
    ("options", "jit_compile"), [({}, True), ({}, False), ({"global_clipnorm": 0.5}, True)], ids=str
)
@for_every_keras("keras3")
def test_update_at_the_end_of_a_window_is_compiled(
    keras: ModuleType, options: dict[str, Any], jit_compile: bool
) -> None:
    opt, plain = _accumulating(optimizer(keras, **options), jit_compile=jit_compile), optimizer(keras, **options)
    trained, expected = kernel_and_bias(keras), kernel_and_bias(keras)
    opt.build(trained)
    step = tf.function(lambda grads: take_step(opt, trained, grads))
    graph = step.get_concrete_function(gradients(0)).graph.as_graph_def()
    assert ("_XlaMustCompile" in str(graph)) is jit_compile
    for seed in range(4):
        step(gradients(seed))
    for seed in (0, 2):
        take_step(plain, expected, _mean(gradients(seed), gradients(seed + 1)))
    for one, other in zip(trained, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)


@for_every_keras()
def test_unscaled_gradients_are_not_unscaled_again_when_accumulated(keras: ModuleType) -> None:
    weight = variable(keras, 0.0)
    opt = _accumulating(optimizer(keras))
    for factor in (1.0, 3.0):
        with tf.GradientTape() as tape:
            scaled = opt.get_scaled_loss(tf.reduce_sum(weight * factor))
        opt.apply_gradients(zip(opt.get_unscaled_gradients(tape.gradient(scaled, [weight])), [weight], strict=True))
    assert values([weight]) == [-1]


class _Training:
    """A weight that starts at 0, whose gradient is the input of each replica."""

    def __init__(self, strategy: tf.distribute.Strategy, keras: ModuleType, **options: Any) -> None:
        self._strategy = strategy
        with strategy.scope():
            self.weight = variable(keras, 0.0)
            self.opt = _accumulating(optimizer(keras, momentum=0.5), **options)
            self.opt.build([self.weight])

        def on_replica(grad: tf.Tensor) -> None:
            take_step(self.opt, [self.weight], [grad / strategy.num_replicas_in_sync])

        self._run = tf.function(lambda grad: strategy.run(on_replica, args=(grad,)))

    def feed(self, *rows: Any) -> list[Any]:
        """Train on rows with a column for each replica; return the scale, the counts, and the replicas' weights."""
        for row in rows:
            self._run(
                self._strategy.experimental_distribute_values_from_function(
                    lambda context, row=row: tf.constant(row[context.replica_id_in_sync_group], tf.float32)
                )
            )
        weight = self.weight if isinstance(self.weight, tf.Variable) else self.weight.value
        return [*_counts(self.opt), {float(part.numpy()) for part in self._strategy.experimental_local_results(weight)}]


@for_every_policy
@for_every_keras()
def test_two_replicas_with_an_overflow_on_the_second_equal_one_device(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, overflow_drops: str
) -> None:
    fed = np.array([[1, 3], [5, 7], [2, math.inf], [6, math.nan], [1, 2], [4, 1], [8, 4], [2, 2]])
    options = {"overflow_drops": overflow_drops, "micro_batches_per_epoch": 7}
    found = _Training(two_replicas, keras, **options).feed(*fed)
    # One device gets the same micro-batches one after the other.
    options = {"overflow_drops": overflow_drops, "micro_batches_per_epoch": 14, "accumulation_steps": 4}
    assert found == _Training(tf.distribute.get_strategy(), keras, **options).feed(*fed.reshape(-1, 1))
    dropped = overflow_drops == "window"
    # The means of the windows are 4; 4, that of 2 and 6, unless the window is dropped; 2; and 6 in the shorter window.
    weight = -8 if dropped else -11.75
    assert found == [SCALE / 2, 4 - dropped, 4 - dropped, int(dropped), {weight}]


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@for_every_keras()
def test_sums_of_two_replicas_are_saved_as_one_sum(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path
) -> None:
    training, resumed = _Training(two_replicas, keras), _Training(two_replicas, keras)
    training.feed([1, 3], [2, 6], [1, 5])
    with h5py.File(tmp_path / "optimizer.h5", "w") as file:
        # Keras saves both: the optimizer, and what it finds among its attributes.
        for part in ("optimizer", "state"):
            saved, loaded = (
                each.opt if part == "optimizer" else each.opt._loss_scale_state for each in (training, resumed)
            )
            group = file.create_group(part)
            saved.save_own_variables(group)
            loaded.load_own_variables(group)
    resumed.weight.assign(-1.5)
    assert resumed.feed([6, 8]) == training.feed([6, 8]) == [SCALE, 2, 2, 0, {-1.5 - 0.75 - 2.5}]


def _target_times_output(target: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    return tf.cast(target, tf.float32) * tf.cast(output, tf.float32)


@for_every_keras()
def test_fit_ends_a_window_with_each_epoch(keras: ModuleType) -> None:
    opt = _accumulating(optimizer(keras), micro_batches_per_epoch=3)
    model = linear_model(keras, opt)
    y = np.float32([[1], [math.inf], [5]])
    settings: dict[str, Any] = {"batch_size": 1, "shuffle": False, "verbose": 0}
    history = model.fit(np.ones_like(y), y, epochs=2, callbacks=[tfmp.LossScaleCallback()], **settings).history
    assert values(model.weights) == [[[-0.5 * (5 + 5)]]]
    assert _counts(opt) == (SCALE / 4, 2, 2, 2)
    assert (history["skipped_steps"], history["loss_scale"]) == ([1, 2], [SCALE / 2, SCALE / 4])


@for_every_keras()
def test_micro_batch_that_overflows_in_float16_is_found(keras: ModuleType) -> None:
    opt = _accumulating(optimizer(keras), scale=2.0**16, overflow_drops="micro_batch")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input([1]), layer])
    model.compile(opt, _target_times_output)
    # The scaled gradients of the first window are 2**14 and 2**16. The second is infinite in float16.
    fit_linear(model, [0.25, 1, 0.25, 1])
    assert values(model.weights) == [[[-0.5 * (0.25 + 0.625)]]]
    assert _counts(opt) == (2.0**15, 2, 2, 0)


@for_every_keras("keras2", "tf_keras")
def test_skipped_window_moves_iterations_by_one_if_skipped_steps_count(keras: ModuleType) -> None:
    weight = variable(keras, 0.0)
    opt = _accumulating(optimizer(keras), iterations_include_skipped_steps=True)
    for grad in [1, math.inf, math.inf, math.inf, 1, 1]:
        take_step(opt, [weight], [tf.constant(grad, tf.float32)])
    assert _counts(opt) == (SCALE / 4, 3, 1, 2)


@for_every_keras()
def test_config_keeps_the_accumulation(keras: ModuleType) -> None:
    opt = _accumulating(optimizer(keras), 3, overflow_drops="micro_batch", micro_batches_per_epoch=7)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(opt))
    assert again.get_config() == opt.get_config()
    config = again.get_config()
    found = [config[name] for name in ("accumulation_steps", "overflow_drops", "micro_batches_per_epoch")]
    assert found == [3, "micro_batch", 7]


@for_every_keras()
def test_optimizer_that_does_not_accumulate_has_no_buffers(keras: ModuleType) -> None:
    names = []
    for options in ({"accumulation_steps": 1, "overflow_drops": "micro_batch", "micro_batches_per_epoch": 3}, {}):
        opt = tfmp.LossScaleOptimizer(optimizer(keras, name="Adam"), tfmp.FixedLossScaleManager(8), **options)
        opt.build(kernel_and_bias(keras))
        names.append([variable.name for variable in opt.variables])
    assert names[0] == names[1]


@for_every_keras()
def test_setting_out_of_range_is_refused(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"accumulation_steps must be a whole number from 1 .*, got 0"):
        _accumulating(optimizer(keras), 0)


@for_every_keras()
def test_gradients_of_other_variables_are_refused(keras: ModuleType) -> None:
    opt, variables = _accumulating(optimizer(keras)), kernel_and_bias(keras)
    opt.build(variables)
    for given in (variables[:1], variables[::-1]):
        with pytest.raises(
            ValueError, match=r"differ from the 2 that the optimizer was built with, .* None where the loss"
        ):
            take_step(opt, given, [tf.ones(variable.shape) for variable in given])


@pytest.mark.parametrize("name", ["SGD", "MultiOptimizer"])
@for_every_keras("keras3")
def test_accumulating_twice_is_refused(keras: ModuleType, name: str) -> None:
    inner = optimizer(keras, name)
    (inner.optimizers[0] if name == "MultiOptimizer" else inner).gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2, and accumulation_steps=4: .*Leave out"):
        _accumulating(inner, 4)
    assert _accumulating(inner, 1).inner_optimizer is inner


@for_every_keras("keras3")
def test_variable_overwritten_by_its_gradient_is_refused(keras: ModuleType) -> None:
    opt, variables = _accumulating(optimizer(keras)), kernel_and_bias(keras)
    variables[1].overwrite_with_gradient = True
    for _ in range(2):
        with pytest.raises(ValueError, match=r"accumulation_steps=2, .*\(float8 scales\).*: bias\. Leave"):
            take_step(opt, variables, gradients(0))


def _buffer(name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, dtype), name=name, trainable=False)


@for_every_keras()
def test_accumulator_is_made_once_by_the_first_build(keras: ModuleType) -> None:
    accumulation = KerasAccumulation(accumulation_settings(2, "window", None), tfmp.NonFiniteDetector())
    variables = kernel_and_bias(keras)
    # Before it is built, gradients are applied at once.
    assert accumulation.accumulator_of([]) is None
    accumulation.build(variables, _buffer)
    kept = accumulation.accumulator_of(variables)
    assert kept is not None
    accumulation.build(variables[:1], _buffer)
    assert accumulation.accumulator_of(tuple(variables)) is kept
    with pytest.raises(ValueError, match="the gradients are of 2 variables, which differ from the 2"):
        accumulation.accumulator_of(variables[::-1])


def test_variables_made_for_each_replica_are_read_as_their_sum(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope(), variables_of_each_replica():
        total = tf.Variable(0.0, trainable=False)

    def add() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        total.assign_add(tf.cast(replica, tf.float32) + 1)

    tf.function(lambda: two_replicas.run(add))()
    assert [float(value) for value in two_replicas.experimental_local_results(total)] == [1, 2]
    assert float(total.read_value()) == 3
