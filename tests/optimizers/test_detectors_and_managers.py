"""Detectors and managers in steps: what replaces their methods, values that change, scales below 1; and the reports."""

import itertools
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, eager_steps, for_every_front_end, for_every_keras, optimizer, values, variable, wrap

import tfmp


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


def _low(loss_scale: float) -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(loss_scale, 1000, min_loss_scale=2.0**-20)


def _restored(loss_scale: float) -> tfmp.LossScaleManager:
    """Return a manager with a state from a checkpoint of a manager with a lower bound."""
    restored = tfmp.ExponentialUpdateLossScaleManager(1024, 1000)
    restored.state.assign(restored.state.read()._replace(loss_scale=tf.constant(loss_scale)))
    return restored


@for_every_keras()
@pytest.mark.parametrize(
    ("make_manager", "way"),
    [*((_low, way) for way in ("eager", "function", "xla")), (kerases.Halving, "eager"), (_restored, "eager")],
)
def test_gradients_that_unscaling_by_a_scale_below_1_makes_infinite_are_found(
    keras: ModuleType, make_manager: Any, way: str
) -> None:
    variables = kerases.kernel_and_bias(keras)
    opt = tfmp.LossScaleOptimizer(optimizer(keras), make_manager(2.0**-10))
    opt.build(variables)
    before = values(variables)

    def step(kernel: tf.Tensor) -> None:
        opt.scale_loss(tf.constant(1.0))
        opt.apply_gradients(zip([tf.fill([2, 2], kernel), tf.zeros([2])], variables, strict=True))

    run = step if way == "eager" else tf.function(step, jit_compile=way == "xla")
    # The scaled gradient is finite, and the unscaled one is infinite.
    run(tf.constant(2.0**120))
    assert (values(variables), int(opt.skipped_steps)) == (before, 1)
    (report,) = opt.overflow_reports()
    # Of a manager that was restored below its bound, the report does not tell.
    assert make_manager is _restored or report.last.numpy().tolist() == [[4, 0, 0], [0, 0, 0]]
    run(opt.loss_scale)
    assert values(variables) == [[[0.5, 1.5], [2.5, 3.5]], [5, 6]]


@for_every_keras()
@for_every_front_end
@pytest.mark.parametrize("method", ["update_loss_scale", "next_state", "note_step"])
def test_what_replaces_a_method_of_a_manager_is_called_in_each_later_step(
    keras: ModuleType, front_end: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, seen = tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000), []
    _, step = eager_steps(keras, front_end, manager)
    grad = tf.constant([1.0, 1.0])
    for _ in range(70):
        step(grad)
    original = getattr(manager, method)
    with monkeypatch.context() as patched:
        patched.setattr(manager, method, lambda *args: [seen.append(bool(args[-1])), original(*args)][1])
        for factor in (1.0, math.inf, 1.0):
            step(grad * factor)
    step(grad)
    assert seen == [True, False, True]
    assert [int(count) for count in manager.get_status()[3:6]] == [74, 73, 1]


@pytest.mark.graph
def test_report_in_a_graph_covers_only_that_graph_and_is_the_same_each_time() -> None:
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.MomentumOptimizer(0.5, 0.5), 1024)
    for name in ("one", "other"):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            train_op = opt.minimize(
                tf.compat.v1.get_variable(name, initializer=[1.0, 2.0, 3.0]) * [math.nan, -math.inf, 1.0]
            )
            (report,), (again,) = opt.overflow_reports(), opt.overflow_reports()
            session.run(tf.compat.v1.global_variables_initializer())
            tf.compat.v1.get_default_graph().finalize()
            session.run(train_op)
            assert (report.names, session.run(report.last).tolist()) == ([f"{name}:0"], [[1, 1, 0]])
            assert again.last is report.last


@pytest.mark.parametrize(
    ("host", "way"),
    [("tf1", "eager"), ("tf1", "function"), *itertools.product(kerases.installed(), ["eager", "function", "xla"])],
)
def test_report_in_eager_code_holds_values_and_names_of_the_variables(host: str, way: str) -> None:
    keras: Any = kerases.installed().get(host)
    variables = [variable(keras, [1, 2]), variable(keras, [1], "bias")]
    inner = optimizer(keras) if keras else tf.compat.v1.train.MomentumOptimizer(0.5, 0.5)
    opt, traces = wrap(inner), []
    if keras:
        opt.build(variables)

    def step(kernel: tf.Tensor, bias: tf.Tensor) -> None:
        traces.append(1)
        opt.minimize(lambda: tf.reduce_sum(variables[0] * kernel) + variables[1][0] * bias, var_list=variables)

    run = step if way == "eager" else tf.function(step, jit_compile=way == "xla")
    for kernel, bias in (([1, 1], 1), ([math.inf, math.nan], -math.inf), ([math.nan, math.nan], 1), ([1, 1], 1)):
        run(tf.constant(kernel, tf.float32), tf.constant(bias, tf.float32))
    (report,) = opt.overflow_reports()
    assert report.names == [getattr(each, "path", each.name) for each in variables]
    assert (report.last.numpy().tolist(), report.steps.numpy().tolist()) == ([[0, 2, 0], [0, 0, 0]], [2, 1])
    # `build` makes the variables of the counts, so a function need not be traced a second time.
    assert host == "tf1" or len(traces) == (4 if way == "eager" else 1)


@for_every_keras()
def test_function_that_takes_steps_can_be_exported_and_counts_are_in_no_checkpoint(
    keras: ModuleType, tmp_path: Path
) -> None:
    module = tf.Module()
    module.variables_to_train = variables = kerases.kernel_and_bias(keras)
    module.opt = opt = wrap(optimizer(keras), skip_spikes=tfmp.SpikeDetector(max_norm=10))
    opt.build(variables)

    @tf.function(input_signature=[tf.TensorSpec([2, 2]), tf.TensorSpec([2])])
    def train(kernel: tf.Tensor, bias: tf.Tensor) -> Any:
        kerases.take_step(opt, variables, [kernel, bias])
        return opt.loss_scale, opt.gradient_norm, opt.skipped_spikes

    module.train = train
    tf.saved_model.save(module, str(tmp_path))
    loaded, zeros = tf.saved_model.load(str(tmp_path)), tf.zeros([2])
    assert float(loaded.train(tf.fill([2, 2], math.inf), zeros)[0]) == SCALE / 2
    assert [float(each) for each in loaded.train(tf.fill([2, 2], 8.0), zeros)] == [SCALE / 2, 16, 1]
    assert [float(each) for each in loaded.train(tf.fill([2, 2], 2.0), zeros)] == [SCALE / 2, 4, 1]
    assert int(opt.attempted_steps) == 0
    # A checkpoint with the counts could not be restored for other variables.
    tf.train.Checkpoint(opt=opt).write(str(tmp_path / "checkpoint"))
    shapes = tf.train.load_checkpoint(str(tmp_path / "checkpoint")).get_variable_to_shape_map().values()
    assert [2, 3] not in [*shapes, *(list(each.shape) for each in opt.variables)]


@for_every_keras()
def test_replicas_report_the_largest_of_their_counts(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        kernel, opt = variable(keras, [1, 2, 3]), wrap(optimizer(keras))
        opt.build([kernel])

    def step(fed: tf.Tensor) -> None:
        kerases.take_step(opt, [kernel], [tf.gather(fed, tf.distribute.get_replica_context().replica_id_in_sync_group)])

    run = tf.function(lambda fed: two_replicas.run(step, args=(fed,)))
    good = [1.0, 1.0, 1.0]
    for fed, last, steps in [
        # Keras 2 sums the gradients before the check, so both replicas have the same counts.
        ([good, [math.inf, math.inf, math.nan]], [2, 1, 0], 1),
        ([[math.nan, 1.0, 1.0], good], [0, 1, 0], 2),
        ([good, good], [0, 1, 0], 2),
    ]:
        run(tf.constant(fed))
        (report,) = opt.overflow_reports()
        assert (report.last.numpy().tolist(), report.steps.numpy().tolist()) == ([last], [steps])
