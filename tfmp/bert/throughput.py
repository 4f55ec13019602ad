"""How many examples a second a training takes in."""

from tfmp.core import settings


class Throughput:
    """Counts the examples and the seconds of windows, but of those that the start and checkpoints slow down.

    A window is as many runs as one step takes in, a single run without accumulation. Windows are counted, and not the
    growth of the global step: NVIDIA's script subtracts how often the step was seen near a checkpoint, which is more
    often than there are steps where many are skipped, and its rate is then negative.

        a window ends after `runs_per_step` runs, and wherever the global step moves
        the first `left_out` windows, and those after each checkpoint, are left out
        attempted    examples of the other windows / their seconds
        applied      examples of those of them that moved the global step / the same seconds

    So the two are equal where no step is skipped.

    Args:
        examples_per_run: Examples that all workers take in together in a run.
        global_step: Where the training begins.
        runs_per_step: Runs in a window, with accumulation.
        steps_per_checkpoint: Steps from one checkpoint to the next; None for no checkpoints.
        left_out: How many windows are left out at the beginning, and after a step that is a multiple of
            `steps_per_checkpoint` from there.

    Raises:
        TypeError: A setting is no number.
        ValueError: A setting is out of range.

    Example:
        >>> throughput = Throughput(examples_per_run=32, global_step=0, left_out=1)
        >>> throughput.add(seconds=9.0, global_step=0)
        >>> throughput.add(seconds=0.5, global_step=0)
        >>> throughput.add(seconds=0.5, global_step=1)
        >>> throughput.attempted, throughput.applied, throughput.seconds
        (64.0, 32.0, 1.0)
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
        """Take note of a run, of a micro-batch where gradients are accumulated.

        Args:
            seconds: How long it took.
            global_step: The global step after it, such as `step_update:0`.

        Raises:
            TypeError: `seconds` is no number.
            ValueError: `seconds` is not finite.
        """
        self._window.append(max(settings.number("seconds", seconds), 0.0))
        applied = global_step > self._last_step
        self._last_step = global_step
        # A training that a checkpoint resumes within a window moves the step early.
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
        """Examples a second, of steps applied and skipped; 0 before any window was counted."""
        return self._per_second(self._attempted_runs)

    @property
    def applied(self) -> float:
        """Examples a second, of steps applied; 0 before any window was counted."""
        return self._per_second(self._applied_runs)

    @property
    def seconds(self) -> float:
        """Seconds of the windows that were counted."""
        return self._seconds

    def _per_second(self, runs: int) -> float:
        return runs * self._examples_per_run / self._seconds if self._seconds else 0.0
