"""create_optimizer in each of its modes, step by step."""

from types import SimpleNamespace
from typing import Any

import kit_models
import numpy as np
import published_formulas
import pytest
import tensorflow as tf

import tfmp
from tfmp import bert
from tfmp.bert import google

pytestmark = [pytest.mark.graph, pytest.mark.usefixtures("no_graph_rewrite_after")]

tf1 = tf.compat.v1

_MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "manual_fp16": {"manual_fp16": True},
    "use_fp16": {"use_fp16": True},
}


@pytest.mark.parametrize(
    ("kind", "mode"), [("adam", "fp32"), ("lamb", "fp32"), ("adam", "manual_fp16"), ("adam", "use_fp16")]
)
def test_training_follows_the_published_formulas(kind: str, mode: str, session: tf1.Session) -> None:
    model = kit_models.Model(
        num_train_steps=10, num_warmup_steps=3, optimizer_type=kind, init_loss_scale=2.0**16, **_MODES[mode]
    )
    session.run(tf1.global_variables_initializer())
    rule = published_formulas.RULES[kind]
    references = [rule(value, 0.0 if "bias" in name else 0.01) for name, value in kit_models.START.items()]
    for step, grads in enumerate(kit_models.random_grads(8)):
        rate = published_formulas.rate(step, 0.125, 10, 3, kind)
        for reference, grad in zip(references, published_formulas.clipped(grads), strict=True):
            reference.step(grad, rate)
        counted, used = model.run(session, grads, "step_update:0", "learning_rate:0")
        assert counted == step + 1
        assert used == pytest.approx(rate, rel=1e-5)
    for reference, value in zip(references, session.run(list(model.variables.values())), strict=True):
        np.testing.assert_allclose(value, reference.value, rtol=1e-4, atol=1e-6)


def test_the_norm_of_rows_that_are_named_twice_is_that_of_their_sum(session: tf1.Session) -> None:
    table = tf1.get_variable("table", initializer=[[1.0], [2.0]])
    loss = tf.reduce_sum(tf.gather(table, [1, 1]) * tf.constant([[3.0], [1.0]]))
    # This is the norm in the originals, which do not add the rows that are named twice.
    (slices,), _ = tf.clip_by_global_norm(tf1.gradients(loss, [table]), 1.0)
    train_op = bert.create_optimizer(loss, 0.125, 10, 0)
    (moment,) = (each for each in tf1.global_variables() if each.op.name == "table/adam_m")
    session.run(tf1.global_variables_initializer())
    np.testing.assert_allclose(session.run(tf.convert_to_tensor(slices)), [[0.0], [4 / 10**0.5]], rtol=1e-6)
    session.run(train_op)
    np.testing.assert_allclose(session.run(moment), [[0.0], [0.1]], rtol=1e-6)


def test_googles_create_optimizer_follows_its_own_schedule(session: tf1.Session) -> None:
    w = tf1.get_variable("w", initializer=[1.0, -2.0])
    grad = tf1.placeholder(tf.float32, [2])
    train_op = google.create_optimizer(tf.reduce_sum(w * grad), 0.125, 10, 3, False)
    session.run(tf1.global_variables_initializer())
    reference = google_rule = published_formulas.Adam(np.array([1.0, -2.0]), 0.01)
    for step in range(6):
        rate = published_formulas.rate(step, 0.125, 10, 3, "google")
        google_rule.step(published_formulas.clipped([np.array([3.0, 4.0 * step])])[0], rate)
        session.run(train_op, {grad: [3.0, 4.0 * step]})
    np.testing.assert_allclose(session.run(w), reference.value, rtol=1e-5)
    assert session.run(tf1.train.get_global_step()) == 6


@pytest.mark.parametrize(
    ("mode", "scales"),
    [("fp32", [1, 1, 1]), ("manual_fp16", [1024, 512, 512]), ("use_fp16", [512, 256, 128])],
)
def test_an_overflow_skips_the_whole_step(mode: str, scales: list[float], session: tf1.Session) -> None:
    model = kit_models.Model(init_loss_scale=2.0**10, **_MODES[mode])
    session.run(tf1.global_variables_initializer())
    (grads,) = kit_models.random_grads(1)
    model.run(session, grads, "step_update:0")
    before = kit_models.state(session)
    optimizer = model.training.optimizer
    for skipped, scale in enumerate(scales, start=1):
        assert model.run(session, kit_models.overflowing(grads), "step_update:0") == [1]
        counts = session.run([optimizer.applied_steps, optimizer.skipped_steps, optimizer.loss_scale])
        assert counts == [1, skipped, scale]
        assert mode == "fp32" or session.run("loss_scale:0") == scale
    after = kit_models.state(session)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert not {name for name in moved if "steps" not in name and "loss_scale" not in name}


def test_the_scale_doubles_after_1000_finite_steps(session: tf1.Session) -> None:
    model = kit_models.Model(manual_fp16=True, init_loss_scale=8.0)
    (good_steps,) = (each for each in tf1.global_variables() if "good_steps" in each.op.name)
    session.run(tf1.global_variables_initializer())
    session.run(good_steps.assign(998))
    for expected in (8.0, 16.0):
        model.run(session, kit_models.random_grads(1)[0])
        assert session.run("loss_scale:0") == expected


def test_float32_adds_no_variable_to_the_published_ones(session: tf1.Session) -> None:
    del session
    kit_models.Model()
    slots = {f"{name}/{slot}" for name in kit_models.START for slot in ("adam_m", "adam_v")}
    names = {variable.op.name for variable in tf1.global_variables()}
    assert names == {"global_step", "bert/unused", *kit_models.START, *slots}


def test_the_graph_rewrite_is_on_and_makes_no_variable(session: tf1.Session) -> None:
    del session
    kit_models.Model(manual_fp16=True)
    expected = {variable.op.name for variable in tf1.global_variables()}
    with tf.Graph().as_default():
        kit_models.Model(use_fp16=True)
        assert {variable.op.name for variable in tf1.global_variables()} == expected
    assert tf.config.optimizer.get_experimental_options()["auto_mixed_precision"]


def test_the_named_tensors_stand_at_the_top_level(session: tf1.Session) -> None:
    kit_models.Model(manual_fp16=True, num_accumulation_steps=2)
    for name in ("learning_rate:0", "step_update:0", "update_step:0", "loss_scale:0"):
        assert session.graph.get_tensor_by_name(name).shape == ()
    with tf.Graph().as_default() as graph:
        kit_models.Model()
        with pytest.raises(KeyError, match="update_step"):
            graph.get_tensor_by_name("update_step:0")


def test_positional_arguments_have_the_order_of_nvidia(session: tf1.Session) -> None:
    w = tf1.get_variable("w", initializer=1.0)
    train_op = bert.create_optimizer(w * 1.0, 0.5, 10, 0, None, True, False, 2, "lamb", True, 64)
    session.run(tf1.global_variables_initializer())
    fetched = [session.run([train_op, "update_step:0", "learning_rate:0", "loss_scale:0"])[1:] for _ in range(4)]
    assert [bool(ends) for ends, _, _ in fetched] == [False, True, False, True]
    np.testing.assert_allclose([rate for _, rate, _ in fetched], [0.5] * 2 + [0.5 * 0.9**0.5] * 2, rtol=1e-6)
    assert {float(scale) for _, _, scale in fetched} == {64.0}


@pytest.mark.parametrize("runs", [1, 2])
def test_a_second_step_in_one_graph_is_refused(runs: int, session: tf1.Session) -> None:
    del session
    model = kit_models.Model(manual_fp16=True, num_accumulation_steps=runs)
    names = [variable.op.name for variable in tf1.global_variables()]
    with pytest.raises(ValueError, match=r"trains bert/kernel already.*call create_optimizer once in a graph"):
        bert.create_optimizer(tf.reduce_sum(model.variables["bert/kernel"]), 0.5, 10, 0, manual_fp16=True)
    assert [variable.op.name for variable in tf1.global_variables()] == names


def test_a_manager_of_the_script_takes_the_place_of_the_modes(session: tf1.Session) -> None:
    model = kit_models.Model(manual_fp16=True, loss_scale_manager=tfmp.FixedLossScaleManager(32))
    session.run(tf1.global_variables_initializer())
    model.run(session, kit_models.random_grads(1)[0])
    assert session.run(model.training.optimizer.loss_scale) == 32
    assert not [variable for variable in tf1.global_variables() if "loss_scale" in variable.op.name]


def test_the_optimizer_type_is_read_in_any_case(session: tf1.Session) -> None:
    del session
    assert isinstance(kit_models.Model(optimizer_type="LAMB").training.optimizer._opt, bert.LAMBOptimizer)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"optimizer_type": "sgd"}, ValueError, 'optimizer_type must be "adam" or "lamb", got \'sgd\''),
        ({"optimizer_type": None}, ValueError, "optimizer_type must be"),
        ({"manual_fp16": True, "use_fp16": True}, ValueError, "would scale the loss twice"),
        ({"num_accumulation_steps": 0}, ValueError, "num_accumulation_steps must be a whole number from 1"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm must be"),
        ({"clip_norm": "1"}, TypeError, "clip_norm must be a number, got '1'"),
        ({"manual_fp16": True, "init_loss_scale": 0.5}, ValueError, "init_loss_scale must be"),
        ({"hvd": SimpleNamespace(is_initialized=lambda: False)}, ValueError, r"call hvd\.init\(\) before this"),
        (
            {"hvd": False},
            TypeError,
            r"hvd must be the module.*got False of type bool\. .*from tfmp\.bert import google",
        ),
        ({"init_lr": "fast"}, TypeError, "init_lr must be a number, got 'fast'"),
        ({"init_lr": -0.5}, ValueError, r"init_lr must be at least 0, got -0\.5\."),
        ({"manual_fp16": "False"}, TypeError, "manual_fp16 must be True or False, got 'False'"),
        ({"use_fp16": 1}, TypeError, "use_fp16 must be True or False, got 1"),
        ({"allreduce_post_accumulation": None}, TypeError, "allreduce_post_accumulation must be True or False"),
    ],
)
def test_a_bad_setting_of_the_training_is_refused(
    settings: dict[str, Any], error: type[Exception], message: str, session: tf1.Session
) -> None:
    del session
    with pytest.raises(error, match=message):
        kit_models.Model(**settings)


def _trained(**settings: Any) -> dict[str, Any]:
    """Return all variables after two windows of two runs; the second window overflows."""
    grads = kit_models.random_grads(4)
    with tf.Graph().as_default(), tf1.Session() as session:
        model = kit_models.Model(num_accumulation_steps=2, manual_fp16=True, **settings)
        session.run(tf1.global_variables_initializer())
        for each in [*grads[:3], kit_models.overflowing(grads[3])]:
            model.run(session, each)
        return kit_models.state(session)


def test_sharing_after_accumulation_changes_nothing_in_a_single_process() -> None:
    shared, expected = _trained(allreduce_post_accumulation=True), _trained()
    assert set(shared) == set(expected)
    assert expected["global_step"] == 1
    for name, value in expected.items():
        np.testing.assert_array_equal(shared[name], value, err_msg=name)


def test_workers_that_nothing_connects_are_refused(session: tf1.Session) -> None:
    del session
    with pytest.raises(ValueError, match="is_distributed=True, and nothing distributes"):
        kit_models.Model(is_distributed=True)


def test_a_graph_without_variables_is_refused(session: tf1.Session) -> None:
    del session
    with pytest.raises(ValueError, match="no trainable variables: build the model before its optimizer"):
        bert.create_optimizer(tf.constant(1.0), 0.1, 10, 0)


def test_googles_call_of_nvidias_create_optimizer_is_told_of_the_other(session: tf1.Session) -> None:
    w = tf1.get_variable("w", initializer=1.0)
    with pytest.raises(TypeError, match=r"write from tfmp\.bert import google as optimization"):
        bert.create_optimizer(w * 1.0, 0.5, 10, 0, False)
    assert google.create_optimizer(w * 1.0, 0.5, 10, 0, False).graph is session.graph


@pytest.mark.parametrize("use_tpu", ["False", None])
def test_use_tpu_is_a_flag(use_tpu: Any, session: tf1.Session) -> None:
    w = tf1.get_variable("w", initializer=1.0)
    del session
    with pytest.raises(TypeError, match="use_tpu must be True or False"):
        google.create_optimizer(w * 1.0, 0.5, 10, 0, use_tpu)


def test_tpus_are_refused(session: tf1.Session) -> None:
    del session
    with pytest.raises(NotImplementedError, match="use_tpu=True: tfmp trains on CPUs and GPUs"):
        google.create_optimizer(tf.constant(1.0), 0.1, 10, 0, use_tpu=True)


def test_eager_code_is_refused() -> None:
    if not tf.executing_eagerly():
        pytest.skip("graph mode is on")
    with pytest.raises(RuntimeError, match="TensorFlow executes eagerly"):
        bert.create_optimizer(tf.constant(1.0), 0.1, 10, 0)


def test_windows_under_a_strategy_are_refused(two_replicas: tf.distribute.Strategy, session: tf1.Session) -> None:
    del session
    with (
        two_replicas.scope(),
        pytest.raises(NotImplementedError, match="num_accumulation_steps=2 is not supported under Mirrored"),
    ):
        kit_models.Model(num_accumulation_steps=2)


_UNCLIPPED: dict[str, Any] = {
    "optimizer_type": "lamb",
    "manual_fp16": True,
    "init_loss_scale": 64.0,
    "clip_norm": 1e6,
}


def _on_replicas(strategy: tf.distribute.Strategy, fed: np.ndarray, **settings: Any) -> dict[str, np.ndarray]:
    """Return all variables after steps on the mean of the replicas' gradients."""
    replicas = strategy.num_replicas_in_sync
    with tf.Graph().as_default(), strategy.scope(), tf1.Session() as session:
        grads = tf1.placeholder(tf.float32, [2, 2])

        def build() -> tf.Operation:
            rank = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
            own = tf.reduce_sum(grads, axis=0) if replicas == 1 else grads[rank]
            w = tf1.get_variable("w", [2], initializer=tf1.ones_initializer())
            # Estimator itself divides the loss by the number of replicas.
            loss = tf.reduce_sum(w * own) / 2
            return bert.build_training(loss, 0.125, 20, 2, **settings).train_op

        train_op = tf.group(strategy.experimental_local_results(strategy.run(build)))
        session.run(tf1.global_variables_initializer())
        for values in fed:
            session.run(train_op, {grads: values})
        return {
            each.op.name: session.run(strategy.experimental_local_results(each)[0]) for each in tf1.global_variables()
        }


def test_replicas_of_a_strategy_train_as_one_device(two_replicas: tf.distribute.Strategy) -> None:
    fed = np.random.default_rng(0).choice(np.float32([-1.0, 0.5, 2.0]), size=(5, 2, 2))
    fed[2, 1, 0] = np.inf
    expected = _on_replicas(tf.distribute.OneDeviceStrategy("cpu:0"), fed, **_UNCLIPPED)
    actual = _on_replicas(two_replicas, fed, **_UNCLIPPED)
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, err_msg=name)
    assert expected["global_step"] == 4


def test_each_replica_of_a_strategy_clips_its_own_part_of_the_mean(two_replicas: tf.distribute.Strategy) -> None:
    # The first replica's part is clipped, the second's is not. Clipping the mean, of norm 2.25, would give the norm 2.
    fed = np.float32([[[3.0, 4.0], [-0.3, -0.4]]])
    moment = _on_replicas(two_replicas, fed, clip_norm=2.0)["w/adam_m"]
    np.testing.assert_allclose(moment, 0.1 * np.mean([[1.2, 1.6], [-0.3, -0.4]], axis=0), rtol=1e-6)


def test_a_second_step_under_a_strategy_is_refused(two_replicas: tf.distribute.Strategy, session: tf1.Session) -> None:
    def build() -> tf.Operation:
        w = tf1.get_variable("w", [2], initializer=tf1.ones_initializer())
        return bert.create_optimizer(tf.reduce_sum(w) / 2, 0.125, 20, 0)

    def build_twice() -> tf.Operation:
        return tf.group(build(), bert.create_optimizer(tf.add_n(tf1.trainable_variables()), 0.125, 20, 0))

    del session
    with two_replicas.scope():
        with tf.Graph().as_default(), pytest.raises(ValueError, match=r"trains w already.*once in a graph"):
            two_replicas.run(build_twice)
        two_replicas.run(build)
        with tf1.variable_scope("", reuse=True), pytest.raises(ValueError, match=r"trains w already.*once in a graph"):
            two_replicas.run(build)


def test_every_public_name_of_the_kit_is_there() -> None:
    for name in bert.__all__:
        assert getattr(bert, name) is not None
    assert set(bert.__all__) == set(dir(bert))
    with pytest.raises(AttributeError, match=r"module 'tfmp\.bert' has no attribute 'AdamOptimizer'"):
        _ = bert.AdamOptimizer
