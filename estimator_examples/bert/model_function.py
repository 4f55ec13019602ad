"""The model function that Estimator trains and evaluates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

import tfmp
from estimator_examples.bert import hooks, modeling, optimization
from tfmp import bert

tf1 = tf.compat.v1

METRICS = ("MLM loss", "MLM accuracy", "NSP loss", "NSP accuracy")

# The result type is a string, so that this module can be imported on TensorFlow newer than 2.15, which has no
# tf.estimator.
ModelFunction = Callable[[dict[str, tf.Tensor], str], "tf.estimator.EstimatorSpec"]


@dataclasses.dataclass(frozen=True)
class Watching:
    """How a training is observed.

    Attributes:
        first_attempt: The number of the first attempted step.
        observers: Functions that are called with every step.
        summary_dir: The directory of TensorBoard's summaries; None to write none.
    """

    first_attempt: int
    observers: Sequence[hooks.Observer]
    summary_dir: str | None


def make_model_function(
    config: modeling.BertConfig, settings: optimization.OptimizerSettings, watching: Watching
) -> ModelFunction:
    """Make Estimator's `model_fn` for pre-training.

    Args:
        config: The shape of the model.
        settings: The settings of the optimizer.
        watching: How the training is observed.

    Returns:
        A function that takes the features and the mode.
    """

    def model_fn(features: dict[str, tf.Tensor], mode: str) -> tf.estimator.EstimatorSpec:
        if mode == tf.estimator.ModeKeys.TRAIN:
            return _training_spec(modeling.bert(features, config), features, settings, watching)
        whole = dataclasses.replace(config, dropout=0.0)
        return _evaluation_spec(modeling.bert(features, whole), features)

    return model_fn


def _training_spec(
    outputs: modeling.Outputs,
    features: dict[str, tf.Tensor],
    settings: optimization.OptimizerSettings,
    watching: Watching,
) -> tf.estimator.EstimatorSpec:
    mlm_loss, nsp_loss = modeling.mean_losses(outputs, features)
    # The manager and its variables must be made in Estimator's graph, so the whole training step is built here.
    training = optimization.build_training(mlm_loss + nsp_loss, settings)
    fetches = _step_fetches(training, mlm_loss, nsp_loss)
    return tf.estimator.EstimatorSpec(
        tf.estimator.ModeKeys.TRAIN,
        loss=mlm_loss + nsp_loss,
        train_op=training.train_op,
        training_hooks=[
            hooks.StepHook(fetches, watching.first_attempt, watching.observers),
            tfmp.LossScaleLoggingHook(training.optimizer, summary_dir=watching.summary_dir),
        ],
    )


def _step_fetches(training: bert.Training, mlm_loss: tf.Tensor, nsp_loss: tf.Tensor) -> dict[str, tf.Tensor]:
    # Without this dependency, a fetch could read the state before the step or after it.
    with tf.control_dependencies([training.train_op]):
        return {
            "global_step": tf.identity(tf1.train.get_global_step().read_value()),
            "mlm_loss": mlm_loss,
            "nsp_loss": nsp_loss,
            "learning_rate": training.learning_rate,
            "loss_scale": tf.identity(training.optimizer.loss_scale),
            "applied": tf.identity(training.optimizer.last_step_applied),
            "consecutive_skips": tf.identity(training.optimizer.consecutive_skipped_steps),
        }


def _evaluation_spec(outputs: modeling.Outputs, features: dict[str, tf.Tensor]) -> tf.estimator.EstimatorSpec:
    word_losses, weights = modeling.word_losses(outputs, features)
    next_losses = modeling.next_losses(outputs, features)
    right_words = tf.equal(tf.argmax(outputs.word_logits, -1, tf.int32), tf.reshape(features["masked_ids"], [-1]))
    right_next = tf.equal(tf.argmax(outputs.next_logits, -1, tf.int32), features["random_next"][:, 0])
    means = (
        tf1.metrics.mean(word_losses, weights),
        tf1.metrics.mean(tf.cast(right_words, tf.float32), weights),
        tf1.metrics.mean(next_losses),
        tf1.metrics.mean(tf.cast(right_next, tf.float32)),
    )
    return tf.estimator.EstimatorSpec(
        tf.estimator.ModeKeys.EVAL,
        loss=tf.reduce_mean(next_losses) + tf.reduce_sum(word_losses * weights) / tf.reduce_sum(weights),
        eval_metric_ops=dict(zip(METRICS, means, strict=True)),
    )
