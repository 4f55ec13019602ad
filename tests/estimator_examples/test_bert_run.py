"""Tests of whole runs of the BERT example."""

import contextlib
import csv
import io
import json
import logging
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import example_processes
import pytest
import tensorflow as tf
import terminals

pytest.importorskip("tokenizers")

from estimator_examples.bert import preparation, run_pretraining

SMALL = (
    "--vocab_size=300 --hidden_size=32 --num_layers=1 --num_heads=2 --seq_length=32 --batch_size=8 "
    "--dupe_factor=2 --log_every=5 --num_warmup_steps=2 --learning_rate=3e-3"
)


class _Run(NamedTuple):
    """The result of a run in this process, in which warnings are errors."""

    status: int
    printed: str
    errors: str


@pytest.fixture(scope="module", autouse=True)
def _log_levels_as_before() -> Iterator[None]:
    levels = {logger: logger.level for logger in (logging.getLogger("tfmp"), tf.get_logger())}
    yield
    for logger, level in levels.items():
        logger.setLevel(level)


def _arguments(model_dir: pathlib.Path, arguments: str) -> list[str]:
    return ["--model_dir", str(model_dir), *SMALL.split(), *arguments.split()]


def _run(model_dir: pathlib.Path, arguments: str) -> _Run:
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = run_pretraining.main(_arguments(model_dir, arguments))
    return _Run(status, printed.getvalue(), errors.getvalue())


def _summary(model_dir: pathlib.Path) -> dict[str, Any]:
    return json.loads((model_dir / "summary.json").read_text(encoding="utf-8"))


def _history(model_dir: pathlib.Path) -> list[dict[str, str]]:
    with (model_dir / "history.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    lines = [" ".join(words[int(digit)] for digit in str(7919 * i)) + " is a number." for i in range(300)]
    path.write_text("\n".join(line.capitalize() for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: pathlib.Path) -> tuple[pathlib.Path, str]:
    model_dir = tmp_path_factory.mktemp("dynamic")
    # The run is in a separate process, as a user runs it.
    done = example_processes.run("bert.run_pretraining", *_arguments(model_dir, f"--input {text} --num_train_steps=60"))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return model_dir, done.stdout


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory, text: pathlib.Path) -> pathlib.Path:
    """Return the directory of a run with a fixed loss scale, which none of the tests changes."""
    model_dir = tmp_path_factory.mktemp("fixed")
    done = _run(model_dir, f"--input {text} --num_train_steps=6 --loss_scale=128")
    assert done.status == 0, done.errors
    return model_dir


@pytest.mark.estimator
def test_the_first_steps_overflow_and_are_skipped(trained: tuple[pathlib.Path, str]) -> None:
    model_dir, output = trained
    history = _history(model_dir)
    skipped = [row for row in history if row["applied"] == "False"]
    assert all(row["applied"] == "False" for row in history[:8])
    assert "attempt 2: loss scale 4294967296 -> 2147483648 (gradients overflowed, 2 skipped)" in output
    summary = _summary(model_dir)
    assert summary["steps_applied"] == 60
    assert summary["steps_skipped"] == len(skipped) >= 8
    assert summary["steps_attempted"] == len(history)
    assert 1 < summary["final_loss_scale"] < 2**32


@pytest.mark.estimator
def test_a_file_gets_the_outline_and_no_bar(trained: tuple[pathlib.Path, str]) -> None:
    _, output = trained
    assert output.startswith("Training\n  model      BERT, 1 layer of width 32, ")
    assert (
        "loss scale 4294967296, global step 0, steps applied 0, skipped 1 (1 in a row), gradient norm nan\n" in output
    )
    assert "\r" not in output
    assert "%|" not in output


@pytest.mark.estimator
def test_the_loss_falls_and_is_evaluated(trained: tuple[pathlib.Path, str]) -> None:
    model_dir, output = trained
    summary = _summary(model_dir)
    assert summary["mlm_loss_end"] < summary["mlm_loss_start"] - 0.3
    assert summary["evaluation"].keys() == {"MLM loss", "MLM accuracy", "NSP loss", "NSP accuracy"}
    assert 0 < summary["evaluation"]["MLM loss"] < summary["mlm_loss_start"]
    assert 0 < summary["evaluation"]["MLM accuracy"] < 1
    assert "step 60/60: MLM loss" in output
    assert f"checkpoint             {model_dir}/model.ckpt-60" in output


@pytest.mark.estimator
def test_the_picture_lies_in_the_model_directory(trained: tuple[pathlib.Path, str]) -> None:
    model_dir, _ = trained
    picture = pathlib.Path(_summary(model_dir)["picture"])
    assert picture.parent == model_dir
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.estimator
def test_a_second_run_resumes_weights_scale_and_history(trained: tuple[pathlib.Path, str], text: pathlib.Path) -> None:
    model_dir, _ = trained
    before, earlier = _summary(model_dir), _history(model_dir)
    done = _run(model_dir, f"--input {text} --num_train_steps=70")
    assert done.status == 0, done.errors
    assert f"Continuing from step 60 in {model_dir}." in done.printed
    scale = before["final_loss_scale"]
    assert f"The loss scale continues at {scale:.0f}; --init_loss_scale is for new directories." in done.printed
    summary, history = _summary(model_dir), _history(model_dir)
    assert history[: len(earlier)] == earlier
    assert [int(row["attempt"]) for row in history] == list(range(1, len(history) + 1))
    assert summary["steps_applied"] == 70
    # If the scale had started from 2**32 again, many more steps would be skipped. So it came from the checkpoint.
    assert summary["steps_skipped"] <= before["steps_skipped"] + 2
    assert summary["mlm_loss_start"] == pytest.approx(before["mlm_loss_start"])
    changed = _run(model_dir, f"--input {text} --num_train_steps=70 --precision O0")
    assert changed.status == 2
    assert "was begun with --precision O2, got O0" in changed.errors


@pytest.mark.estimator
def test_a_low_fixed_scale_skips_nothing(fixed: pathlib.Path) -> None:
    summary = _summary(fixed)
    assert (summary["steps_attempted"], summary["steps_skipped"]) == (6, 0)
    assert summary["final_loss_scale"] == 128
    assert summary["loss_scaling"] == "fixed loss scale 128"


@pytest.mark.estimator
def test_recomputed_layers_train_to_the_same_losses(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    losses = []
    for name, option in (("plain", ""), ("recomputed", "--recompute")):
        arguments = f"--input {text} --num_train_steps=3 --precision O0 --dropout 0 {option}"
        assert _run(tmp_path / name, arguments).status == 0
        losses.append([float(step["mlm_loss"]) for step in _history(tmp_path / name)])
    plain, recomputed = losses
    assert len(plain) == 3
    assert recomputed == pytest.approx(plain, rel=1e-5)


@pytest.fixture(scope="module")
def resumed_in_a_terminal(
    tmp_path_factory: pytest.TempPathFactory, text: pathlib.Path
) -> tuple[terminals.Terminal, str]:
    """Resume a run that only skipped, in a terminal; return the terminal, and the text above its bar."""
    directory = tmp_path_factory.mktemp("terminal")
    start = f"--input {text} --num_train_steps=3"
    ended = _run(directory / "model", f"{start} --max_consecutive_skips=3 --init_loss_scale=2**30")
    assert ended.status == 1
    # The run prints short, relative paths, as it does for a user.
    with (
        pytest.MonkeyPatch.context() as patch,
        # `test_bert_console.py` has a wider one too.
        terminals.terminal(80) as terminal,
        contextlib.redirect_stdout(terminal.stdout),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        patch.chdir(directory)
        status = run_pretraining.main(_arguments(pathlib.Path("model"), f"{start} --init_loss_scale=2**10"))
    assert status == 0
    assert errors.getvalue() == ""
    shown, _, _ = "\n".join(terminal.rows()).partition("\nDone in ")
    return terminal, shown


@pytest.mark.estimator
def test_a_terminal_shows_lines_above_one_bar(resumed_in_a_terminal: tuple[terminals.Terminal, str]) -> None:
    terminal, shown = resumed_in_a_terminal
    assert terminal.broken == []
    *lines, bar = shown.splitlines()
    assert bar.startswith("100%|")
    # The last three are the starts of rows in which wrapped lines continue.
    starts = (
        "Training",
        "  ",
        "The loss scale",
        "loss scale",
        "overflow",
        "attempt",
        "step",
        "variable",
        "bert/",
        "and",
    )
    assert [line for line in lines if not line.startswith(starts) or "|" in line] == []


@pytest.mark.estimator
def test_the_first_scale_of_a_resumed_run_is_the_saved_one(
    resumed_in_a_terminal: tuple[terminals.Terminal, str],
) -> None:
    _, shown = resumed_in_a_terminal
    # A terminal of 80 columns wraps the first line.
    in_one_line = " ".join(shown.split())
    assert "The loss scale continues at 1073741824; --init_loss_scale is for new directories." in in_one_line
    assert "attempt 1:" not in in_one_line
    assert "attempt 2: loss scale 1073741824 -> 536870912 (gradients overflowed" in in_one_line


@pytest.mark.estimator
def test_a_resumed_run_that_would_skip_for_ever_at_another_fixed_scale_ends_with_advice(
    tmp_path: pathlib.Path, fixed: pathlib.Path, text: pathlib.Path
) -> None:
    model_dir = shutil.copytree(fixed, tmp_path / "copy")
    again = _run(model_dir, f"--input {text} --loss_scale=2**32 --max_consecutive_skips=5 --num_train_steps=12")
    assert again.status == 1
    assert f"Continuing from step 6 in {model_dir}." in again.printed
    assert "error: the gradients of 5 steps in a row were not finite" in again.errors
    # Another fixed scale is no change of the scale.
    assert "->" not in again.printed


@pytest.mark.estimator
def test_without_its_history_a_directory_is_refused(
    tmp_path: pathlib.Path, fixed: pathlib.Path, text: pathlib.Path
) -> None:
    model_dir = shutil.copytree(fixed, tmp_path / "copy")
    (model_dir / "history.csv").unlink()
    for steps in (6, 7):
        done = _run(model_dir, f"--input {text} --loss_scale=128 --num_train_steps={steps}")
        assert done.status == 1
        assert "history.csv holds 0 of the 6 steps of the checkpoint" in done.errors


@pytest.mark.estimator
@pytest.mark.parametrize("name", ["/dev/null/model", "/proc/model", "x" * 300])
def test_a_directory_that_cannot_be_made_is_named(
    name: str, tmp_path: pathlib.Path, text: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This run ends before any training, so it needs no separate process.
    assert run_pretraining.main([f"--model_dir={tmp_path / name}", *SMALL.split(), f"--input={text}"]) == 1
    error = capsys.readouterr().err
    assert "run_pretraining: error: [Errno" in error
    assert name in error


def test_an_interrupted_preparation_ends_without_a_traceback(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_pretraining, "check_packages", lambda: None)
    monkeypatch.setattr(preparation, "prepare", interrupt)
    assert run_pretraining.main(["--model_dir", str(tmp_path)]) == 130
    message = f"Interrupted. The same command continues from the last checkpoint in {tmp_path}, or begins anew"
    assert message in capsys.readouterr().out


@pytest.mark.estimator
def test_less_text_than_a_batch_is_refused(
    tmp_path: pathlib.Path, text: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--model_dir={tmp_path}", *SMALL.split(), f"--input={text}", "--batch_size=5000"]
    assert run_pretraining.main(arguments) == 2
    assert "examples, less than one batch of 5000" in capsys.readouterr().err


@pytest.mark.skipif(hasattr(tf, "estimator"), reason=f"TensorFlow {tf.__version__} has tf.estimator")
def test_without_estimator_the_tensorflow_to_install_is_named(tmp_path: pathlib.Path) -> None:
    done = _run(tmp_path, "")
    assert done.status == 2
    assert "needs tf.estimator" in done.errors
    assert "TensorFlow 2.15 is the last that does" in done.errors
