"""Measures the training throughput in examples per second."""

from tfmp.core import settings


class Throughput:
    """Measures the examples per second, without the time that start-up and checkpoints take.

    A run is one `session.run` call that trains. A window is the group of runs that make one step; without gradient
    accumulation it is a single run.

        A window ends after `runs_per_step` runs, or earlier if the global step changes.
        The first `left_out` windows, and the first `left_out` windows after each checkpoint, are not counted.
        attempted    the examples of all counted windows / the seconds of all counted windows
        applied      the examples of the counted windows that changed the global step / the same seconds

    If no step is skipped, the two values are equal.

    The class counts windows and not the growth of the global step. NVIDIA's script uses that growth, and subtracts the
    number of runs near a checkpoint from it. If many steps are skipped, there are more such runs than steps, and the
    script reports a negative throughput.

    Args:
        examples_per_run: The number of examples that all workers together process in one run.
        global_step: The global step when the training begins.
        runs_per_step: The number of runs in a window; more than 1 with gradient accumulation.
        steps_per_checkpoint: The number of steps between two checkpoints; None if no checkpoints are saved.
        left_out: The number of windows that are not counted at the start of training, and after each checkpoint. A
            checkpoint is expected whenever the number of steps since the start is a multiple of `steps_per_checkpoint`.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Examples:
        >>> throughput = Throughput(examples_per_run=32, global_step=0, left_out=1)
        >>> throughput.add(seconds=9.0, global_step=0)
        >>> throughput.add(seconds=0.5, global_step=0)
        >>> throughput.add(seconds=0.5, global_step=1)
        >>> throughput.attempted, throughput.applied, throughput.seconds
        (64.0, 32.0, 1.0)

    Provisional: a minor version may change it.
    """

    def __init__(
        self,
        examples_per_run: int,
        global_step: int = 0,
        *,
        runs_per_step: int = 1,
        steps_per_checkpoint: int | None = None,
        left_out: int = 6,
    ) -> None:
        self._examples_per_run = settings.count("examples_per_run", examples_per_run)
        self._first_step = self._last_step = settings.count("global_step", global_step, least=0)
        self._runs_per_step = settings.count("runs_per_step", runs_per_step)
        self._steps_per_checkpoint = (
            None if steps_per_checkpoint is None else settings.count("steps_per_checkpoint", steps_per_checkpoint)
        )
        self._left_out = self._to_leave_out = settings.count("left_out", left_out, least=0)
        self._window: list[float] = []
        self._attempted_runs = self._applied_runs = 0
        self._seconds = 0.0

    def add(self, seconds: float, global_step: int) -> None:
        """Add a run. With gradient accumulation each run is one micro-batch.

        Args:
            seconds: The duration of the run.
            global_step: The global step after the run, for example the value of `step_update:0`.

        Raises:
            TypeError: `seconds` is not a number.
            ValueError: `seconds` is not finite.
        """
        self._window.append(max(settings.number("seconds", seconds), 0.0))
        applied = global_step > self._last_step
        self._last_step = global_step
        # A training that is resumed from a checkpoint within a window applies its first step early.
        if applied or len(self._window) == self._runs_per_step:
            self._end_window(applied)

    def _end_window(self, applied: bool) -> None:
        if self._to_leave_out:
            self._to_leave_out -= 1
        else:
            self._attempted_runs += len(self._window)
            self._applied_runs += len(self._window) if applied else 0
            self._seconds += sum(self._window)
        self._window = []
        every = self._steps_per_checkpoint
        if applied and every is not None and (self._last_step - self._first_step) % every == 0:
            self._to_leave_out = self._left_out

    @property
    def attempted(self) -> float:
        """Examples per second, of applied and skipped steps; 0 until a window is counted."""
        return self._per_second(self._attempted_runs)

    @property
    def applied(self) -> float:
        """Examples per second, of applied steps only; 0 until a window is counted."""
        return self._per_second(self._applied_runs)

    @property
    def seconds(self) -> float:
        """The total duration of all counted windows, in seconds."""
        return self._seconds

    def _per_second(self, runs: int) -> float:
        return runs * self._examples_per_run / self._seconds if self._seconds else 0.0
