"""Accumulation of gradients with TF1 optimizers: in graphs, under Estimator, and in eager code."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

_INNER: dict[str, Callable[[], tf1.train.Optimizer]] = {
    "gd": lambda: tf1.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.5, 0.5),
    "adam": lambda: tf1.train.AdamOptimizer(0.5),
}


def _wrap(inner: tf1.train.Optimizer, **settings: Any) -> tfmp.LossScaleOptimizer:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(inner, manager, **settings)


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
    weight = tf1.get_variable("w", initializer=1.0)
    settings = {"accumulation_steps": 1, "overflow_drops": "micro_batch", "micro_batches_per_epoch": 3}
    opt = _wrap(_INNER["adam"](), **settings)
    opt.minimize(weight * 1.0, tf1.train.get_or_create_global_step())
    session.run(tf1.global_variables_initializer())
    path = tf1.train.Saver().save(session, str(tmp_path / "model"))
    assert {name for name, _ in tf.train.list_variables(path)} == {
        *("loss_scale", "good_steps", "bad_steps", "global_step", "cond/beta1_power", "cond/beta2_power"),
        *("w", "w/Adam", "w/Adam_1"),
    }
    assert not opt.accumulation.variables


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
