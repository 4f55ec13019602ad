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
        global_step: The number of applied steps, including this one if it was applied.
        loss_scale: The loss scale after the step.
        applied: Whether the step was applied, because its gradients were finite.
        consecutive_skips: The number of skipped steps in a row up to this one; 0 if this step was applied.
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
        """Return the step as a CSV row: its fields as strings, by name."""
        return {name: str(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_row(cls, row: Row) -> Step:
        """Return the step that a CSV row describes."""
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
    """The file is damaged, or lacks steps that the checkpoint includes."""


class History:
    """The record of all steps so far, in memory for the report and on disk for the next run."""

    def __init__(self, path: pathlib.Path, resumed_step: int) -> None:
        """Read the file, and drop the steps after the checkpoint that training resumes from.

        Args:
            path: The CSV file, which need not exist.
            resumed_step: The global step of the checkpoint; 0 if there is no checkpoint.

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
        # A new file replaces the old one, so that the file is complete even if the process is killed in between.
        new = path.with_suffix(".new")
        _write(new, self.steps, mode="w")
        new.replace(path)

    def append(self, step: Step) -> None:
        """Add a step to the record, in memory and on disk; so the record of an interrupted run is kept."""
        self.steps.append(step)
        _write(self._path, [step], mode="a")


def until_checkpoint(steps: Sequence[Step], resumed_step: int) -> list[Step]:
    """Return the steps that a checkpoint includes: all steps up to the one that reached its global step.

    Examples:
        >>> until_checkpoint([], 5)
        []
    """
    kept = [step for step in steps if step.global_step < resumed_step]
    reached = [step for step in steps if step.global_step == resumed_step and step.applied]
    return kept + reached


def read_steps(path: pathlib.Path) -> list[Step]:
    """Return the steps in a file; an empty list if there is no file.

    Raises:
        HistoryError: The file is damaged.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        # A run that was killed may have written only a part of the last row.
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
