"""create_optimizer in each of its modes, step by step."""

from collections.abc import Callable
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


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("adam", {}, id="adam"),
        pytest.param("lamb", {"optimizer_type": "lamb"}, id="lamb"),
        pytest.param("adam", {"manual_fp16": True, "init_loss_scale": 2.0**16}, id="manual_fp16"),
        pytest.param("adam", {"use_fp16": True, "init_loss_scale": 2.0**16}, id="use_fp16"),
        pytest.param("google", {"build": google.create_optimizer}, id="google"),
    ],
)
def test_training_follows_the_published_formulas(kind: str, settings: dict[str, Any], session: tf1.Session) -> None:
    model = kit_models.Model(num_train_steps=10, num_warmup_steps=3, **settings)
    session.run(tf1.global_variables_initializer())
    rule = published_formulas.RULES["lamb" if kind == "lamb" else "adam"]
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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda: tfmp.FixedLossScaleManager(1)),
        ({"manual_fp16": True}, lambda: tfmp.ExponentialUpdateLossScaleManager(2**32, 1000, 2, decr_ratio=0.5)),
        ({"use_fp16": True}, lambda: tfmp.ExponentialUpdateLossScaleManager(2**32, 1000, 1, decr_ratio=0.5)),
    ],
)
def test_each_mode_has_its_manager(
    settings: dict[str, Any], expected: Callable[[], tfmp.LossScaleManager], session: tf1.Session
) -> None:
    # The type is read in any case.
    model = kit_models.Model(optimizer_type="LAMB", **settings)
    optimizer = model.training.optimizer
    with tf.Graph().as_default():
        assert repr(optimizer.manager.get_config()) == repr(expected().get_config())
        own = tfmp.FixedLossScaleManager(32)
        # A manager of the script takes the place of the mode's.
        assert kit_models.Model(loss_scale_manager=own, **settings).training.optimizer.manager is own
    session.run(tf1.global_variables_initializer())
    (grads,) = kit_models.random_grads(1)
    before = kit_models.state(session)
    # An overflow skips the whole step, in float32 too.
    assert model.run(session, kit_models.overflowing(grads), "step_update:0") == [0]
    assert session.run([optimizer.applied_steps, optimizer.skipped_steps]) == [0, 1]
    moved = [name for name, value in kit_models.state(session).items() if not np.array_equal(value, before[name])]
    assert [name for name in moved if "_steps" not in name and "loss_scale" not in name] == []


def test_positional_arguments_have_the_order_of_nvidia(session: tf1.Session) -> None:
    w = tf1.get_variable("w", initializer=1.0)
    train_op = bert.create_optimizer(w * 1.0, 0.5, 10, 0, None, True, False, 2, "lamb", True, 64)
    session.run(tf1.global_variables_initializer())
    fetched = [session.run([train_op, "update_step:0", "learning_rate:0", "loss_scale:0"])[1:] for _ in range(4)]
    assert [bool(ends) for ends, _, _ in fetched] == [False, True, False, True]
    np.testing.assert_allclose([rate for _, rate, _ in fetched], [0.5] * 2 + [0.5 * 0.9**0.5] * 2, rtol=1e-6)
    assert {float(scale) for _, _, scale in fetched} == {64.0}


def _on_replicas(strategy: tf.distribute.Strategy, fed: Any, **settings: Any) -> dict[str, Any]:
    """Return all variables on each replica, after LAMB's steps on the mean of the replicas' gradients."""
    with tf.Graph().as_default(), strategy.scope(), tf1.Session() as session:
        grads = tf1.placeholder(tf.float32, [2, 2])

        def build() -> tf.Operation:
            rank = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
            own = grads[rank] if strategy.num_replicas_in_sync == 2 else tf.reduce_sum(grads, axis=0)
            w = tf1.get_variable("w", [2], initializer=tf1.ones_initializer())
            # Estimator itself divides the loss by the number of replicas.
            loss = tf.reduce_sum(w * own) / 2
            return bert.build_training(loss, 0.125, 20, optimizer_type="lamb", **settings).train_op

        train_op = tf.group(strategy.experimental_local_results(strategy.run(build)))
        session.run(tf1.global_variables_initializer())
        for values in fed:
            session.run(train_op, {grads: values})
        return {each.op.name: session.run(strategy.experimental_local_results(each)) for each in tf1.global_variables()}


def test_replicas_of_a_strategy_train_as_one_device(two_replicas: tf.distribute.Strategy) -> None:
    fed = np.random.default_rng(0).choice(np.float32([-1.0, 0.5, 2.0]), size=(5, 2, 2))
    fed[2, 1, 0] = np.inf  # on one replica: both skip the step
    settings = {"manual_fp16": True, "init_loss_scale": 64.0, "clip_norm": 1e6}
    expected = _on_replicas(tf.distribute.OneDeviceStrategy("cpu:0"), fed, **settings)
    actual = _on_replicas(two_replicas, fed, **settings)
    assert set(actual) == set(expected)
    for name, values in actual.items():
        np.testing.assert_allclose(values, [*expected[name]] * len(values), rtol=1e-6, err_msg=name)
    assert expected["global_step"] == (4,)


def test_each_replica_of_a_strategy_clips_its_own_part_of_the_mean(two_replicas: tf.distribute.Strategy) -> None:
    # The first replica's part is clipped, the second's is not. Clipping the mean, of norm 2.25, would give the norm 2.
    state = _on_replicas(two_replicas, [[[3.0, 4.0], [-0.3, -0.4]]], clip_norm=2.0)
    np.testing.assert_allclose(state["w/adam_m"], [0.1 * np.mean([[1.2, 1.6], [-0.3, -0.4]], axis=0)] * 2, rtol=1e-6)
