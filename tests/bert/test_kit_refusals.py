"""What the kit refuses: a wrong setting, a graph that it cannot train, and a name that it does not have."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kit_models
import pytest
import tensorflow as tf

from tfmp import bert
from tfmp.bert import google

pytestmark = [pytest.mark.graph, pytest.mark.usefixtures("no_graph_rewrite_after")]

tf1 = tf.compat.v1

_OPTIMIZERS = (bert.AdamWeightDecayOptimizer, bert.LAMBOptimizer)


def _rate(init_lr: float, train: int, **settings: Any) -> tf.Tensor:
    return bert.warm_up_then_decay(tf.constant(0), init_lr, num_train_steps=train, **settings)


def _train(*args: Any, by: Any = bert, **settings: Any) -> tf.Operation:
    return by.create_optimizer(tf1.get_variable("w", initializer=1.0) * 1.0, 0.5, 10, 0, *args, **settings)


def _rows() -> list[tuple[type[Exception], str, Callable[[], Any]]]:
    model, norm, adam = kit_models.Model, bert.layer_norm, bert.AdamWeightDecayOptimizer
    rows: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "num_train_steps must be a whole number from 1", lambda: _rate(0.5, 0)),
        (ValueError, "num_warmup_steps must be a whole number from 0", lambda: _rate(0.5, 8, num_warmup_steps=-1)),
        (ValueError, "init_lr must be finite", lambda: _rate(float("nan"), 8)),
        (ValueError, "init_lr must be at least 0, got -0.5.", lambda: _rate(-0.5, 8)),
        (ValueError, "start_rate must be at least 0, got -0.5.", lambda: _rate(0.5, 8, start_rate=-0.5)),
        (ValueError, "examples_per_run must be a whole number from 1", lambda: bert.Throughput(0)),
        (TypeError, "inputs must be of a floating-point type, got int32", lambda: norm(tf.constant([[1, 2]]))),
        (ValueError, "begin_norm_axis must be an axis of inputs, got 2", lambda: norm(tf.ones([2, 3]), 2)),
        (TypeError, "got 'output': pass the name as scope='output'", lambda: norm(tf.ones([2, 3]), "output")),
        # A flag of tf.contrib's, in the place of an axis.
        (TypeError, "begin_norm_axis must be a whole number, got True.", lambda: norm(tf.ones([2, 3]), True)),
        (ValueError, "sizes of inputs from begin_params_axis", lambda: norm(tf1.placeholder(tf.float32, [2, None]))),
        (ValueError, "beta_1 must be at least 0 and less than 1, got 1.0.", lambda: adam(0.1, beta_1=1.0)),
        (ValueError, "beta_2 must be at least 0 and less than 1, got -0.5.", lambda: adam(0.1, beta_2=-0.5)),
        (ValueError, "epsilon must be", lambda: adam(0.1, epsilon=0.0)),
        (ValueError, "weight_decay_rate must be at least 0, got -0.01.", lambda: adam(0.1, -0.01)),
        (TypeError, "write ['bias']", lambda: adam(0.1, exclude_from_weight_decay="bias")),
        *(
            (error, message, lambda make=make, rate=rate: make(rate()))
            for make in _OPTIMIZERS
            for rate, error, message in (
                (lambda: -0.1, ValueError, "learning_rate must be at least 0, got -0.1."),
                (lambda: float("inf"), ValueError, "learning_rate must be finite"),
                (lambda: "fast", TypeError, "learning_rate must be a number, got 'fast'"),
                (lambda: tf.constant([0.1]), ValueError, "learning_rate must be a scalar, got the shape (1,)."),
                (lambda: tf.constant(1), TypeError, "learning_rate must be of a floating-point type, got int32."),
            )
        ),
        (
            ValueError,
            "pass global_step to apply_gradients or minimize",
            lambda: bert.LAMBOptimizer(0.1).apply_gradients([(tf.ones(1), tf1.get_variable("w", initializer=[1.0]))]),
        ),
        (ValueError, 'optimizer_type must be "adam" or "lamb", got \'sgd\'', lambda: model(optimizer_type="sgd")),
        (ValueError, "optimizer_type must be", lambda: model(optimizer_type=None)),
        (ValueError, "would scale the loss twice", lambda: model(manual_fp16=True, use_fp16=True)),
        (ValueError, "num_accumulation_steps must be a whole number from 1", lambda: model(num_accumulation_steps=0)),
        (ValueError, "clip_norm must be", lambda: model(clip_norm=-1.0)),
        (TypeError, "clip_norm must be a number, got '1'", lambda: model(clip_norm="1")),
        (ValueError, "init_loss_scale must be", lambda: model(manual_fp16=True, init_loss_scale=0.5)),
        (TypeError, "init_lr must be a number, got 'fast'", lambda: model(init_lr="fast")),
        (ValueError, "init_lr must be at least 0, got -0.5.", lambda: model(init_lr=-0.5)),
        (TypeError, "manual_fp16 must be True or False, got 'False'", lambda: model(manual_fp16="False")),
        (TypeError, "use_fp16 must be True or False, got 1", lambda: model(use_fp16=1)),
        (TypeError, "allreduce_post_accumulation must be", lambda: model(allreduce_post_accumulation=None)),
        (ValueError, "call hvd.init() before", lambda: model(hvd=SimpleNamespace(is_initialized=lambda: False))),
        (TypeError, "hvd must be the module horovod.tensorflow or None, got False of type", lambda: _train(False)),
        # Google's call of NVIDIA's create_optimizer is told of the other.
        (TypeError, "write from tfmp.bert import google as optimization", lambda: _train(False)),
        (ValueError, "is_distributed=True, and nothing distributes", lambda: model(is_distributed=True)),
        (TypeError, "use_tpu must be True or False", lambda: _train("False", by=google)),
        (TypeError, "use_tpu must be True or False", lambda: _train(None, by=google)),
        (NotImplementedError, "use_tpu=True: tfmp trains on CPUs and GPUs", lambda: _train(True, by=google)),
        (ValueError, "build the model before its", lambda: bert.create_optimizer(tf.constant(1.0), 0.1, 10, 0)),
        # Without windows, no run is the last of one.
        (
            KeyError,
            "'update_step:0' refers",
            lambda: model().training.train_op.graph.get_tensor_by_name("update_step:0"),
        ),
        (AttributeError, "module 'tfmp.bert' has no attribute 'AdamOptimizer'", lambda: bert.AdamOptimizer),
    ]
    return rows


@pytest.mark.parametrize(("error", "message", "call"), _rows())
def test_a_wrong_call_is_told_what_is_wrong(
    error: type[Exception], message: str, call: Callable[[], Any], session: tf1.Session
) -> None:
    del session
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("runs", [1, 2])
def test_a_second_step_in_one_graph_is_refused(runs: int, session: tf1.Session) -> None:
    model = kit_models.Model(manual_fp16=True, num_accumulation_steps=runs)
    names = [variable.op.name for variable in session.graph.get_collection("variables")]
    with pytest.raises(ValueError, match=r"trains bert/kernel already.*call create_optimizer once in a graph"):
        bert.create_optimizer(tf.reduce_sum(model.variables["bert/kernel"]), 0.5, 10, 0, manual_fp16=True)
    assert [variable.op.name for variable in tf1.global_variables()] == names


@pytest.mark.usefixtures("session")
def test_a_second_step_and_windows_under_a_strategy_are_refused(two_replicas: tf.distribute.Strategy) -> None:
    def build() -> tf.Operation:
        w = tf1.get_variable("w", [2], initializer=tf1.ones_initializer())
        return bert.create_optimizer(tf.reduce_sum(w) / 2, 0.125, 20, 0)

    def build_twice() -> tf.Operation:
        return tf.group(build(), bert.create_optimizer(tf.add_n(tf1.trainable_variables()), 0.125, 20, 0))

    refusal = "num_accumulation_steps=2 is not supported under Mirrored"
    with tf.Graph().as_default(), two_replicas.scope(), pytest.raises(NotImplementedError, match=refusal):
        kit_models.Model(num_accumulation_steps=2)
    with two_replicas.scope():
        with tf.Graph().as_default(), pytest.raises(ValueError, match=r"trains w already.*once in a graph"):
            two_replicas.run(build_twice)
        two_replicas.run(build)
        with tf1.variable_scope("", reuse=True), pytest.raises(ValueError, match=r"trains w already.*once in a graph"):
            two_replicas.run(build)


def test_eager_code_is_refused() -> None:
    if not tf.executing_eagerly():
        pytest.skip("graph mode is on")
    with pytest.raises(RuntimeError, match="TensorFlow executes eagerly"):
        bert.create_optimizer(tf.constant(1.0), 0.1, 10, 0)
