"""A detector that the user selects decides in every front-end, and the report names the variables that overflowed."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import eager_steps, for_every_front_end, for_every_keras, kernel_and_bias, optimizer, take_step, values

import tfmp

tf1 = tf.compat.v1

_SCALE = 1024.0

#: The type in which values saturate, and its largest value.
_TYPES = pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("float8_e4m3fn", 448.0)])


def _wrap(inner: Any, dtype: str) -> Any:
    manager = tfmp.ExponentialUpdateLossScaleManager(_SCALE, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(inner, manager, overflow_detector=tfmp.SaturationDetector(dtype=dtype))


def _wrapped_sgd(dtype: str) -> Any:
    return _wrap(tf1.train.GradientDescentOptimizer(0.5), dtype)


def _overflowed(names: Any, last: Any) -> dict[str, list[int]]:
    """Return the counts of the variables that overflowed, by the last part of their names."""
    rows = zip(names, last.tolist(), strict=True)
    return {name.split("/")[-1].split(":")[0]: counts for name, counts in rows if any(counts)}


def _counts_in_graph(session: tf1.Session, opt: Any) -> dict[str, list[int]]:
    (report,) = opt.overflow_reports()
    return _overflowed(report.names, session.run(report.last))


def _counts_in_eager_code(opt: Any) -> dict[str, list[int]]:
    (report,) = opt.overflow_reports()
    return _overflowed(report.names, report.last.numpy())


@pytest.mark.graph
@_TYPES
def test_saturated_step_is_skipped_in_a_graph(session: tf1.Session, dtype: str, largest: float) -> None:
    factor = tf1.placeholder(tf.float32, [])
    a, b = (tf1.get_variable(name, initializer=[1.0, 2.0]) for name in ("a", "b"))
    opt = _wrapped_sgd(dtype)
    train_op = opt.minimize(tf.reduce_sum(a) * factor + tf.reduce_sum(b) * 0.0625)
    status = opt.loss_scale, opt.skipped_steps
    session.run(tf1.global_variables_initializer())
    session.run(train_op, {factor: largest / _SCALE})
    assert session.run(status) == (_SCALE / 2, 1)
    assert session.run(a).tolist() == [1, 2]
    assert _counts_in_graph(session, opt) == {"a": [0, 0, 2]}
    session.run(train_op, {factor: 0.0625})
    assert session.run(a).tolist() == [1 - 0.03125, 2 - 0.03125]


@_TYPES
def test_saturated_step_is_skipped_by_eager_v1(dtype: str, largest: float) -> None:
    a, b = (tf.Variable([1.0, 2.0], name=name) for name in ("a", "b"))
    opt = _wrapped_sgd(dtype)
    for factor in (largest / _SCALE, 0.0625):
        opt.minimize(lambda factor=factor: tf.reduce_sum(a) * factor + tf.reduce_sum(b) * 0.0625, var_list=[a, b])
    assert values([a, b]) == [[1 - 0.03125, 2 - 0.03125]] * 2
    assert (float(opt.loss_scale), int(opt.skipped_steps)) == (_SCALE / 2, 1)
    assert _counts_in_eager_code(opt) == {"a": [0, 0, 2]}


_WAYS = {
    "eager": lambda step: step,
    "function": tf.function,
    "xla": lambda step: tf.function(step, jit_compile=True),
}


@for_every_keras()
@_TYPES
@pytest.mark.parametrize("way", _WAYS.values(), ids=_WAYS)
def test_saturated_step_is_skipped_by_every_keras(
    keras: ModuleType, way: Callable[[Any], Any], dtype: str, largest: float
) -> None:
    variables = kernel_and_bias(keras)
    before = values(variables)
    opt = _wrap(optimizer(keras), dtype)
    opt.build(variables)
    step = way(lambda kernel: take_step(opt, variables, [tf.fill([2, 2], kernel), tf.fill([2], 0.0625)]))
    step(tf.constant(largest / _SCALE))
    assert values(variables) == before
    assert (float(opt.loss_scale), int(opt.skipped_steps)) == (_SCALE / 2, 1)
    (counts,) = _counts_in_eager_code(opt).values()
    assert counts == [0, 0, 4]
    step(tf.constant(0.0625))
    assert values(variables) == [[[1 - 0.03125, 2 - 0.03125], [3 - 0.03125, 4 - 0.03125]], [5 - 0.03125, 6 - 0.03125]]


@for_every_keras()
@_TYPES
def test_saturated_step_is_skipped_by_two_replicas(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, dtype: str, largest: float
) -> None:
    with two_replicas.scope():
        kernel, _ = kernel_and_bias(keras)
        opt = _wrap(optimizer(keras), dtype)
        opt.build([kernel])

    def on_replica(factors: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        take_step(opt, [kernel], [tf.fill([2, 2], tf.gather(factors, replica))])

    step = tf.function(lambda factors: two_replicas.run(on_replica, [factors]))
    # Keras 2 checks the sum of the gradients, so the other replica's gradient is 0.
    step(tf.constant([0.0, largest / _SCALE]))
    assert kernel.numpy().tolist() == [[1, 2], [3, 4]]
    assert (float(opt.loss_scale), int(opt.skipped_steps)) == (_SCALE / 2, 1)
    assert list(_counts_in_eager_code(opt).values()) == [[0, 0, 4]]
    step(tf.constant([0.0625, 0.0625]))
    assert kernel.numpy().tolist() == [[1 - 0.0625, 2 - 0.0625], [3 - 0.0625, 4 - 0.0625]]


@pytest.mark.graph
@_TYPES
def test_saturated_step_is_skipped_by_two_replicas_of_a_graph(
    two_replicas: tf.distribute.MirroredStrategy, dtype: str, largest: float
) -> None:
    with tf.Graph().as_default(), tf1.Session() as session, two_replicas.scope():
        factors = tf1.placeholder(tf.float32, [2])
        a = tf1.get_variable("a", initializer=[1.0, 2.0])
        opt = _wrapped_sgd(dtype)

        def on_replica() -> tf.Operation:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return opt.minimize(tf.reduce_sum(a) * tf.gather(factors, replica), var_list=[a])

        train_op = tf.group(two_replicas.experimental_local_results(two_replicas.run(on_replica)))
        local = two_replicas.experimental_local_results(a)
        session.run(tf1.global_variables_initializer())
        session.run(train_op, {factors: [0.0625, largest / _SCALE]})
        assert [value.tolist() for value in session.run(local)] == [[1, 2]] * 2
        assert session.run([opt.loss_scale, opt.skipped_steps]) == [_SCALE / 2, 1]
        assert _counts_in_graph(session, opt) == {"a": [0, 0, 2]}
        session.run(train_op, {factors: [0.0625, 0.0625]})
        assert [value.tolist() for value in session.run(local)] == [[1 - 0.0625, 2 - 0.0625]] * 2


@for_every_keras()
@for_every_front_end
def test_what_replaces_a_method_of_the_detectors_class_decides_only_while_it_is_there(
    keras: ModuleType, front_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, steps: int) -> None:
        for _ in range(steps):
            step(tf.constant([8.0, 8.0]))

    manager = tfmp.FixedLossScaleManager(8)
    _, step = eager_steps(keras, front_end, manager)
    run(steps=70)
    with monkeypatch.context() as patched:
        patched.setattr(tfmp.NonFiniteDetector, "all_finite", lambda *_: tf.constant(False))
        run(steps=3)
        # Another optimizer of the process takes its first steps meanwhile.
        other = tfmp.FixedLossScaleManager(8)
        _, step = eager_steps(keras, front_end, other)
        run(steps=70)
    run(steps=5)
    assert [int(count) for count in manager.get_status()[4:6]] == [70, 3]
    assert [int(count) for count in other.get_status()[4:6]] == [5, 70]


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("skip_spikes", [False, True])
def test_method_that_one_detector_has_got_decides(keras: ModuleType, front_end: str, skip_spikes: bool) -> None:
    manager, detector = tfmp.FixedLossScaleManager(8), tfmp.NonFiniteDetector()
    # To look for spikes, a step measures the norm of the gradients.
    settings = {"skip_spikes": tfmp.SpikeDetector()} if skip_spikes else {}
    weight, step = eager_steps(keras, front_end, manager, overflow_detector=detector, **settings)
    step(tf.constant([8.0, 8.0]))
    setattr(detector, "all_finite", lambda *_: tf.constant(False))  # noqa: B010 - a type checker refuses the assignment
    for _ in range(2):
        step(tf.constant([8.0, 8.0]))
    assert [int(count) for count in manager.get_status()[4:6]] == [1, 2]
    assert values([weight]) == [[0.5, 1.5]]


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("num_rows", [16, 2**13])
def test_rows_that_a_variable_holds_are_checked_anew_in_each_step(
    keras: ModuleType, front_end: str, num_rows: int
) -> None:
    manager = tfmp.FixedLossScaleManager(8)
    weight, step = eager_steps(keras, front_end, manager, np.zeros([num_rows, 2]))
    rows, seen = tf.Variable(tf.zeros([num_rows, 2])), []
    for value in (8.0, math.inf, 16.0, math.nan, -8.0):
        rows.assign(tf.fill([num_rows, 2], value))
        step(tf.IndexedSlices(rows, tf.range(num_rows), tf.constant([num_rows, 2])))
        seen.append((int(manager.get_status().skipped_steps), {*weight.numpy().flat}))
    assert seen == [(0, {-0.5}), (1, {-0.5}), (1, {-1.5}), (2, {-1.5}), (2, {-1.0})]


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("has_shape", [True, False])
def test_rows_may_be_arrays_of_numpy(keras: ModuleType, front_end: str, has_shape: bool) -> None:
    manager = tfmp.FixedLossScaleManager(8)
    weight, step = eager_steps(keras, front_end, manager, np.zeros([4, 2]))
    for value in (8, math.inf, 16):
        rows = np.full([2, 2], value, np.float32)
        step(tf.IndexedSlices(rows, np.array([3, 1]), np.array([4, 2]) if has_shape else None))
    assert weight.numpy().tolist() == [[0, 0], [-1.5, -1.5], [0, 0], [-1.5, -1.5]]
    assert int(manager.get_status().skipped_steps) == 1
