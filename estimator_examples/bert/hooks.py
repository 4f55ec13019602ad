"""The session hook that hands every step to whoever watches it."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from estimator_examples.bert.history import Step

Observer = Callable[[Step], None]


class TooManySkippedStepsError(RuntimeError):
    """Training stands still: no step was applied for long."""


class StepHook(tf.compat.v1.train.SessionRunHook):
    """Fetches what a step did, and calls the observers with it."""

    def __init__(self, fetches: Mapping[str, tf.Tensor], first_attempt: int, observers: Sequence[Observer]) -> None:
        """Make the hook.

        Args:
            fetches: A tensor for every field of `Step` but the attempt, each to be read after the
                step is done.
            first_attempt: The number of the first step.
            observers: Called in this order with every step; one may raise to end the training.
        """
        self._fetches = dict(fetches)
        self._attempt = first_attempt
        self._observers = tuple(observers)

    def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> tf.compat.v1.train.SessionRunArgs:
        """Ask for the tensors."""
        del run_context
        return tf.compat.v1.train.SessionRunArgs(self._fetches)

    def after_run(
        self,
        run_context: tf.compat.v1.train.SessionRunContext,
        run_values: tf.compat.v1.train.SessionRunValues,
    ) -> None:
        """Tell the observers."""
        del run_context
        values = {name: value.item() for name, value in run_values.results.items()}
        step = Step(attempt=self._attempt, **values)
        self._attempt += 1
        for observer in self._observers:
            observer(step)


def stop_after_skips(limit: int) -> Observer:
    """Make an observer that ends a training which would skip for ever.

    Args:
        limit: Skipped steps in a row to stand.

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
