"""Accumulation of gradients with TF1 optimizers: in graphs, under Estimator, and in eager code."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.core.accumulation.settings import accumulation_settings
from tfmp.optimizers.accumulators import Accumulators

tf1 = tf.compat.v1

_INNER: dict[str, Callable[[], tf1.train.Optimizer]] = {
    "gd": lambda: tf1.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.5, 0.5),
    "adam": lambda: tf1.train.AdamOptimizer(0.5),
}


def _wrap(inner: tf1.train.Optimizer, **settings: Any) -> tfmp.LossScaleOptimizer:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(inner, manager, **settings)


class Training:
    """A vector whose gradient is the input, a table with a sparse gradient, and a bias without a gradient."""

    def __init__(self, inner: tf1.train.Optimizer, **settings: Any) -> None:
        self.fed = tf1.placeholder(tf.float32, [2])
        self.row = tf1.placeholder_with_default(0, [])
        self.w = tf1.get_variable("w", initializer=[1.0, 2.0])
        self.table = tf1.get_variable("table", initializer=[[1.0], [1.0], [1.0]])
        self.bias = tf1.get_variable("bias", initializer=1.0)
        self.global_step = tf1.train.get_or_create_global_step()
        self.inner, self.opt = inner, _wrap(inner, **settings)
        loss = tf.reduce_sum(self.w * self.fed) + tf.reduce_sum(tf.gather(self.table, self.row)) * self.fed[0]
        self.train_op = self.opt.minimize(loss, self.global_step, [self.w, self.table, self.bias])
        self.session = tf1.get_default_session()
        self.session.run(tf1.global_variables_initializer())

    def take(self, *micro_batches: Sequence[float], row: int = 0) -> None:
        for fed in micro_batches:
            self.session.run(self.train_op, {self.fed: fed, self.row: row})

    def values(self) -> dict[str, Any]:
        return {name: value.tolist() for name, value in self.arrays().items()}

    def arrays(self) -> dict[str, np.ndarray]:
        return self.session.run({variable.op.name: variable.read_value() for variable in tf1.global_variables()})


@pytest.mark.graph
@pytest.mark.parametrize("inner", _INNER)
def test_window_trains_as_one_large_batch(session: tf1.Session, inner: str) -> None:
    training = Training(_INNER[inner](), accumulation_steps=4)
    plain = tf1.get_variable("plain", initializer=[1.0, 2.0])
    plain_op = _INNER[inner]().minimize(tf.reduce_sum(plain * training.fed), var_list=[plain])
    session.run(tf1.global_variables_initializer())
    micro_batches = np.float32([[0.5, 1], [1, -2], [2, 4], [0.5, 1], [-4, 2], [1, 1], [0.25, 0.75], [0.75, 0.25]])
    for taken in range(2):
        batch = micro_batches[4 * taken : 4 * taken + 4]
        training.take(*batch)
        session.run(plain_op, {training.fed: batch.mean(axis=0)})
        expected = session.run(plain)
        if inner == "adam":
            np.testing.assert_allclose(session.run(training.w), expected, rtol=1e-6)
        else:
            assert session.run(training.w).tolist() == expected.tolist()
        assert session.run(training.global_step) == taken + 1


@pytest.mark.graph
@pytest.mark.parametrize("overflow_drops", ["window", "micro_batch"])
def test_overflow_drops_the_window_or_the_micro_batch(session: tf1.Session, overflow_drops: str) -> None:
    training = Training(_INNER["momentum"](), accumulation_steps=4, overflow_drops=overflow_drops)
    opt = training.opt
    state = [training.w, opt.get_slot(training.w, "momentum"), training.global_step, opt.loss_scale, opt.skipped_steps]

    def values() -> list[Any]:
        return [value.tolist() for value in session.run(state)]

    training.take([1, 2], [math.inf, 1], [4, 1])
    # Before the window ends nothing changes, not even the scale.
    assert values() == [[1, 2], [0, 0], 0, 1024, 0]
    training.take([1, 0])
    dropped = [[1, 2], [0, 0], 0, 512, 1]
    # The mean of the three finite micro-batches is [2, 1].
    kept = [[0, 1.5], [2, 1], 1, 512, 0]
    assert values() == (dropped if overflow_drops == "window" else kept)
    report = session.run(opt.overflow_reports()[0].steps)
    assert report.tolist() == [1, 1, 0]
    # Every micro-batch of the next window overflows, so both policies skip its step.
    before = values()
    training.take(*[[1, math.nan]] * 4)
    assert values() == [*before[:3], 256, before[4] + 1]
    # The table's gradients are finite in this window, so its count stays.
    assert session.run(opt.overflow_reports()[0].steps).tolist() == [2, 1, 0]
    training.take(*[[4, 4]] * 4)
    assert values()[2:] == [before[2] + 1, 256, before[4] + 1]


@pytest.mark.graph
def test_rows_without_a_gradient_in_the_window_do_not_change(session: tf1.Session) -> None:
    training = Training(_INNER["momentum"](), accumulation_steps=2)
    for row in (0, 1):
        training.take([2, 0], row=row)
    values = training.values()
    assert (values["table"], values["table/Momentum"]) == ([[0.5], [0.5], [1.0]], [[1.0], [1.0], [0.0]])
    training.take([2, 0], [2, 0], row=1)
    values = training.values()
    # With a gradient of 0 in place of none, Momentum would have changed row 0.
    assert (values["table"], values["table/Momentum"]) == ([[0.5], [-0.75], [1.0]], [[1.0], [2.5], [0.0]])
    assert values["bias"] == 1


@pytest.mark.graph
def test_last_window_of_an_epoch_divides_by_its_number_of_micro_batches(session: tf1.Session) -> None:
    training = Training(_INNER["gd"](), accumulation_steps=4, micro_batches_per_epoch=102)
    for epoch in (1, 2):
        training.take(*[[0, 0]] * 100, [1, 0])
        assert session.run(training.global_step) == 26 * epoch - 1
        training.take([3, 0])
        # Each epoch subtracts 0.5 times the mean of 1 and 3.
        assert session.run([training.global_step, training.w[0]]) == [26 * epoch, 1 - epoch]


@pytest.mark.graph
def test_training_resumes_within_a_window_bit_for_bit(session: tf1.Session, tmp_path: Path) -> None:
    settings = {"accumulation_steps": 4, "overflow_drops": "micro_batch", "micro_batches_per_epoch": 10}
    fed = np.random.default_rng(0).standard_normal([10, 2])
    fed[5] = math.inf
    training = Training(_INNER["adam"](), **settings)
    saver = tf1.train.Saver()
    training.take(*fed[:7])
    path = saver.save(session, str(tmp_path / "model"))
    training.take(*fed[7:])
    expected = training.values()
    assert expected["global_step"] == 3
    with tf.Graph().as_default(), tf1.Session():
        resumed = Training(_INNER["adam"](), **settings)
        tf1.train.Saver().restore(resumed.session, path)
        resumed.take(*fed[7:])
        assert resumed.values() == expected
    # At the end of the epoch the window is empty and the counts are 0.
    assert {name: value for name, value in expected.items() if "/kept" in name or "/tried" in name} == {
        "accumulation/kept": 0,
        "accumulation/tried": 0,
        "accumulation/tried_in_epoch": 0,
    }


@pytest.mark.graph
def test_each_list_of_variables_has_its_own_window_and_names(session: tf1.Session) -> None:
    first, second = (tf1.get_variable(name, initializer=1.0) for name in ("first", "second"))
    manager = tfmp.FixedLossScaleManager(8)
    opts = [tfmp.LossScaleOptimizer(_INNER["adam"](), manager, accumulation_steps=2) for _ in range(2)]
    first_op, second_op = (
        opt.minimize(variable * 1.0, var_list=[variable]) for opt, variable in zip(opts, (first, second), strict=True)
    )
    session.run(tf1.global_variables_initializer())
    for op in (first_op, second_op, first_op):
        session.run(op)
    assert session.run([first < 1, tf.equal(second, 1)]) == [True, True]
    window = ("sum_0", "kept", "tried", "tried_in_epoch", "largest", "overflows")
    assert {variable.op.name for variable in tf1.global_variables()} == {
        *("first", "first/Adam", "first/Adam_1", "cond/beta1_power", "cond/beta2_power"),
        *("second", "second/Adam", "second/Adam_1", "cond_2/beta1_power", "cond_2/beta2_power"),
        *(f"{scope}/{name}" for scope in ("accumulation", "accumulation_1") for name in window),
    }


@pytest.mark.graph
def test_window_of_one_micro_batch_adds_nothing_to_the_graph(session: tf1.Session, tmp_path: Path) -> None:
    training = Training(_INNER["adam"](), accumulation_steps=1, overflow_drops="micro_batch", micro_batches_per_epoch=3)
    training.take([1, 1])
    path = tf1.train.Saver().save(session, str(tmp_path / "model"))
    assert {name for name, _ in tf.train.list_variables(path)} == {
        *("loss_scale", "good_steps", "bad_steps", "global_step", "cond/beta1_power", "cond/beta2_power", "bias"),
        *(f"{name}{slot}" for name in ("w", "table") for slot in ("", "/Adam", "/Adam_1")),
    }
    assert session.run(training.global_step) == 1


@pytest.mark.graph
def test_mean_of_a_window_is_finite_if_a_micro_batch_exceeds_float16(session: tf1.Session) -> None:
    w = tf1.get_variable("w", initializer=tf.constant([1.0], tf.float16), use_resource=True)
    fed = tf1.placeholder(tf.float32, [])
    opt = _wrap(_INNER["gd"](), accumulation_steps=2)
    # 2**17 is larger than 65504, the largest float16.
    train_op = opt.apply_gradients([(fed[tf.newaxis], w)])
    session.run(tf1.global_variables_initializer())
    for value in (2.0**17, 4 - 2.0**17):
        session.run(train_op, {fed: value})
    assert session.run([w, opt.skipped_steps]) == [0, 0]
    for value in (2.0**17, 2.0**17):
        session.run(train_op, {fed: value})
    assert session.run([w, opt.skipped_steps]) == [0, 1]


@pytest.mark.graph
def test_micro_batches_can_be_clipped_and_an_unscaled_loss_gives_a_warning(
    session: tf1.Session, caplog: pytest.LogCaptureFixture
) -> None:
    w = tf1.get_variable("w", initializer=1.0)
    fed = tf1.placeholder(tf.float32, [])
    (grad,) = tf.gradients(w * fed, [w])
    with caplog.at_level("WARNING", logger="tfmp"):
        train_op = _wrap(_INNER["gd"](), accumulation_steps=2).apply_gradients([(tf.clip_by_norm(grad, 2.0), w)])
    assert "their loss was never scaled" in caplog.text
    session.run(tf1.global_variables_initializer())
    for value in (1, 8):
        session.run(train_op, {fed: value})
    assert session.run(w) == 1 - 0.5 * (1 + 2) / 2


@pytest.mark.graph
def test_run_that_fails_because_input_ends_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    with tf.Graph().as_default(), caplog.at_level("INFO", logger="tfmp"):
        w = tf1.get_variable("w", initializer=1.0)
        fed = tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.float32([1, 3, 5]))).get_next()
        train_op = _wrap(_INNER["gd"](), accumulation_steps=2).minimize(w * fed, tf1.train.get_or_create_global_step())
        hook = tfmp.LossScaleLoggingHook(every_n_steps=100)
        variables = {variable.op.name: variable.read_value() for variable in tf1.global_variables()}
        with tf1.train.SingularMonitoredSession([hook]) as session:
            raw = session.raw_session()
            for _ in range(3):
                session.run(train_op)
            with pytest.raises(tf.errors.OutOfRangeError):
                raw.run(train_op)
            window = raw.run({name: variables[f"accumulation/{name}"] for name in ("sum_0", "kept", "tried")})
    assert window == {"sum_0": 5, "kept": 1, "tried": 1}
    # The hook counts windows, and does not warn that something else changes global_step.
    assert [record.getMessage() for record in caplog.records if record.name == "tfmp"] == [
        "loss scale 1024, global step 0, steps applied 0, skipped 0 (0 in a row)",
        "loss scale 1024, global step 1, steps applied 1, skipped 0 (0 in a row)",
    ]


def test_window_without_finite_micro_batches_reports_only_overflowed_variables() -> None:
    weights = [tf.Variable(1.0, name=name) for name in ("finite", "infinite")]
    opt = _wrap(_INNER["gd"](), accumulation_steps=2, overflow_drops="micro_batch")
    for _ in range(2):
        opt.minimize(lambda: weights[0] + weights[1] * math.inf, var_list=weights)
    assert int(opt.skipped_steps) == 1
    assert opt.overflow_reports()[0].steps.numpy().tolist() == [0, 1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_gradients_of_callable_losses_are_accumulated(compiled: bool) -> None:
    # Both variables have the same name, which is allowed in eager code.
    weights = [tf.Variable(1.0, name="w"), tf.Variable(1.0, name="w")]
    global_step = tf.Variable(0, dtype=tf.int64)
    opt = _wrap(_INNER["momentum"](), accumulation_steps=2, overflow_drops="micro_batch")

    def step(factor: tf.Tensor) -> None:
        opt.minimize(lambda: weights[0] * factor, global_step, var_list=weights[:1])
        opt.minimize(lambda: weights[1] * 2.0 * factor, global_step, var_list=weights[1:])

    run = tf.function(step) if compiled else step
    for factor in (1.0, 1.0, math.inf, 1.0):
        run(tf.constant(factor))
    assert [float(weight) for weight in weights] == [1 - 0.5 - 0.75, 1 - 1 - 1.5]
    assert (int(global_step), int(opt.applied_steps), float(opt.loss_scale)) == (4, 4, 256)


def test_functions_with_gradients_of_different_variables_lose_none() -> None:
    def make() -> tuple[list[tf.Variable], Callable[[bool], Any]]:
        x, y = tf.Variable(0.0), tf.Variable(0.0)
        opt = _wrap(_INNER["gd"](), accumulation_steps=2)

        @tf.function
        def step(of_y: bool) -> None:
            opt.minimize(lambda: 2.0 * (x + y if of_y else x), var_list=[x, y])

        return [x, y], step

    _, step = make()
    step(False)
    with pytest.raises(ValueError, match=r"pass tf\.zeros_like\(variable\) as the gradient"):
        step(True)
    variables, step = make()
    for of_y in (True, False, False, True):
        step(of_y)
    assert [float(variable) for variable in variables] == [-2, -1]


def test_checkpoint_of_eager_code_resumes_within_a_window(tmp_path: Path) -> None:
    def make() -> tuple[list[tf.Variable], Callable[[float], Any], tf.train.Checkpoint]:
        weights, inner = [tf.Variable(1.0), tf.Variable(1.0)], _INNER["momentum"]()
        opt = _wrap(inner, accumulation_steps=2)

        @tf.function
        def step(factor: tf.Tensor) -> None:
            opt.minimize(lambda: weights[0] * factor, var_list=weights[:1])
            opt.minimize(lambda: weights[1] * factor, var_list=weights[1:])

        checkpoint = tf.train.Checkpoint(
            weights=weights, optimizer=inner, manager=opt._loss_scale_manager, accumulation=opt.accumulation
        )
        return weights, lambda factor: step(tf.constant(factor)), checkpoint

    straight, step, checkpoint = make()
    for factor in (2.0, 4.0, 1.0):
        step(factor)
    path = checkpoint.save(tmp_path / "inside")
    step(7.0)
    resumed, step, checkpoint = make()
    status = checkpoint.restore(path)
    step(7.0)
    status.assert_consumed()
    # The means of the windows are 3 and 4, from which Momentum makes 3 and 5.5.
    assert [float(weight) for weight in (*straight, *resumed)] == [1 - 1.5 - 2.75] * 4


def test_window_of_one_micro_batch_has_nothing_to_save() -> None:
    assert not _wrap(_INNER["gd"]()).accumulation.variables


def test_function_on_two_replicas_applies_the_mean_of_all(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        w, table = tf.Variable(1.0), tf.Variable([[1.0], [1.0], [1.0]])
        opt = _wrap(_INNER["momentum"](), accumulation_steps=2, overflow_drops="micro_batch")

    def on_replica(values: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        # The wrapped optimizer sums over the replicas, so each replica's loss is divided by their number.
        share = values[replica] / 2
        opt.minimize(lambda: (w + tf.reduce_sum(tf.gather(table, [replica]))) * share, var_list=[w, table])

    step = tf.function(lambda values: two_replicas.run(on_replica, args=(values,)))
    for values in ([2.0, 4.0], [math.inf, 6.0]):
        step(tf.constant(values))
    assert float(opt.loss_scale) == 512
    # The weight's gradient is the mean of 2, 4 and 6, which is 4. Row 0 has the gradient 2 in one of these three
    # micro-batches, and row 1 has 4 and 6 in the two others.
    found = [two_replicas.experimental_local_results(variable) for variable in (w, table)]
    assert [float(part) for part in found[0]] == [1 - 0.5 * 4] * 2
    for part in found[1]:
        np.testing.assert_allclose(part.numpy().ravel(), [1 - 0.5 * 2 / 3, 1 - 0.5 * 10 / 3, 1], rtol=1e-6)


@pytest.mark.graph
def test_one_wrapper_has_a_window_in_each_graph() -> None:
    opt = _wrap(_INNER["gd"](), accumulation_steps=2)
    found = []
    for factors in ([1, 3], [5, 7]):
        with tf.Graph().as_default(), tf1.Session() as session:
            fed, w = tf1.placeholder(tf.float32, []), tf1.get_variable("w", initializer=1.0)
            train_op = opt.minimize(w * fed, var_list=[w])
            session.run(tf1.global_variables_initializer())
            for factor in factors:
                session.run(train_op, {fed: factor})
            found.append(session.run(w))
    assert found == [0, -2]


@pytest.mark.graph
@pytest.mark.estimator
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
def test_checkpoint_holds_the_total_of_the_sums_of_all_replicas(
    tmp_path: Path, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    def model_fn(features: tf.Tensor, mode: str) -> Any:
        w = tf1.get_variable("w", initializer=1.0)
        opt = _wrap(_INNER["gd"](), accumulation_steps=4, overflow_drops="micro_batch")
        train_op = opt.minimize(w * features, tf1.train.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=tf.zeros([]), train_op=train_op)

    config = tf.estimator.RunConfig(train_distribute=two_replicas, save_summary_steps=None, log_step_count_steps=None)
    estimator = tf.estimator.Estimator(model_fn, tmp_path, config)

    def train(*micro_batches: Sequence[float]) -> dict[str, Any]:
        rows = np.float32(micro_batches).ravel()
        estimator.train(lambda: tf.data.Dataset.from_tensor_slices(rows))
        saved = tf.train.load_checkpoint(str(tmp_path))
        return {name: saved.get_tensor(name).tolist() for name in saved.get_variable_to_shape_map()}

    after = train([1, 1], [4, math.inf], [4, 2], [1, 1], [2, 6], [2, 6])
    window = {name.removeprefix("accumulation/"): after[name] for name in after if name.startswith("accumulation/")}
    # Under a strategy `minimize` divides the loss by the number of replicas, so the sum is half of 2 + 6 + 2 + 6.
    assert window == {"sum_0": 8, "kept": 4, "tried": 4, "tried_in_epoch": 4, "largest": 0, "overflows": [[0, 0, 0]]}
    assert [after[name] for name in ("w", "global_step", "loss_scale")] == [1 - 0.5 * 2, 1, 512]
    # The second call of `train` builds a new graph, in which the window continues.
    after = train([0, 8], [0, 8])
    assert [after[name] for name in ("w", "global_step", "accumulation/tried")] == [0 - 0.5 * 4, 2, 0]


def test_workers_of_a_strategy_are_refused_in_a_graph() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with tf.Graph().as_default(), strategy.scope():
        w = tf1.get_variable("w", initializer=1.0)
        opt = _wrap(_INNER["gd"](), accumulation_steps=2)
        with pytest.raises(NotImplementedError, match="the worker that saves would wait for ever"):
            strategy.run(lambda: opt.minimize(w * 1.0, var_list=[w]))


def test_accumulation_settings_are_checked_by_the_constructor() -> None:
    with pytest.raises(ValueError, match=r"accumulation_steps must be a whole number from 1 to 2\*\*31 - 1, got 0"):
        _wrap(_INNER["gd"](), accumulation_steps=0)


def test_lists_of_variables_are_told_apart_by_identity_and_order() -> None:
    accumulators = Accumulators(accumulation_settings(2, "window", None), tfmp.NonFiniteDetector())
    assert accumulators.is_on
    a, b = tf.Variable(1.0, name="same"), tf.Variable(1.0, name="same")
    windows = [accumulators.of(variables) for variables in ([a, b], [b, a], [a], [b])]
    assert len(set(map(id, windows))) == 4
    # A tuple of the same variables is the same list, in eager code and in a function.
    assert accumulators.of((a, b)) is windows[0]
    found = []
    tf.function(lambda: found.append(accumulators.of([a])))()
    assert found == [windows[2]]
    assert accumulators.windows == windows


@pytest.mark.graph
def test_accumulators_of_graphs_are_not_those_of_eager_code() -> None:
    accumulators = Accumulators(accumulation_settings(1, "window", None), tfmp.NonFiniteDetector())
    assert not accumulators.is_on
    found = []
    for _ in range(2):
        with tf.Graph().as_default():
            weight = tf1.get_variable("weight", initializer=1.0)
            found.append(accumulators.of([weight]))
            assert accumulators.of([weight]) is found[-1]
    assert found[0] is not found[1]
    # A checkpoint of eager code holds these alone.
    assert accumulators.windows == []
