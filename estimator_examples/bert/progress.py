"""Lines and a progress bar that show the state of the training."""

import time

from estimator_examples.bert import console
from estimator_examples.bert.history import Step
from estimator_examples.bert.report import scale_text

_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"


class Progress:
    """Prints a line at an interval of applied steps, and whenever the loss scale changes."""

    def __init__(self, first_step: int, last_step: int, batch_size: int, every: int, loss_scale: float) -> None:
        """Start a progress bar, which is shown on a terminal only.

        Args:
            first_step: The global step at which training starts.
            last_step: The global step at which training ends.
            batch_size: The number of examples per step.
            every: The number of applied steps between two lines.
            loss_scale: The loss scale before the first step.
        """
        self._last_step = last_step
        self._batch_size = batch_size
        self._every = every
        self._loss_scale = loss_scale
        self._skipped = 0
        self._examples = 0
        self._since = time.monotonic()
        self._bar = console.bar(total=last_step, initial=first_step, bar_format=_BAR)

    def show(self, step: Step) -> None:
        """Update the bar for a step, and print a line if the scale changed or the interval has passed."""
        self._examples += self._batch_size
        self._skipped += not step.applied
        self._bar.set_postfix_str(f"loss scale {scale_text(step.loss_scale)}, skipped {self._skipped}", refresh=False)
        self._bar.update(int(step.applied))
        if step.loss_scale != self._loss_scale:
            self._show_scale(step)
        if step.applied and (step.global_step % self._every == 0 or step.global_step == self._last_step):
            self._show_losses(step)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()

    def _show_scale(self, step: Step) -> None:
        why = "gradients stayed finite" if step.applied else f"gradients overflowed, {self._skipped} skipped"
        before, after = scale_text(self._loss_scale), scale_text(step.loss_scale)
        console.say(f"attempt {step.attempt}: loss scale {before} -> {after} ({why})")
        self._loss_scale = step.loss_scale

    def _show_losses(self, step: Step) -> None:
        now = time.monotonic()
        rate = self._examples / max(now - self._since, 1e-9)
        # The bar estimates the time left. Where no bar is shown, the line tells the speed.
        pace = f", {rate:.0f} examples/s" if self._bar.disable else ""
        console.say(
            f"step {step.global_step}/{self._last_step}: MLM loss {step.mlm_loss:.3f}, NSP loss {step.nsp_loss:.3f}, "
            f"loss scale {scale_text(step.loss_scale)}, skipped {self._skipped}{pace}"
        )
        self._examples, self._since = 0, now
