"""Tests of the record of the steps, and of the report that is made from it."""

import json
import pathlib

import pytest

pytest.importorskip("matplotlib")

from estimator_examples.bert import report
from estimator_examples.bert.history import History, HistoryError, Step, until_checkpoint


def _steps(applied: str) -> list[Step]:
    """Make a step for each letter: an applied one for `a`, a skipped one for `s`."""
    steps = []
    for attempt, letter in enumerate(applied, start=1):
        steps.append(
            Step(
                attempt=attempt,
                global_step=applied[:attempt].count("a"),
                mlm_loss=8.0 - attempt / 10,
                nsp_loss=0.7,
                learning_rate=1e-3,
                loss_scale=2.0 ** (32 - attempt),
                applied=letter == "a",
                consecutive_skips=0 if letter == "a" else 1,
            )
        )
    return steps


def _summary(steps: list[Step]) -> report.Summary:
    return report.summarize(
        steps,
        precision="O2",
        loss_scaling="dynamic loss scale",
        evaluation={"MLM accuracy": 0.25},
        checkpoint="model/model.ckpt-3",
        picture="model/picture.png",
    )


def test_history_is_read_back_as_it_was_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "history.csv"
    history = History(path, resumed_step=0)
    for step in _steps("ssasa"):
        history.append(step)
    assert History(path, resumed_step=2).steps == _steps("ssasa")


def test_a_run_from_the_start_forgets_the_history_that_it_finds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "history.csv"
    History(path, resumed_step=0).append(_steps("a")[0])
    assert History(path, resumed_step=0).steps == []
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.parametrize("end", ["9999,77", "6,4,7.4,0.7,0.001,67108864.0,True,0"])
def test_a_row_that_was_not_written_to_its_end_is_dropped(end: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "history.csv"
    history = History(path, resumed_step=0)
    for step in _steps("ssasa"):
        history.append(step)
    with path.open("a", encoding="utf-8") as file:
        file.write(end)
    assert History(path, resumed_step=2).steps == _steps("ssasa")
    assert end not in path.read_text(encoding="utf-8")


def test_a_history_that_does_not_reach_the_checkpoint_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "history.csv"
    with pytest.raises(HistoryError, match=r"history\.csv holds 0 of the 8 steps of the checkpoint"):
        History(path, resumed_step=8)
    assert not path.exists()
    History(path, resumed_step=0).append(_steps("a")[0])
    with pytest.raises(HistoryError, match=r"holds 1 of the 8 steps .*: put the whole file back, or choose another"):
        History(path, resumed_step=8)


def test_a_damaged_history_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "history.csv"
    History(path, resumed_step=0)
    with path.open("a", encoding="utf-8") as file:
        file.write("9999,77\n")
    with pytest.raises(HistoryError, match=r"history\.csv is damaged"):
        History(path, resumed_step=1)


@pytest.mark.parametrize(
    ("applied", "resumed_step", "kept"),
    [("ssaasa", 2, 4), ("ssaasa", 3, 6), ("ssaasa", 1, 3), ("ss", 0, 0), ("ssa", 0, 0), ("", 0, 0)],
)
def test_steps_after_the_checkpoint_are_forgotten(applied: str, resumed_step: int, kept: int) -> None:
    steps = _steps(applied)
    assert until_checkpoint(steps, resumed_step) == steps[:kept]


def test_the_summary_counts_steps_and_averages_both_ends() -> None:
    summary = _summary(_steps("ss" + "a" * 6))
    assert (summary.steps_attempted, summary.steps_applied, summary.steps_skipped) == (8, 6, 2)
    assert summary.final_loss_scale == 2.0**24
    assert summary.window == 3
    assert summary.mlm_loss_start == pytest.approx(7.6)
    assert summary.mlm_loss_end == pytest.approx(7.3)


def test_the_window_of_a_long_run_has_its_full_length() -> None:
    assert _summary(_steps("a" * 100)).window == report.WINDOW


def test_one_applied_step_is_enough_for_a_summary() -> None:
    assert _summary(_steps("a")).mlm_loss_start == _summary(_steps("a")).mlm_loss_end == 7.9


def test_a_run_without_applied_steps_has_no_summary() -> None:
    with pytest.raises(ValueError, match="none of the 2 steps was applied"):
        _summary(_steps("ss"))


def test_the_text_shows_every_number() -> None:
    text = report.summary_text(_summary(_steps("ss" + "a" * 6)))
    for line in (
        "precision              O2, dynamic loss scale",
        "steps attempted        8",
        "steps applied          6",
        "steps skipped          2",
        "final loss scale       16777216",
        "MLM loss               7.600 -> 7.300",
        "held-out MLM accuracy  0.250",
        "checkpoint             model/model.ckpt-3",
        "picture                model/picture.png",
    ):
        assert line in text


def test_the_json_holds_the_same_numbers(tmp_path: pathlib.Path) -> None:
    summary = _summary(_steps("saa"))
    report.write_summary(summary, tmp_path / "summary.json")
    read = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert report.Summary(**read) == summary


@pytest.mark.parametrize("applied", ["ssaasa", "a", "aaaa"])
def test_the_picture_says_what_it_shows(applied: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "picture.png"
    figure = report.draw(_steps(applied), "BERT, in O2 with dynamic loss scale")
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    counts = f"{applied.count('a')} steps applied, {applied.count('s')} skipped"
    assert figure.get_suptitle() == f"BERT, in O2 with dynamic loss scale\n{counts}"


def test_the_picture_writes_the_loss_scale_as_the_log_does() -> None:
    _, scales = report.draw(_steps("ssaasa"), "BERT").axes
    assert scales.yaxis.get_major_formatter()(2.0**28) == "268435456"


def test_smoothing_does_not_pull_the_start_to_zero() -> None:
    assert report.smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0] * 3)
    assert report.smooth([]) == []
