"""The training of the BERT example, with a bare or a wrapped optimizer."""

import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

import tfmp
from estimator_examples.bert import modeling, options, pretraining_data, records
from tfmp import bert

tf1 = tf.compat.v1

GradsAndVars: TypeAlias = list[tuple[tf.Tensor, tf.Variable]]

#: The number of steps at the start of a turn that are not timed.
_WARM_UP = 5

_LEVELS = {"fp32": "O0", "fp16": "O2"}


class ContribOptimizer:
    """Loss scaling by the formula of `tf.contrib.mixed_precision`.

    The loss is multiplied by the scale, and each gradient by the scale's reciprocal, in the gradient's own type. Each
    gradient is checked separately. One `tf.cond` holds the inner optimizer's step.

    Args:
        inner: The inner optimizer.
        manager: The manager that decides the scale.
    """

    def __init__(self, inner: tf1.train.Optimizer, manager: tfmp.LossScaleManager) -> None:
        self._inner, self._manager = inner, manager

    def compute_gradients(self, loss: tf.Tensor, variables: Sequence[tf.Variable]) -> GradsAndVars:
        """Return unscaled gradients with their variables."""
        scale = self._manager.get_loss_scale()
        scaled = self._inner.compute_gradients(loss * tf.cast(scale, loss.dtype), variables)
        return [(tf.convert_to_tensor(grad) * tf.cast(1 / scale, grad.dtype), variable) for grad, variable in scaled]

    def apply_gradients(self, grads_and_vars: GradsAndVars, global_step: tf.Variable) -> tf.Operation:
        """Return an op that takes the step if all gradients are finite, and updates the manager's scale."""
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(grad)) for grad, _ in grads_and_vars])
        step = tf.cond(finite, lambda: self._inner.apply_gradients(grads_and_vars, global_step), tf.no_op)
        return tf.group(step, self._manager.update_loss_scale(finite))


#: The contenders: each function takes an optimizer and a manager, and returns the optimizer, wrapped or not.
WRAPPERS: dict[str, Callable[[tf1.train.Optimizer, tfmp.LossScaleManager], Any]] = {
    "bare": lambda inner, manager: inner,
    "tf.contrib's formula": ContribOptimizer,
    "tfmp": tfmp.LossScaleOptimizer,
}


class BertData(NamedTuple):
    """The training data that the example prepared from its text.

    Attributes:
        path: The file of training examples.
        limits: The sizes of the examples.
    """

    path: str
    limits: pretraining_data.Limits


class BertTraining:
    """The example's training, which starts from the same weights in every turn.

    Args:
        precision: The type of the activations, "fp32" or "fp16".
        example: The options of the example.
        data: The example's data.
    """

    def __init__(self, precision: str, example: options.Options, data: BertData) -> None:
        self._example, self._data = example, data
        self._config = modeling.BertConfig(
            vocab_size=data.limits.vocab_size,
            hidden_size=example.hidden_size,
            num_layers=example.num_layers,
            num_heads=example.num_heads,
            seq_length=example.seq_length,
            dropout=example.dropout,
            precision=_LEVELS[precision],
        )

    def turn(self, name: str, steps: int) -> dict[str, float]:
        """Train from the start, and return the steps per second, the last loss and the number of skipped steps.

        Args:
            name: The contender, a key of `WRAPPERS`.
            steps: The number of steps that are timed.
        """
        clock = _Clock()
        example, data = self._example, self._data
        batches = records.training_input(data.path, data.limits, example.batch_size, example.seed, skip_batches=0)

        def model_fn(features: dict[str, tf.Tensor], mode: str) -> tf.estimator.EstimatorSpec:
            loss = self._loss(features)
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=self._train_op(loss, WRAPPERS[name]))

        with tempfile.TemporaryDirectory() as directory:
            # No checkpoints are saved: every turn starts from the same weights.
            config = tf.estimator.RunConfig(
                directory,
                tf_random_seed=example.seed,
                save_summary_steps=None,
                save_checkpoints_secs=None,
                log_step_count_steps=None,
            )
            tf.estimator.Estimator(model_fn, config=config).train(batches, [clock], steps=_WARM_UP + steps)
        return {
            "steps_per_second": steps / (clock.times[-1] - clock.times[-1 - steps]),
            "losses": clock.loss,
            "skipped": len(clock.times) - _WARM_UP - steps,
        }

    def _loss(self, features: dict[str, tf.Tensor]) -> tf.Tensor:
        outputs = modeling.bert(features, self._config)
        losses, weights = modeling.word_losses(outputs, features)
        words = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
        return words + tf.reduce_mean(modeling.next_losses(outputs, features))

    def _train_op(self, loss: tf.Tensor, wrap: Callable[..., Any]) -> tf.Operation:
        # The same as `bert.build_training`, which always wraps the optimizer in tfmp's.
        example = self._example
        global_step = tf1.train.get_or_create_global_step()
        rate = bert.warm_up_then_decay(
            global_step,
            example.learning_rate,
            num_train_steps=example.num_train_steps,
            num_warmup_steps=example.num_warmup_steps,
        )
        adam = bert.AdamWeightDecayOptimizer(rate, example.weight_decay, exclude_from_weight_decay=bert.NOT_DECAYED)
        manager = tfmp.ExponentialUpdateLossScaleManager(
            example.init_loss_scale, example.incr_every_n_steps, decr_every_n_nan_or_inf=2, decr_ratio=0.5
        )
        optimizer = wrap(adam, manager)
        grads, variables = zip(*optimizer.compute_gradients(loss, tf1.trainable_variables()), strict=True)
        clipped, _ = tf.clip_by_global_norm([tf.convert_to_tensor(grad) for grad in grads], example.clip_norm)
        return optimizer.apply_gradients(list(zip(clipped, variables, strict=True)), global_step)


class _Clock(tf1.train.SessionRunHook):
    """Records the time at which each step ended, and the loss of the last step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.loss = float("nan")

    def before_run(self, run_context: tf1.train.SessionRunContext) -> tf1.train.SessionRunArgs:
        return tf1.train.SessionRunArgs(tf1.get_collection(tf1.GraphKeys.LOSSES)[-1])

    def after_run(self, run_context: tf1.train.SessionRunContext, run_values: tf1.train.SessionRunValues) -> None:
        self.times.append(time.perf_counter())
        self.loss = float(run_values.results)
