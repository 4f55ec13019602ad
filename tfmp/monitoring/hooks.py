"""A SessionRunHook that shows the loss scale in the log and in TensorBoard."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.log import visible_logger
from tfmp.core.managers import LossScaleManager
from tfmp.core.managers.step_counters import LossScaleStatus
from tfmp.core.monitors.graph_records import managers_of_graph, overflow_reports_of_graph
from tfmp.core.overflow.overflow_counts import OverflowReport
from tfmp.core.step.properties import StepProperties
from tfmp.monitoring.graph_ranges import GraphRanges
from tfmp.monitoring.graph_spikes import GraphSpikes
from tfmp.monitoring.loss_fetches import LossFetches, flat_loss_values
from tfmp.monitoring.norm_history import NormHistory
from tfmp.monitoring.overflow_messages import OverflowMessages
from tfmp.monitoring.step_counting import lines_that_assign
from tfmp.monitoring.stuck import LossScaleStuckError, OnStuck, StuckWatch, several_processes
from tfmp.monitoring.summaries import summary_value
from tfmp.ranges.history import RangeHistory


class LossScaleLoggingHook(tf.compat.v1.train.SessionRunHook):
    """Logs the loss scale, the global step, the gradient norm, and how many steps were applied and skipped.

    The hook reports after the first step, then every N steps or seconds, and at the end of the session. Each call of
    the session's `run` counts as one step, whether the step is applied or skipped. (`global_step` cannot serve as that
    count, because it stands still while steps are skipped.) Between two reports the hook fetches nothing.

    A report that follows skipped steps names the variables whose gradients overflowed at the last skipped step. At the
    end of the session the hook logs how often the gradient of each variable overflowed during the session.

    The norm of the gradients is that of the reported step, unscaled and before clipping. It is fetched at a report
    only, in the `session.run` call that takes the step; if that is not possible, for example with
    `accumulation_steps`, it is shown if the optimizer's `record_gradient_norm` was called before the step was built.
    The same holds for the report at the end of the session, which comes too late to be fetched with its step. If the
    optimizer has a `tfmp.SpikeDetector`, the hook also shows how many steps were skipped as spikes, and names the
    gradients to which the last one is due.

    The hook warns when training is stuck, which means one of three things: steps are skipped although the loss scale is
    at its lowest value; the scale was lowered many times in a row without one applied step; or the unscaled loss is
    infinite or NaN. The warning is not repeated until a step has been applied. To check the loss, the hook fetches it
    at each report, in the same `session.run` call that takes the step. If several processes train together, give the
    hook to each of them. A loss belongs to one process alone, so in that case a bad loss causes a warning but never
    ends the training.

    The hook also warns, once, when `global_step` goes up faster than steps are applied. This happens if a script
    increments `global_step` itself, in addition to the optimizer. The warning names the line of the script if the
    graph tells it.

    Messages go to `logging.getLogger("tfmp")`. The hook sets the level of this logger to INFO unless the program has
    set a level, and adds a handler for standard error if no handler is set up.

    Args:
        manager: The loss-scale manager to report on, or an optimizer or `tfmp.GradScaler` that holds one. By default
            the hook reports on all managers whose training steps are in the graph when the session begins.
        every_n_steps: The number of steps between two reports; 100 if `every_n_secs` is not given either.
        every_n_secs: The number of seconds between two reports, as an alternative to `every_n_steps`.
        summary_dir: A directory for TensorBoard summaries. Each report writes the fields of `tfmp.LossScaleStatus`
            there, `gradient_norm`, and `skipped_spikes` if there is a detector, with `global_step` as their step. By
            default no summaries are written.
        on_stuck: What to do when training is stuck: "warn" logs a warning, "stop" logs it and ends the training,
            "raise" raises `LossScaleStuckError`. The report at the end of the session always warns only.
        stuck_after: Training is stuck after this many back-offs (reductions of the scale) in a row without an applied
            step.
        loss: The unscaled loss, a tensor or its name. By default the hook takes all losses that were scaled in the
            graph, for example by `compute_gradients`.
        ranges_every_n_steps: The number of steps between two recordings of the powers of two of gradients, weights and
            probes (`tfmp.ranges.probe`); by default there are none. A recording is fetched in the `session.run` call
            that takes the step. It writes TensorBoard histograms, whose horizontal axis is the exponent, and the shares
            of gradients that are 0, become 0 or lose bits in float16 at the present loss scale, to `summary_dir`. Under
            Horovod the counts are those of all workers. If the hook reports on several managers, the steps of the first
            one are recorded. See the property `ranges`.

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
        self._stuck = StuckWatch(on_stuck, stuck_after)
        self._given_loss = loss
        self._norms = NormHistory()
        self._ranges = (
            None
            if ranges_every_n_steps is None
            else GraphRanges(settings.count("ranges_every_n_steps", ranges_every_n_steps))
        )

    @property
    def norms(self) -> NormHistory:
        """The norms of the gradients at each report; `hook.norms.plot("norms.png")` draws them.

        If the hook reports on several managers, they are those of the first one.
        """
        return self._norms

    @property
    def ranges(self) -> RangeHistory:
        """The recorded powers of two; `hook.ranges.plot("ranges.png")` draws it.

        Raises:
            ValueError: `ranges_every_n_steps` was not given.
        """
        if self._ranges is None:
            raise ValueError("no ranges are looked at: pass ranges_every_n_steps to LossScaleLoggingHook.")
        return self._ranges.history

    def begin(self) -> None:
        """Add the operations that the reports fetch to the graph, before the session finalizes it."""
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
                f"{self._every_n_secs!r} one process would stop before the others. Pass every_n_steps, or "
                'on_stuck="warn".'
            )
        self._losses = LossFetches(self._managers, self._given_loss)
        self._spikes = [GraphSpikes(manager) for manager in self._managers]
        self._global_step = tf.compat.v1.train.get_global_step()
        self._overflows = [report for manager in self._managers for report in overflow_reports_of_graph(manager)]
        self._fetches = {
            "statuses": [manager.get_status() for manager in self._managers],
            # A list, because None is not a valid fetch.
            "global_step": [] if self._global_step is None else [self._global_step.read_value()],
            "applied_steps": [
                manager.get_status().applied_steps for manager in dict.fromkeys([*self._managers, *managers_of_graph()])
            ],
            "overflows": [(report.last, report.steps) for report in self._overflows],
            "spikes": [spikes.fetches for spikes in self._spikes],
        }
        if self._ranges is not None:
            self._ranges.begin(self._managers[0])
        self._overflow_messages = OverflowMessages()
        self._ahead: int | None = None
        self._warned = False
        self._stuck.start(several=several)
        self._logger = visible_logger()
        self._writer = tf.compat.v1.summary.FileWriterCache.get(self._summary_dir) if self._summary_dir else None
        self._timer.reset()
        self._steps = 0
        self._due = False

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        """Read what the session restored from a checkpoint, so that no message repeats it.

        Args:
            session: The session that was created.
            coord: Not used.
        """
        del coord
        for spikes in self._spikes:
            spikes.start(session)

    def before_run(self, run_context: tf.compat.v1.train.SessionRunContext) -> tf.compat.v1.train.SessionRunArgs | None:
        """Add what a report or a recording of ranges needs to the fetches, if this call takes a step for one of them.

        Args:
            run_context: The `session.run` call that is about to begin.
        """
        self._due = self._timer.should_trigger_for_step(self._steps + 1)
        losses = [self._losses.for_manager(manager) for manager in self._managers] if self._due else []
        fetched = run_context.original_args.fetches
        norms = [spikes.norms_of_run(fetched) for spikes in self._spikes] if self._due else []
        ranges_due = self._ranges is not None and self._ranges.is_due(self._steps + 1)
        is_due = any(losses) or any(norms) or ranges_due
        if not (is_due and self._losses.can_join(fetched)):
            return None
        ranges, fed = self._ranges.fetches(run_context.session) if ranges_due and self._ranges else ({}, {})
        fetches = {"losses": losses, "norms": norms, "ranges": ranges}
        return tf.compat.v1.train.SessionRunArgs(fetches, feed_dict=fed)

    def after_run(
        self, run_context: tf.compat.v1.train.SessionRunContext, run_values: tf.compat.v1.train.SessionRunValues
    ) -> None:
        """Count the step, and report if a report is due.

        Args:
            run_context: The `session.run` call that has ended.
            run_values: The values of what `before_run` asked for, if it did.
        """
        self._steps += 1
        results = run_values.results or {"losses": None, "norms": None, "ranges": {}}
        if self._ranges is not None and results["ranges"]:
            self._record_ranges(run_context.session, self._ranges, results["ranges"])
        if not self._due:
            return
        try:
            if self._report(run_context.session, results["losses"], results["norms"]):
                run_context.request_stop()
        except LossScaleStuckError:
            # MonitoredSession does not call the `end` of its hooks after an error.
            self._finish(run_context.session)
            raise

    def end(self, session: tf.compat.v1.Session) -> None:
        """Report the last step unless it was reported already, then log which variables overflowed how often.

        Args:
            session: The session that is about to close.
        """
        try:
            if self._timer.last_triggered_step() != self._steps:
                self._report(session, at_end=True)
        finally:
            self._finish(session)

    def _finish(self, session: tf.compat.v1.Session) -> None:
        """Log which variables overflowed how often, and flush the summaries to disk."""
        try:
            reports = self._with_values(session.run(self._fetches["overflows"]))
            for table in self._overflow_messages.summary_tables(reports):
                self._logger.info("%s", table)
        finally:
            if self._writer:
                self._writer.flush()

    def _report(
        self,
        session: tf.compat.v1.Session,
        losses: list[list[Any]] | None = None,
        norms: list[list[float]] | None = None,
        *,
        at_end: bool = False,
    ) -> bool:
        """Log and write one report; return True if training should stop."""
        self._timer.update_last_triggered_step(self._steps)
        fetched = session.run(self._fetches)
        global_step = fetched["global_step"][0] if fetched["global_step"] else None
        if global_step is not None:
            self._warn_if_counted_twice(global_step - sum(fetched["applied_steps"]))
        norms = norms or [[] for _ in self._managers]
        for index, (status, spikes) in enumerate(zip(fetched["statuses"], self._spikes, strict=True)):
            shown = spikes.shown(status, fetched["spikes"][index], norms[index])
            if index == 0 and "gradient_norm" in shown:
                self._norms._add(shown["gradient_norm"], status, int(shown.get("skipped_spikes", 0)))
            self._logger.info("%s", _line(status, global_step, shown))
            if self._writer:
                summary = _summary({**status._asdict(), **shown}, suffix=f"_{index}" if index else "")
                self._writer.add_summary(summary, self._steps if global_step is None else global_step)
        for sentence in self._overflow_messages.new_overflows(self._with_values(fetched["overflows"])):
            self._logger.info("%s", sentence)
        for spikes, found in zip(self._spikes, fetched["spikes"], strict=True):
            spikes.report(found)
        losses = losses or [[] for _ in self._managers]
        # A list and not a generator in any(): every manager must get its chance to warn.
        stops = [
            self._stuck.wants_stop(manager, status, flat_loss_values(values), at_end=at_end)
            for manager, status, values in zip(self._managers, fetched["statuses"], losses, strict=True)
        ]
        return any(stops)

    def _record_ranges(self, session: tf.compat.v1.Session, ranges: GraphRanges, fetched: Mapping[str, Any]) -> None:
        status, global_step = session.run([self._fetches["statuses"][0], self._fetches["global_step"]])
        recording = ranges.record(self._steps, int(status.applied_steps + status.skipped_steps), fetched)
        if self._writer is None:
            return
        values = [tf.compat.v1.Summary.Value(tag=tag, simple_value=value) for tag, value in recording.scalars().items()]
        values += [summary_value(tag, histogram) for tag, histogram in recording.tagged()]
        self._writer.add_summary(tf.compat.v1.Summary(value=values), global_step[0] if global_step else self._steps)

    def _with_values(self, fetched: list[Any]) -> list[OverflowReport]:
        return [OverflowReport(report.names, *counts) for report, counts in zip(self._overflows, fetched, strict=True)]

    def _warn_if_counted_twice(self, ahead: int) -> None:
        """Warn, once, if the global step minus the applied steps (`ahead`) has grown since the first report."""
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


def _line(status: LossScaleStatus, global_step: int | None, shown: Mapping[str, float]) -> str:
    step = "" if global_step is None else f", global step {global_step}"
    spikes = f", {shown['skipped_spikes']} as spikes" if "skipped_spikes" in shown else ""
    norm = f", gradient norm {shown['gradient_norm']:.4g}" if "gradient_norm" in shown else ""
    return (
        f"loss scale {status.loss_scale:.10g}{step}, steps applied {status.applied_steps}, "
        f"skipped {status.skipped_steps} ({status.consecutive_skipped_steps} in a row{spikes}){norm}"
    )


def _summary(values: Mapping[str, float], suffix: str) -> tf.compat.v1.Summary:
    return tf.compat.v1.Summary(
        value=[tf.compat.v1.Summary.Value(tag=tag + suffix, simple_value=float(value)) for tag, value in values.items()]
    )
