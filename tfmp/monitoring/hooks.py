"""A SessionRunHook that shows the loss scale in the log and in TensorBoard."""

import math
from typing import Any

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.managers import LossScaleManager
from tfmp.core.messages import visible_logger
from tfmp.core.monitors import records_of_graph
from tfmp.core.step.properties import StepProperties
from tfmp.monitoring.fetches import Fetched, GraphFetches
from tfmp.monitoring.norm_history import NormHistory
from tfmp.monitoring.reporter import Reporter, StepValues
from tfmp.monitoring.stuck import OnStuck, several_processes
from tfmp.monitoring.summaries import GraphSummaries
from tfmp.ranges.history import RangeHistory
from tfmp.ranges.recorders import GraphRanges


class LossScaleLoggingHook(tf.compat.v1.train.SessionRunHook):
    """Logs the loss scale, the global step, the gradient norm, and how many steps were applied and skipped.

    The hook reports after the first step, then every N steps or seconds, and at the end of the session. Each call of
    the session's `run` counts as one step, whether the step is applied or skipped. (`global_step` cannot serve as that
    count, because it stands still while steps are skipped.) Between two reports the hook fetches nothing.

    A report that follows skipped steps names the variables whose gradients overflowed at the last skipped step, or made
    the norm of the last spike so large. At the end of the session the hook logs how often the gradient of each variable
    overflowed during the session.

    The norm of the gradients is that of the reported step, unscaled and before clipping. It is fetched in the
    `session.run` call that takes the step. If that is not possible, for example with `accumulation_steps`, or in the
    report at the end of the session, it is shown if the optimizer's `record_gradient_norm` was called before the step
    was built. If the optimizer has a `tfmp.SpikeDetector`, the hook also shows how many steps were skipped as spikes.

    The hook warns, once until a step has been applied, if training is stuck; `tfmp.LossScaleStuckError` says when it
    is. It also warns, once, if `global_step` goes up faster than steps are applied, because the script increments it,
    too. If several processes train together, give the hook to each of them.

    Messages go to `logging.getLogger("tfmp")`. The hook sets the level of this logger to INFO unless the program has
    set a level, and adds a handler for standard error if no handler is set up.

    Args:
        manager: The loss-scale manager to report on, or an optimizer or `tfmp.GradScaler` that holds one. By default
            the hook reports on all managers whose training steps are in the graph when the session begins.
        every_n_steps: The number of steps between two reports; 100 if `every_n_secs` is not given either.
        every_n_secs: The number of seconds between two reports, as an alternative to `every_n_steps`.
        summary_dir: A directory for TensorBoard summaries. Each report writes the fields of `tfmp.LossScaleStatus`
            there, `gradient_norm`, and `skipped_spikes` if there is a detector, with `global_step` as their step. By
            default there are none.
        on_stuck: What to do when training is stuck: "warn" logs a warning, "stop" logs it and ends the training,
            "raise" raises `LossScaleStuckError`. The report at the end of the session always warns only.
        stuck_after: Training is stuck after this many back-offs (reductions of the scale) without an applied step.
        loss: The unscaled loss, a tensor or its name, which is fetched with the step. By default the hook takes all
            losses that were scaled in the graph, for example by `compute_gradients`.
        ranges_every_n_steps: The number of steps between two recordings of the powers of two of gradients, weights and
            probes (`tfmp.ranges.probe`), of all workers of Horovod; by default there are none. A recording is fetched
            in the `session.run` call that takes the step. It writes TensorBoard histograms, whose horizontal axis is
            the exponent, and the shares of gradients that are 0, become 0 or lose bits in float16 at the present loss
            scale, to `summary_dir`. Of several managers, the steps of the first one are recorded. See `ranges`.

    Raises:
        TypeError: `manager` is not a manager and does not hold one.
        ValueError: Both intervals are given, or one of them is not positive; or `on_stuck` or `stuck_after` is out of
            range. When the session begins: the graph holds no manager to report on; `loss` is not a tensor of the
            graph; or several processes train together, `every_n_secs` is given and `on_stuck` is not "warn", so that
            the processes would stop at different steps.
        LossScaleStuckError: At a report, if training is stuck and `on_stuck` is "raise".

    Examples:
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
        manager: LossScaleManager | Any = None,  # noqa: ANN401 - optimizers of several hosts hold a manager
        every_n_steps: int | None = None,
        *,
        every_n_secs: float | None = None,
        summary_dir: str | None = None,
        on_stuck: OnStuck = "warn",
        stuck_after: int = 64,
        loss: tf.Tensor | str | None = None,
        ranges_every_n_steps: int | None = None,
    ) -> None:
        self._given_managers = [] if manager is None else [_manager_of(manager)]
        self._timer = _timer(every_n_steps, every_n_secs)
        self._every_n_secs = every_n_secs
        self._summary_dir = summary_dir
        self._only_warns = on_stuck == "warn"
        self._reporter = Reporter(on_stuck, stuck_after)
        self._given_loss = loss
        self._ranges = None if ranges_every_n_steps is None else GraphRanges(ranges_every_n_steps)

    @property
    def norms(self) -> NormHistory:
        """The norms of the gradients at each report; `hook.norms.plot("norms.png")` draws them.

        If the hook reports on several managers, they are those of the first one.
        """
        return self._reporter.norms

    @property
    def ranges(self) -> RangeHistory:
        """The recorded powers of two; `hook.ranges.plot("ranges.png")` draws it.

        Raises:
            ValueError: `ranges_every_n_steps` was not given.
        """
        if self._ranges is None:
            raise ValueError("no ranges are looked at: pass ranges_every_n_steps to LossScaleLoggingHook.")
        return self._reporter.ranges

    def begin(self) -> None:
        """Add the operations that the reports fetch to the graph, before the session finalizes it."""
        managers = self._given_managers or records_of_graph().managers
        if not managers:
            raise ValueError(
                "the graph holds no step of a tfmp.LossScaleOptimizer: build the train op before the session, or pass "
                "LossScaleLoggingHook a manager."
            )
        several = several_processes(tf.distribute.get_strategy())
        if several and self._every_n_secs is not None and not self._only_warns:
            raise ValueError(
                f"several processes train together, and each has a clock of its own: with every_n_secs="
                f"{self._every_n_secs!r} one process would stop before the others. Pass every_n_steps, or "
                'on_stuck="warn".'
            )
        self._fetches = GraphFetches(managers, self._given_loss)
        if self._ranges is not None:
            self._ranges.begin(managers[0])
        self._logger = visible_logger()
        self._summaries = GraphSummaries(self._summary_dir)
        self._reporter.begin(self._summaries, several=several)
        self._ahead: float | None = None
        self._timer.reset()
        self._steps = 0
        self._due = False

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        """Read what the session restored from a checkpoint, so that no message repeats it."""
        del coord
        self._reporter.leave_out(self._fetches.after_step(session).of_managers)

    def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> tf.compat.v1.train.SessionRunArgs | None:
        """Add what a report or a recording of ranges needs to the fetches, if this call takes a step."""
        self._due = self._timer.should_trigger_for_step(self._steps + 1)
        ranges = self._ranges if self._ranges is not None and self._ranges.is_due(self._steps + 1) else None
        with_step = self._fetches.with_step(run_context.original_args.fetches) if self._due or ranges else None
        if with_step is None:
            return None
        of_ranges, fed = ranges.fetches(run_context.session) if ranges else ({}, {})
        fetches = {**(with_step if self._due else {}), "ranges": of_ranges}
        return tf.compat.v1.train.SessionRunArgs(fetches, feed_dict=fed)

    def after_run(
        self, run_context: tf.compat.v1.train.SessionRunContext, run_values: tf.compat.v1.train.SessionRunValues
    ) -> None:
        """Count the step, and report if a report is due."""
        self._steps += 1
        with_step = run_values.results or {}
        ranges = with_step.get("ranges")
        if not (self._due or ranges):
            return
        found = self._fetches.after_step(run_context.session, with_step)
        if ranges and self._ranges:
            attempted_steps = int(found.of_managers[0].status.attempted_steps)
            self._reporter.record(self._ranges.recording(self._steps, attempted_steps, ranges), self._step_of(found))
        if self._due and self._report(found):
            run_context.request_stop()

    def end(self, session: tf.compat.v1.Session) -> None:
        """Report the last step unless it was reported already, then log which variables overflowed how often."""
        try:
            found = self._fetches.after_step(session)
            if self._timer.last_triggered_step() != self._steps:
                self._report(found, at_end=True)
            self._reporter.finish(found.of_managers)
        finally:
            self._summaries.flush()

    def _step_of(self, found: Fetched) -> int:
        return self._steps if found.global_step is None else found.global_step

    def _report(self, found: Fetched, *, at_end: bool = False) -> bool:
        """Log and write one report; return True if training should stop."""
        self._timer.update_last_triggered_step(self._steps)
        if found.global_step is not None:
            self._warn_if_counted_twice(found.global_step - found.applied_steps)
        for values in found.of_managers:
            self._logger.info("%s", _line(values, found.global_step))
        return self._reporter.report(found.of_managers, self._step_of(found), at_end=at_end)

    def _warn_if_counted_twice(self, ahead: int) -> None:
        """Warn, once, if the global step minus the applied steps (`ahead`) has grown since the first report."""
        if self._ahead is None:
            self._ahead = ahead
        elif ahead > self._ahead:
            self._ahead = math.inf
            self._logger.warning(
                "global_step went up by more than the applied steps: something beside the optimizer advances it too. A "
                "script that assigns global_step + 1 itself must leave that to LossScaleOptimizer."
            )


def _manager_of(manager: Any) -> LossScaleManager:  # noqa: ANN401 - the type is checked here
    found = manager.manager if isinstance(manager, StepProperties) else manager
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


def _line(values: StepValues, global_step: int | None) -> str:
    status = values.status
    step = "" if global_step is None else f", global step {global_step}"
    spikes = "" if values.skipped_spikes is None else f", {values.skipped_spikes} as spikes"
    norm = "" if values.gradient_norm is None else f", gradient norm {values.gradient_norm:.4g}"
    return (
        f"loss scale {status.loss_scale:.10g}{step}, steps applied {status.applied_steps}, "
        f"skipped {status.skipped_steps} ({status.consecutive_skipped_steps} in a row{spikes}){norm}"
    )
