"""A SessionRunHook that shows the loss scale: in the log, and in TensorBoard."""

import logging
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers import LossScaleManager
from tfmp.core.outcomes import StepOutcomes
from tfmp.core.scaler import managers_of_graph


class _Report(NamedTuple):
    """What is shown of one manager: tensors of the graph, or numbers once they are fetched."""

    loss_scale: tf.Tensor
    outcomes: StepOutcomes


class LossScaleLoggingHook(tf.compat.v1.train.SessionRunHook):
    """Logs the loss scale, the global step, and the steps applied and skipped.

    Reports come after the first step, then every N steps or seconds, and at the end. Every call of the session's
    `run` counts as a step, skipped or not: `global_step` would stand still while steps are skipped. Between two
    reports nothing is fetched.

    It warns, once, when `global_step` goes up faster than steps are applied: a script that advances it by hand counts
    twice.

    Reports go to `logging.getLogger("tfmp")` at level INFO, which the hook turns on unless the program gave that logger
    a level of its own; and to standard error where no handler is set up.

    Args:
        manager: A loss-scale manager, or an optimizer that holds one; by default all managers whose steps the graph
            holds when the session begins.
        every_n_steps: Steps between two reports; 100 if `every_n_secs` is not given either.
        every_n_secs: Seconds between two reports, in place of `every_n_steps`.
        summary_dir: A directory for TensorBoard summaries at each report: `loss_scale`, `applied_steps`,
            `skipped_steps`, `consecutive_skipped_steps` and `last_step_finite`, over `global_step`. By default none
            are written.

    Raises:
        TypeError: `manager` is neither a manager nor an optimizer that holds one.
        ValueError: Both intervals are given, or one is not positive. When the session begins: there is no manager
            to report on.

    Example:
        >>> import tfmp
        >>> with tf.Graph().as_default():
        ...     w = tf.compat.v1.Variable(1.0, use_resource=True)
        ...     opt = tfmp.LossScaleOptimizer(
        ...         tf.compat.v1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))
        ...     train_op = opt.minimize(w, tf.compat.v1.train.get_or_create_global_step())
        ...     hook = tfmp.LossScaleLoggingHook(opt, every_n_steps=10)
        ...     with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        ...         for _ in range(3):
        ...             _ = session.run(train_op)
    """

    def __init__(
        self,
        manager: LossScaleManager | Any = None,  # noqa: ANN401 - or any optimizer that holds one
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        summary_dir: str | None = None,
    ) -> None:
        self._given_managers = [] if manager is None else [_manager_of(manager)]
        self._timer = _timer(every_n_steps, every_n_secs)
        self._summary_dir = summary_dir

    def begin(self) -> None:
        """Build the fetches, while the graph can still grow."""
        managers = self._given_managers or managers_of_graph()
        if not managers:
            raise ValueError(
                "the graph holds no step of a tfmp.LossScaleOptimizer: build the train op before the session, or pass "
                "LossScaleLoggingHook a manager."
            )
        global_step = tf.compat.v1.train.get_global_step()
        self._fetches = {
            "reports": [_Report(manager.get_loss_scale(), manager.get_step_outcomes()) for manager in managers],
            # A fetch cannot be None.
            "global_step": [] if global_step is None else [global_step.read_value()],
            "applied_steps": [
                manager.get_step_outcomes().applied_steps
                for manager in dict.fromkeys([*managers, *managers_of_graph()])
            ],
        }
        self._ahead: int | None = None
        self._warned = False
        self._logger = _visible_logger()
        self._writer = tf.compat.v1.summary.FileWriterCache.get(self._summary_dir) if self._summary_dir else None
        self._timer.reset()
        self._steps = 0

    def after_run(
        self, run_context: tf.compat.v1.train.SessionRunContext, run_values: tf.compat.v1.train.SessionRunValues
    ) -> None:
        """Report if it is time to."""
        del run_values
        self._steps += 1
        if self._timer.should_trigger_for_step(self._steps):
            self._report(run_context.session)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Report the last step, unless that was done."""
        if self._timer.last_triggered_step() != self._steps:
            self._report(session)
        if self._writer:
            self._writer.flush()

    def _report(self, session: tf.compat.v1.Session) -> None:
        self._timer.update_last_triggered_step(self._steps)
        fetched = session.run(self._fetches)
        global_step = fetched["global_step"][0] if fetched["global_step"] else None
        if global_step is not None:
            self._warn_if_counted_twice(global_step - sum(fetched["applied_steps"]))
        for index, report in enumerate(fetched["reports"]):
            self._logger.info("%s", _line(report, global_step))
            if self._writer:
                summary = _summary(report, suffix=f"_{index}" if index else "")
                self._writer.add_summary(summary, self._steps if global_step is None else global_step)

    def _warn_if_counted_twice(self, ahead: int) -> None:
        """Warn, once, when the global step goes up by more than the steps that were applied."""
        if self._ahead is None:
            self._ahead = ahead
        elif ahead > self._ahead and not self._warned:
            self._warned = True
            self._logger.warning(
                "global_step went up by more than the applied steps: something beside the optimizer advances it too. "
                "A script that assigns global_step + 1 itself must leave that to LossScaleOptimizer."
            )


def _manager_of(manager: Any) -> LossScaleManager:  # noqa: ANN401 - it is what is being checked
    found = getattr(manager, "_loss_scale_manager", manager)
    if not isinstance(found, LossScaleManager):
        raise TypeError(
            f"manager must be a tfmp.LossScaleManager or a tfmp.LossScaleOptimizer, got {manager!r} of type "
            f"{type(manager).__name__}."
        )
    return found


def _timer(every_n_steps: int | None, every_n_secs: float | None) -> tf.compat.v1.train.SecondOrStepTimer:
    if every_n_steps is not None and every_n_secs is not None:
        raise ValueError(
            f"pass every_n_steps or every_n_secs, not both, got every_n_steps={every_n_steps!r} and "
            f"every_n_secs={every_n_secs!r}."
        )
    if every_n_secs is not None:
        return tf.compat.v1.train.SecondOrStepTimer(every_secs=settings.positive("every_n_secs", every_n_secs))
    steps = 100 if every_n_steps is None else settings.count("every_n_steps", every_n_steps)
    return tf.compat.v1.train.SecondOrStepTimer(every_steps=steps)


def _visible_logger() -> logging.Logger:
    """Return the library's logger, shown somewhere: whoever adds the hook wants to read it."""
    logger = logging.getLogger("tfmp")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    return logger


def _line(report: _Report, global_step: int | None) -> str:
    outcomes = report.outcomes
    step = "" if global_step is None else f", global step {global_step}"
    return (
        f"loss scale {report.loss_scale:.10g}{step}, steps applied {outcomes.applied_steps}, "
        f"skipped {outcomes.skipped_steps} ({outcomes.consecutive_skipped_steps} in a row)"
    )


def _summary(report: _Report, suffix: str) -> tf.compat.v1.Summary:
    values = {"loss_scale": report.loss_scale, **report.outcomes._asdict()}
    return tf.compat.v1.Summary(
        value=[tf.compat.v1.Summary.Value(tag=tag + suffix, simple_value=float(value)) for tag, value in values.items()]
    )
