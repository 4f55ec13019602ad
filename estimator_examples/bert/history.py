"""The record of every attempted step of a run, kept in a CSV file that resumed runs continue."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Sequence

Row = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Step:
    """One attempted step.

    Attributes:
        attempt: The number of the attempt, from 1, over all runs in the directory.
        global_step: Applied steps, this one included if it was applied.
        loss_scale: The loss scale after the step.
        applied: Whether the gradients were finite.
        consecutive_skips: Skipped steps up to this one; 0 if it was applied.
    """

    attempt: int
    global_step: int
    mlm_loss: float
    nsp_loss: float
    learning_rate: float
    loss_scale: float
    applied: bool
    consecutive_skips: int

    def to_row(self) -> Row:
        """Return the step as the texts of a CSV row."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_row(cls, row: Row) -> Step:
        """Return the step of a CSV row."""
        return cls(
            attempt=int(row["attempt"]),
            global_step=int(row["global_step"]),
            mlm_loss=float(row["mlm_loss"]),
            nsp_loss=float(row["nsp_loss"]),
            learning_rate=float(row["learning_rate"]),
            loss_scale=float(row["loss_scale"]),
            applied=row["applied"] == "True",
            consecutive_skips=int(row["consecutive_skips"]),
        )


class HistoryError(RuntimeError):
    """The file does not tell of the steps that the checkpoint has seen."""


class History:
    """All steps so far: in memory for the report, on disk for the next run."""

    def __init__(self, path: pathlib.Path, resumed_step: int) -> None:
        """Read the file, and forget what happened after the checkpoint that training resumes from.

        Args:
            path: The CSV file; it need not exist.
            resumed_step: The global step of the checkpoint, 0 if there is none.

        Raises:
            HistoryError: The file is damaged, or lacks steps up to the checkpoint.
        """
        self._path = path
        self.steps = until_checkpoint(read_steps(path), resumed_step)
        applied = sum(step.applied for step in self.steps)
        if applied != resumed_step:
            raise HistoryError(
                f"{path} holds {applied} of the {resumed_step} steps of the checkpoint beside it: put the whole file "
                "back, or choose another --model_dir."
            )
        # Killed at any moment, this leaves a whole file.
        new = path.with_suffix(".new")
        _write(new, self.steps, mode="w")
        new.replace(path)

    def append(self, step: Step) -> None:
        """Add a step, on disk too, so that an interrupted run leaves its record behind."""
        self.steps.append(step)
        _write(self._path, [step], mode="a")


def until_checkpoint(steps: Sequence[Step], resumed_step: int) -> list[Step]:
    """Keep the steps that a checkpoint has seen: those up to the one that reached its global step.

    Example:
        >>> until_checkpoint([], 5)
        []
    """
    kept = [step for step in steps if step.global_step < resumed_step]
    reached = [step for step in steps if step.global_step == resumed_step and step.applied]
    return kept + reached


def read_steps(path: pathlib.Path) -> list[Step]:
    """Return the steps in a file; none if there is no file.

    Raises:
        HistoryError: The file is damaged.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        # A run that was killed may leave the start of a row behind.
        whole_rows = text[: text.rfind("\n") + 1]
        return [Step.from_row(row) for row in csv.DictReader(io.StringIO(whole_rows))]
    except (KeyError, TypeError, ValueError) as error:
        raise HistoryError(f"{path} is damaged ({error}): repair it, or choose another --model_dir.") from error


def _write(path: pathlib.Path, steps: Sequence[Step], mode: str) -> None:
    with path.open(mode, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Step)])
        if mode == "w":
            writer.writeheader()
        writer.writerows(step.to_row() for step in steps)
