"""Windows of micro-batches in every Keras, beside what all hosts do alike: on replicas, compiled, and in files."""

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    for_every_keras,
    gradients,
    kernel_and_bias,
    num_programs,
    optimizer,
    take_step,
    values,
    variable,
)

import tfmp


def _accumulating(inner: Any, accumulation_steps: int = 2, *, scale: float = SCALE, **options: Any) -> Any:
    """Wrap an optimizer, with a manager that halves the scale at each overflow."""
    manager = tfmp.ExponentialUpdateLossScaleManager(scale, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(inner, manager, accumulation_steps=accumulation_steps, **options)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize(
    ("options", "jit_compile"), [({}, True), ({}, False), ({"global_clipnorm": 0.5}, True)], ids=str
)
@for_every_keras()
def test_update_at_the_end_of_a_window_is_compiled_and_that_of_the_mean(
    keras: ModuleType, options: dict[str, Any], jit_compile: bool, name: str
) -> None:
    opt, plain = (
        _accumulating(optimizer(keras, name, **options), jit_compile=jit_compile),
        optimizer(keras, name, **options),
    )
    trained, expected = kernel_and_bias(keras), kernel_and_bias(keras)
    opt.build(trained)

    def step(grads: list[tf.Tensor]) -> None:
        take_step(opt, trained, grads)

    assert (num_programs(step, gradients(0)) > 0) is jit_compile
    run = tf.function(step)
    for seed in range(4):
        run(gradients(seed))
    for seed in (0, 2):
        take_step(
            plain,
            expected,
            [(one + other) / 2 for one, other in zip(gradients(seed), gradients(seed + 1), strict=True)],
        )
    for one, other in zip(trained, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)


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
        weights = {float(part.numpy()) for part in self._strategy.experimental_local_results(weight)}
        counts = [int(each) for each in (self.opt.iterations.numpy(), self.opt.applied_steps, self.opt.skipped_steps)]
        return [float(self.opt.loss_scale), *counts, weights]


@pytest.mark.parametrize("overflow_drops", ["window", "micro_batch"])
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


@for_every_keras("keras2", "tf_keras")
def test_skipped_window_moves_iterations_by_one_if_skipped_steps_count(keras: ModuleType) -> None:
    training = _Training(tf.distribute.get_strategy(), keras, iterations_include_skipped_steps=True)
    counts = training.feed(*([grad] for grad in (1, math.inf, math.inf, math.inf, 1, 1)))[:-1]
    assert counts == [SCALE / 4, 3, 1, 2]


@for_every_keras()
def test_micro_batch_that_overflows_in_float16_is_found_by_fit(keras: ModuleType) -> None:
    opt = _accumulating(optimizer(keras), scale=2.0**16, overflow_drops="micro_batch")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input([1]), layer])
    model.compile(opt, lambda target, output: tf.cast(target, tf.float32) * tf.cast(output, tf.float32))
    # The scaled gradients of the first window are 2**14 and 2**16. The second is infinite in float16.
    y = np.float32([[0.25], [1], [0.25], [1]])
    model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
    assert values(model.weights) == [[[-0.5 * (0.25 + 0.625)]]]
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (2.0**15, 2, 0)


@for_every_keras()
def test_optimizer_that_does_not_accumulate_has_no_buffers(keras: ModuleType) -> None:
    names = []
    for options in ({"accumulation_steps": 1, "overflow_drops": "micro_batch", "micro_batches_per_epoch": 3}, {}):
        opt = tfmp.LossScaleOptimizer(optimizer(keras, name="Adam"), tfmp.FixedLossScaleManager(8), **options)
        opt.build(kernel_and_bias(keras))
        names.append([variable.name for variable in opt.variables])
    assert names[0] == names[1]
