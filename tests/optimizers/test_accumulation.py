"""Accumulation of gradients beside what tests/contract runs on every host: graphs, files, programs, refusals."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, gradients, kernel_and_bias, num_programs, optimizer, take_step, values, wrap
from kerases import variable as variable_of

import tfmp

tf1 = tf.compat.v1


def _sgd(accumulation_steps: int = 2, **settings: Any) -> tfmp.LossScaleOptimizer:
    return wrap(tf1.train.GradientDescentOptimizer(0.5), accumulation_steps=accumulation_steps, **settings)


@pytest.mark.graph
def test_each_list_of_variables_has_its_own_window_and_names(session: tf1.Session) -> None:
    first, second = (tf1.get_variable(name, initializer=1.0) for name in ("first", "second"))
    opts = [tfmp.LossScaleOptimizer(tf1.train.AdamOptimizer(0.5), 8, accumulation_steps=2) for _ in range(2)]
    first_op, second_op = (
        opt.minimize(each * 1.0, var_list=[each]) for opt, each in zip(opts, (first, second), strict=True)
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


#: A window of one micro-batch, which adds nothing.
_NONE: dict[str, Any] = {"accumulation_steps": 1, "overflow_drops": "micro_batch", "micro_batches_per_epoch": 3}


@pytest.mark.graph
@pytest.mark.usefixtures("session")
def test_window_of_one_micro_batch_adds_nothing() -> None:
    opt = _sgd(**_NONE)
    opt.minimize(tf1.get_variable("w", initializer=1.0) * 1.0, tf1.train.get_or_create_global_step())
    names = {variable.op.name.removesuffix("/value") for variable in tf1.global_variables()}
    assert names == {"loss_scale", "good_steps", "bad_steps", "global_step", "w"}
    assert not opt.accumulation.variables


@for_every_keras()
def test_window_of_one_micro_batch_adds_nothing_to_keras(keras: ModuleType) -> None:
    opts = [wrap(optimizer(keras, "Adam"), **settings) for settings in (_NONE, {})]
    for opt in opts:
        opt.build(kernel_and_bias(keras))
    assert [each.name for each in opts[0].variables] == [each.name for each in opts[1].variables]


@pytest.mark.graph
def test_run_that_fails_because_input_ends_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    with tf.Graph().as_default(), caplog.at_level("INFO", logger="tfmp"):
        fed = tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.float32([1, 3, 5]))).get_next()
        loss = tf1.get_variable("w", initializer=1.0) * fed
        train_op = _sgd().minimize(loss, tf1.train.get_or_create_global_step())
        variables = {variable.op.name: variable.read_value() for variable in tf1.global_variables()}
        with tf1.train.SingularMonitoredSession([tfmp.LossScaleLoggingHook(every_n_steps=100)]) as session:
            for _ in range(3):
                session.run(train_op)
            raw = session.raw_session()
            with pytest.raises(tf.errors.OutOfRangeError):
                raw.run(train_op)
            assert raw.run([variables[f"accumulation/{name}"] for name in ("sum_0", "kept", "tried")]) == [5, 1, 1]
    # The hook counts windows, and does not warn that something else changes global_step.
    assert [record.getMessage() for record in caplog.records if record.name == "tfmp"] == [
        f"loss scale 1024, global step {step}, steps applied {step}, skipped 0 (0 in a row)" for step in (0, 1)
    ]


@for_every_keras()
def test_micro_batch_that_overflows_in_float16_is_found_by_fit(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras), accumulation_steps=2, init_loss_scale=2.0**16, overflow_drops="micro_batch")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input([1]), layer])
    model.compile(opt, lambda target, output: tf.cast(target, tf.float32) * tf.cast(output, tf.float32))
    # The scaled gradients of the first window are 2**14 and 2**16. The second is infinite in float16.
    y = np.float32([[0.25], [1], [0.25], [1]])
    model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
    assert values(model.weights) == [[[-0.5 * (0.25 + 0.625)]]]
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (2.0**15, 2, 0)


@pytest.mark.graph
def test_mean_of_a_window_is_finite_if_a_micro_batch_exceeds_float16(session: tf1.Session) -> None:
    w = tf1.get_variable("w", initializer=tf.constant([1.0], tf.float16), use_resource=True)
    fed, opt = tf1.placeholder(tf.float32, []), _sgd()
    # 2**17 is larger than 65504, the largest float16.
    train_op = opt.apply_gradients([(fed[tf.newaxis], w)])
    session.run(tf1.global_variables_initializer())
    for last, skipped in ((4 - 2.0**17, 0), (2.0**17, 1)):
        for value in (2.0**17, last):
            session.run(train_op, {fed: value})
        assert session.run([w, opt.skipped_steps]) == [0, skipped]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_lists_of_variables_with_the_same_names_have_windows_of_their_own(compiled: bool) -> None:
    weights = [tf.Variable(1.0, name="w"), tf.Variable(1.0, name="w")]
    opt = _sgd(overflow_drops="micro_batch")

    def step(factor: tf.Tensor) -> None:
        opt.minimize(lambda: weights[0] * factor, var_list=weights[:1])
        opt.minimize(lambda: weights[1] * 2.0 * factor, var_list=weights[1:])

    run = tf.function(step) if compiled else step
    for factor in (1.0, 1.0, math.inf, 1.0):
        run(tf.constant(factor))
    assert [float(weight) for weight in weights] == [0, -1]
    assert (int(opt.applied_steps), float(opt.loss_scale)) == (4, SCALE / 4)


@pytest.mark.graph
def test_one_wrapper_has_a_window_in_each_graph() -> None:
    opt, found = _sgd(), []
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
def test_checkpoint_of_estimator_holds_the_total_of_the_sums_of_all_replicas(
    tmp_path: Path, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    def model_fn(features: tf.Tensor, mode: str) -> Any:
        w = tf1.get_variable("w", initializer=1.0)
        opt = _sgd(4, overflow_drops="micro_batch")
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
        w, opt = tf1.get_variable("w", initializer=1.0), _sgd()
        with pytest.raises(NotImplementedError, match="the worker that saves would wait for ever"):
            strategy.run(lambda: opt.minimize(w * 1.0, var_list=[w]))


@pytest.mark.parametrize(
    ("options", "jit_compile"), [({}, True), ({}, False), ({"global_clipnorm": 0.5}, True)], ids=str
)
@for_every_keras()
def test_update_at_the_end_of_a_window_is_compiled_and_that_of_the_mean(
    keras: ModuleType, options: dict[str, Any], jit_compile: bool
) -> None:
    plain = optimizer(keras, "Adam", **options)
    opt = wrap(optimizer(keras, "Adam", **options), accumulation_steps=2, jit_compile=jit_compile)
    trained, expected = kernel_and_bias(keras), kernel_and_bias(keras)
    opt.build(trained)

    def step(grads: list[tf.Tensor]) -> None:
        take_step(opt, trained, grads)

    assert (num_programs(step, gradients(0)) > 0) is jit_compile
    run = tf.function(step)
    for seed in range(4):
        run(gradients(seed))
        if seed % 2:
            pairs = zip(gradients(seed - 1), gradients(seed), strict=True)
            take_step(plain, expected, [(one + other) / 2 for one, other in pairs])
    for one, other in zip(trained, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)


@for_every_keras()
def test_sums_of_two_replicas_are_saved_as_one_sum(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy, tmp_path: Path
) -> None:
    def make() -> tuple[Any, Any, Callable[[Any], None]]:
        with two_replicas.scope():
            weight = variable_of(keras, 0.0)
            opt = wrap(optimizer(keras, momentum=0.5), accumulation_steps=2)
            opt.build([weight])

        def on_replica(fed: tf.Tensor) -> None:
            grad = tf.gather(fed, tf.distribute.get_replica_context().replica_id_in_sync_group)
            take_step(opt, [weight], [grad / 2])

        run = tf.function(lambda fed: two_replicas.run(on_replica, args=(fed,)))
        return weight, opt, lambda fed: run(tf.constant(fed, tf.float32))

    (weight, opt, train), (other, resumed, resume) = make(), make()
    for fed in ([1, 3], [2, 6], [1, 5]):
        train(fed)
    with h5py.File(tmp_path / "optimizer.h5", "w") as file:
        # Keras saves both: the optimizer, and what it finds among its attributes.
        for name, saved, loaded in (
            ("optimizer", opt, resumed),
            ("state", opt._loss_scale_state, resumed._loss_scale_state),
        ):
            group = file.create_group(name)
            saved.save_own_variables(group)
            loaded.load_own_variables(group)
    other.assign(-1.5)
    for each, take, of_run in ((weight, train, opt), (other, resume, resumed)):
        take([6, 8])
        assert float(each.numpy()) == -1.5 - 0.75 - 2.5
        assert (int(of_run.iterations.numpy()), int(of_run.applied_steps), float(of_run.loss_scale)) == (2, 2, SCALE)


@for_every_keras("keras2", "tf_keras")
def test_skipped_window_moves_iterations_by_one_if_skipped_steps_count(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras), accumulation_steps=2, iterations_include_skipped_steps=True)
    weights = [variable_of(keras, 0.0)]
    for grad in (1, math.inf, math.inf, math.inf, 1, 1):
        take_step(opt, weights, [tf.constant(grad, tf.float32)])
    assert [int(each) for each in (opt.iterations, opt.applied_steps, opt.skipped_steps)] == [3, 1, 2]
    assert float(opt.loss_scale) == SCALE / 4
