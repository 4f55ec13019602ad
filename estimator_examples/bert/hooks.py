"""A session hook that passes every step to observers, and an observer that ends a training that only skips."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from estimator_examples.bert.history import Step

Observer = Callable[[Step], None]


class TooManySkippedStepsError(RuntimeError):
    """Too many steps in a row were skipped, so that the training makes no progress."""


class StepHook(tf.compat.v1.train.SessionRunHook):
    """Fetches the figures of each step, and calls the observers with them."""

    def __init__(self, fetches: Mapping[str, tf.Tensor], first_attempt: int, observers: Sequence[Observer]) -> None:
        """Make the hook.

        Args:
            fetches: A tensor for every field of `Step` except `attempt`. The tensors must depend on the step, so that
                they are read after it.
            first_attempt: The number of the first attempted step.
            observers: Functions that are called with every step, in this order. An observer may raise an error to end
                the training.
        """
        self._fetches = dict(fetches)
        self._attempt = first_attempt
        self._observers = tuple(observers)

    def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> tf.compat.v1.train.SessionRunArgs:
        """Request the tensors of the step."""
        del run_context
        return tf.compat.v1.train.SessionRunArgs(self._fetches)

    def after_run(
        self,
        run_context: tf.compat.v1.train.SessionRunContext,
        run_values: tf.compat.v1.train.SessionRunValues,
    ) -> None:
        """Call the observers with the step."""
        del run_context
        values = {name: value.item() for name, value in run_values.results.items()}
        step = Step(attempt=self._attempt, **values)
        self._attempt += 1
        for observer in self._observers:
            observer(step)


def stop_after_skips(limit: int) -> Observer:
    """Make an observer that ends a training that skips every step.

    Args:
        limit: The number of skipped steps in a row at which the training ends.

    Returns:
        An observer that raises `TooManySkippedStepsError`.
    """

    def observe(step: Step) -> None:
        if step.consecutive_skips >= limit:
            raise TooManySkippedStepsError(
                f"the gradients of {step.consecutive_skips} steps in a row were not finite; the loss "
                f"scale is {step.loss_scale:.10g} now. With a fixed loss scale, choose a lower one, or "
                "--loss_scale 0; with a dynamic one, lower --init_loss_scale in another "
                "--model_dir, lower --learning_rate, or raise --max_consecutive_skips."
            )

    return observe
