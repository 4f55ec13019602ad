"""A SessionRunHook that shows the loss scale: in the log, and in TensorBoard."""

from typing import Any

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers import LossScaleManager
from tfmp.core.outcomes import LossScaleStatus
from tfmp.core.overflow_counts import OverflowReport
from tfmp.core.steps_of_graph import managers_of_graph, overflow_reports_of_graph
from tfmp.monitoring.log import visible_logger
from tfmp.monitoring.loss_fetches import GraphLosses, values_of
from tfmp.monitoring.overflow_messages import GuiltyVariables
from tfmp.monitoring.step_counting import lines_that_assign
from tfmp.monitoring.stuck import LossScaleStuckError, OnStuck, StuckWatch, several_processes


class LossScaleLoggingHook(tf.compat.v1.train.SessionRunHook):
    """Logs the loss scale, the global step, and the steps applied and skipped.

    Reports come after the first step, then every N steps or seconds, and at the end. Every call of the session's
    `run` counts as a step, skipped or not: `global_step` would stand still while steps are skipped. Between two
    reports nothing is fetched.

    It warns, once, when `global_step` goes up faster than steps are applied: a script that advances it by hand counts
    twice. The warning names the line, if the graph tells it.

    A report after skipped steps names the variables whose gradients overflowed on the last of them, and the end of the
    session tells how often each did since it began.

    It says, once, when training is stuck: the scale sits at its floor and steps are skipped all the same, it was
    lowered again and again without one applied step, or the loss itself is infinite or NaN. For the latter it
    fetches the loss of the steps that it reports, in the run that takes them. Where several processes train together,
    give the hook to each of them: the loss, which is one process's own, is then only warned of.

    Reports go to `logging.getLogger("tfmp")` at level INFO, which the hook turns on unless the program gave that logger
    a level of its own; and to standard error where no handler is set up.

    Args:
        manager: A loss-scale manager, or an optimizer or a `tfmp.GradScaler` that holds one; by default all managers
            whose steps the graph holds when the session begins.
        every_n_steps: Steps between two reports; 100 if `every_n_secs` is not given either.
        every_n_secs: Seconds between two reports, in place of `every_n_steps`.
        summary_dir: A directory for TensorBoard summaries at each report: the fields of
            `tfmp.LossScaleStatus`, over `global_step`. By default none are written.
        on_stuck: What to do when training is stuck: "warn", "stop" (warn, and end the training), or "raise". The end
            of the session only warns.
        stuck_after: After how many back-offs in a row without an applied step it is stuck.
        loss: The unscaled loss, a tensor or its name; by default all losses that were scaled in the graph, as
            `compute_gradients` does.

    Raises:
        TypeError: `manager` is neither a manager nor holds one.
        ValueError: Both intervals are given, or one is not positive; or `on_stuck` or `stuck_after` is out of range.
            When the session begins: there is no manager to report on, `loss` is none of the graph, or several
            processes would stop at different steps, by seconds.
        LossScaleStuckError: At a report: training is stuck, and `on_stuck` is "raise".

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
        *,
        on_stuck: OnStuck = "warn",
        stuck_after: int = 64,
        loss: tf.Tensor | str | None = None,
    ) -> None:
        self._given_managers = [] if manager is None else [_manager_of(manager)]
        self._timer = _timer(every_n_steps, every_n_secs)
        self._every_n_secs = every_n_secs
        self._summary_dir = summary_dir
        self._stuck = StuckWatch(on_stuck, stuck_after)
        self._given_loss = loss

    def begin(self) -> None:
        """Build the fetches, while the graph can still grow."""
        self._managers = self._given_managers or managers_of_graph()
        if not self._managers:
            raise ValueError(
                "the graph holds no step of a tfmp.LossScaleOptimizer: build the train op before the session, or pass "
                "LossScaleLoggingHook a manager."
            )
        several = several_processes(tf.distribute.get_strategy())
        if several and self._every_n_secs is not None and not self._stuck.only_warns:
            raise ValueError(
                f"several processes train together, and each has a clock of its own: with every_n_secs="
                f'{self._every_n_secs!r} one would stop before the others. Pass every_n_steps, or on_stuck="warn".'
            )
        self._losses = GraphLosses(self._managers, self._given_loss)
        self._global_step = tf.compat.v1.train.get_global_step()
        self._overflows = [report for manager in self._managers for report in overflow_reports_of_graph(manager)]
        self._fetches = {
            "statuses": [manager.get_status() for manager in self._managers],
            # A fetch cannot be None.
            "global_step": [] if self._global_step is None else [self._global_step.read_value()],
            "applied_steps": [
                manager.get_status().applied_steps for manager in dict.fromkeys([*self._managers, *managers_of_graph()])
            ],
            "overflows": [(report.last, report.steps) for report in self._overflows],
        }
        self._guilty = GuiltyVariables()
        self._ahead: int | None = None
        self._warned = False
        self._stuck.start(several=several)
        self._logger = visible_logger()
        self._writer = tf.compat.v1.summary.FileWriterCache.get(self._summary_dir) if self._summary_dir else None
        self._timer.reset()
        self._steps = 0
        self._due = False

    def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> tf.compat.v1.train.SessionRunArgs | None:
        """Ask for the losses of a step that is reported."""
        self._due = self._timer.should_trigger_for_step(self._steps + 1)
        losses = [self._losses.of(manager) for manager in self._managers]
        if not (self._due and any(losses) and self._losses.are_computed_by(run_context.original_args.fetches)):
            return None
        return tf.compat.v1.train.SessionRunArgs(losses)

    def after_run(
        self, run_context: tf.compat.v1.train.SessionRunContext, run_values: tf.compat.v1.train.SessionRunValues
    ) -> None:
        """Report if it is time to."""
        self._steps += 1
        if not self._due:
            return
        try:
            if self._report(run_context.session, run_values.results):
                run_context.request_stop()
        except LossScaleStuckError:
            # MonitoredSession ends no hook after an error.
            self._finish(run_context.session)
            raise

    def end(self, session: tf.compat.v1.Session) -> None:
        """Report the last step, unless that was done, and who overflowed how often."""
        try:
            if self._timer.last_triggered_step() != self._steps:
                self._report(session, at_end=True)
        finally:
            self._finish(session)

    def _finish(self, session: tf.compat.v1.Session) -> None:
        """Tell who overflowed how often, and leave no summary unwritten."""
        try:
            for table in self._guilty.tables(self._with_values(session.run(self._fetches["overflows"]))):
                self._logger.info("%s", table)
        finally:
            if self._writer:
                self._writer.flush()

    def _report(
        self, session: tf.compat.v1.Session, losses: list[list[Any]] | None = None, *, at_end: bool = False
    ) -> bool:
        """Show everything, and tell whether training should stop."""
        self._timer.update_last_triggered_step(self._steps)
        fetched = session.run(self._fetches)
        global_step = fetched["global_step"][0] if fetched["global_step"] else None
        if global_step is not None:
            self._warn_if_counted_twice(global_step - sum(fetched["applied_steps"]))
        for index, status in enumerate(fetched["statuses"]):
            self._logger.info("%s", _line(status, global_step))
            if self._writer:
                summary = _summary(status, suffix=f"_{index}" if index else "")
                self._writer.add_summary(summary, self._steps if global_step is None else global_step)
        for sentence in self._guilty.sentences(self._with_values(fetched["overflows"])):
            self._logger.info("%s", sentence)
        losses = losses or [[] for _ in self._managers]
        # All of them, so that each is heard.
        stops = [
            self._stuck.wants_stop(manager, status, values_of(values), at_end=at_end)
            for manager, status, values in zip(self._managers, fetched["statuses"], losses, strict=True)
        ]
        return any(stops)

    def _with_values(self, fetched: list[Any]) -> list[OverflowReport]:
        return [OverflowReport(report.names, *counts) for report, counts in zip(self._overflows, fetched, strict=True)]

    def _warn_if_counted_twice(self, ahead: int) -> None:
        """Warn, once, when the global step goes up by more than the steps that were applied."""
        if self._ahead is None:
            self._ahead = ahead
        elif ahead > self._ahead and not self._warned:
            self._warned = True
            lines = lines_that_assign(self._global_step)
            self._logger.warning(
                "global_step went up by more than the applied steps: %s advances it too. A script that assigns "
                "global_step + 1 itself must leave that to LossScaleOptimizer.",
                f"{', '.join(lines)}, beside the optimizer," if lines else "something beside the optimizer",
            )


def _manager_of(manager: Any) -> LossScaleManager:  # noqa: ANN401 - it is what is being checked
    found = getattr(manager, "_loss_scale_manager", manager)
    if not isinstance(found, LossScaleManager):
        raise TypeError(
            "manager must be a tfmp.LossScaleManager, or a tfmp.LossScaleOptimizer or tfmp.GradScaler, got "
            f"{manager!r} of type {type(manager).__name__}."
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


def _line(status: LossScaleStatus, global_step: int | None) -> str:
    step = "" if global_step is None else f", global step {global_step}"
    return (
        f"loss scale {status.loss_scale:.10g}{step}, steps applied {status.applied_steps}, "
        f"skipped {status.skipped_steps} ({status.consecutive_skipped_steps} in a row)"
    )


def _summary(status: LossScaleStatus, suffix: str) -> tf.compat.v1.Summary:
    return tf.compat.v1.Summary(
        value=[
            tf.compat.v1.Summary.Value(tag=tag + suffix, simple_value=float(value))
            for tag, value in status._asdict().items()
        ]
    )
