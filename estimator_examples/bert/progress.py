"""Lines and a bar that show how the training goes."""

import time

from estimator_examples.bert import console
from estimator_examples.bert.history import Step
from estimator_examples.bert.report import scale_text

_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}"


class Progress:
    """Prints a line every so many applied steps and whenever the loss scale moves."""

    def __init__(self, first_step: int, last_step: int, batch_size: int, every: int, loss_scale: float) -> None:
        """Start a bar, which shows on a terminal only.

        Args:
            first_step: The global step that training starts from.
            last_step: The global step that it ends at.
            batch_size: Examples of a step.
            every: Applied steps from line to line.
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
        """Take note of a step, and say so where there is something to say."""
        self._examples += self._batch_size
        self._skipped += not step.applied
        self._bar.set_postfix_str(f"loss scale {scale_text(step.loss_scale)}, skipped {self._skipped}", refresh=False)
        self._bar.update(int(step.applied))
        if step.loss_scale != self._loss_scale:
            self._show_scale(step)
        if step.applied and (step.global_step % self._every == 0 or step.global_step == self._last_step):
            self._show_losses(step)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()

    def _show_scale(self, step: Step) -> None:
        why = "gradients stayed finite" if step.applied else f"gradients overflowed, {self._skipped} skipped"
        before, after = scale_text(self._loss_scale), scale_text(step.loss_scale)
        console.say(f"attempt {step.attempt}: loss scale {before} -> {after} ({why})")
        self._loss_scale = step.loss_scale

    def _show_losses(self, step: Step) -> None:
        now = time.monotonic()
        rate = self._examples / max(now - self._since, 1e-9)
        # The bar tells how fast it goes; a file shows none.
        pace = f", {rate:.0f} examples/s" if self._bar.disable else ""
        console.say(
            f"step {step.global_step}/{self._last_step}: MLM loss {step.mlm_loss:.3f}, NSP loss {step.nsp_loss:.3f}, "
            f"loss scale {scale_text(step.loss_scale)}, skipped {self._skipped}{pace}"
        )
        self._examples, self._since = 0, now
