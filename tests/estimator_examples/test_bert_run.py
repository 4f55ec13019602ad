"""Whole runs of the BERT example, of one process and of two workers: what the README says of them."""

import contextlib
import csv
import io
import json
import logging
import math
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import python_process
import replica_processes
import tensorflow as tf

pytest.importorskip("tokenizers")

import bert_variables

from estimator_examples.bert import check_precision, run_pretraining

REPOSITORY = pathlib.Path(__file__).parents[2]
SMALL = (
    "--vocab_size=300 --hidden_size=32 --num_layers=1 --num_heads=2 --seq_length=32 --batch_size=8 "
    "--dupe_factor=2 --log_every=5 --num_warmup_steps=2 --learning_rate=3e-3"
)


class _Run(NamedTuple):
    """The result of a run in this process."""

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


def _run(model_dir: pathlib.Path, arguments: str, program: Any = run_pretraining) -> _Run:
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = program.main(_arguments(model_dir, arguments))
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
    arguments = _arguments(model_dir, f"--input {text} --num_train_steps=60")
    done = python_process.run("-m", "estimator_examples.bert.run_pretraining", *arguments)
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
def test_the_first_steps_overflow_and_are_skipped_and_the_loss_falls(trained: tuple[pathlib.Path, str]) -> None:
    model_dir, _ = trained
    steps, summary = _history(model_dir), _summary(model_dir)
    applied = [step for step in steps if step["applied"] == "True"]
    assert all(step["applied"] == "False" for step in steps[:8])
    assert (len(applied), len(steps)) == (summary["steps_applied"], summary["steps_attempted"])
    assert summary["steps_applied"] == 60
    assert summary["steps_skipped"] == len(steps) - 60
    assert 1 < summary["final_loss_scale"] == float(steps[-1]["loss_scale"]) < 2**32
    # Losses are means over the first and the last 20 applied steps.
    ends = [np.mean([float(step["mlm_loss"]) for step in part]) for part in (applied[:20], applied[-20:])]
    assert [summary["mlm_loss_start"], summary["mlm_loss_end"]] == pytest.approx(ends)
    assert ends[1] < ends[0] - 0.3
    assert summary["evaluation"].keys() == {"MLM loss", "MLM accuracy", "NSP loss", "NSP accuracy"}
    assert 0 < summary["evaluation"]["MLM loss"] < ends[0]
    assert 0 < summary["evaluation"]["MLM accuracy"] < 1
    picture = pathlib.Path(summary["picture"])
    assert picture.parent == model_dir
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.estimator
def test_a_file_gets_the_lines_of_the_readme_and_no_bar(trained: tuple[pathlib.Path, str]) -> None:
    model_dir, output = trained
    summary = _summary(model_dir)
    for line in (
        r"^Training\n  model      BERT, 1 layer of width 32, \d+ word pieces, \d+ weights\n",
        "  precision  O2, dynamic loss scale\n  steps      60 of 8 examples\n",
        "The loss scale starts at 4294967296. A step whose gradients overflow is skipped.",
        r"\nloss scale 4294967296, global step 0, steps applied 0, skipped 1 \(1 in a row\), gradient norm nan\n",
        r"\nattempt 2: loss scale 4294967296 -> 2147483648 \(gradients overflowed, 2 skipped\)\n",
        r"\nstep 60/60: MLM loss \d\.\d{3}, NSP loss .*, skipped \d+, \d+ examples/s\n",
        rf"\n  steps skipped          {summary['steps_skipped']}\n",
        rf"\n  final loss scale       {summary['final_loss_scale']:.0f}\n",
        rf"\n  MLM loss               {summary['mlm_loss_start']:.3f} -> {summary['mlm_loss_end']:.3f}\n",
        rf"\n  held-out MLM accuracy  {summary['evaluation']['MLM accuracy']:.3f}\n",
        rf"\n  checkpoint             {model_dir}/model.ckpt-60\n",
    ):
        assert re.search(line, output), line
    assert "\r" not in output
    assert "%|" not in output


@pytest.mark.estimator
def test_a_second_run_resumes_weights_scale_and_history(trained: tuple[pathlib.Path, str], text: pathlib.Path) -> None:
    model_dir, _ = trained
    before, earlier = _summary(model_dir), _history(model_dir)
    # A row that was not written to its end, and one after the checkpoint, are dropped.
    with (model_dir / "history.csv").open("a", encoding="utf-8") as file:
        file.write(",".join({**earlier[-1], "attempt": "9999", "global_step": "61"}.values()) + "\n9998,77")
    done = _run(model_dir, f"--input {text} --num_train_steps=70")
    assert done.status == 0, done.errors
    assert f"Continuing from step 60 in {model_dir}." in done.printed
    scale = before["final_loss_scale"]
    assert f"The loss scale continues at {scale:.0f}; --init_loss_scale is for new directories." in done.printed
    summary, steps = _summary(model_dir), _history(model_dir)
    assert steps[: len(earlier)] == earlier
    assert [int(step["attempt"]) for step in steps] == list(range(1, len(steps) + 1))
    assert summary["steps_applied"] == 70
    # If the scale had started from 2**32 again, many more steps would be skipped. So it came from the checkpoint.
    assert summary["steps_skipped"] <= before["steps_skipped"] + 2
    assert summary["mlm_loss_start"] == pytest.approx(before["mlm_loss_start"])
    changed = _run(model_dir, f"--input {text} --num_train_steps=70 --precision O0")
    assert changed.status == 2
    assert "was begun with --precision O2, got O0" in changed.errors


@pytest.mark.estimator
def test_a_run_that_only_skipped_resumes_at_its_scale(tmp_path: pathlib.Path, text: pathlib.Path) -> None:
    start = f"--input {text} --num_train_steps=3"
    ended = _run(tmp_path, f"{start} --max_consecutive_skips=3 --init_loss_scale=2**30")
    assert ended.status == 1
    assert "error: the gradients of 3 steps in a row were not finite" in ended.errors
    done = _run(tmp_path, f"{start} --init_loss_scale=2**10")
    assert done.status == 0, done.errors
    assert "The loss scale continues at 1073741824; --init_loss_scale is for new directories." in done.printed
    assert "attempt 2: loss scale 1073741824 -> 536870912 (gradients overflowed" in done.printed


@pytest.mark.estimator
def test_a_resumed_run_that_would_skip_for_ever_at_another_fixed_scale_ends_with_advice(
    tmp_path: pathlib.Path, fixed: pathlib.Path, text: pathlib.Path
) -> None:
    summary = _summary(fixed)
    assert (summary["steps_attempted"], summary["steps_skipped"]) == (6, 0)
    assert (summary["final_loss_scale"], summary["loss_scaling"]) == (128, "fixed loss scale 128")
    model_dir = shutil.copytree(fixed, tmp_path / "copy")
    again = _run(model_dir, f"--input {text} --loss_scale=2**32 --max_consecutive_skips=5 --num_train_steps=12")
    assert again.status == 1
    assert f"Continuing from step 6 in {model_dir}." in again.printed
    assert "error: the gradients of 5 steps in a row were not finite" in again.errors
    assert "choose a lower one" in again.errors
    # Another fixed scale is no change of the scale.
    assert "->" not in again.printed


@pytest.mark.estimator
def test_check_precision_reports_the_probes_and_the_weights_of_the_checkpoint(
    tmp_path: pathlib.Path, fixed: pathlib.Path, text: pathlib.Path
) -> None:
    model_dir = shutil.copytree(fixed, tmp_path / "copy")
    # Of the second directory, which has no checkpoint, it takes the initial weights.
    runs = [_run(path, f"--input {text} --loss_scale=128", check_precision) for path in (model_dir, tmp_path / "new")]
    assert [done.status for done in runs] == [0, 0], runs
    rows, others = ({line.split()[0]: line for line in done.printed.splitlines() if line} for done in runs)
    probes = ["embeddings", "layer_0/attention/scores", "layer_0/attention", "layer_0/feed_forward", "encoder_output"]
    assert [name for name in rows if name in probes] == probes
    assert "bert/layer_0/feed_forward/intermediate/kernel" in rows
    # The loss of the same weights in float16 was compared.
    assert "in float16." in rows["Loss:"]
    assert (model_dir / "ranges.png").stat().st_size > 10_000
    assert rows["Loss:"] != others["Loss:"]


@pytest.mark.skipif(hasattr(tf, "estimator"), reason=f"TensorFlow {tf.__version__} has tf.estimator")
def test_without_estimator_the_tensorflow_to_install_is_named(tmp_path: pathlib.Path) -> None:
    done = _run(tmp_path, "")
    assert done.status == 2
    assert "needs tf.estimator" in done.errors
    assert "TensorFlow 2.15 is the last that does" in done.errors


def _command_of_readme(kind: str, directory: pathlib.Path, text: pathlib.Path) -> list[str]:
    """Return the README's command, with a small model and text, and changed so that it prints the variables."""
    readme = (REPOSITORY / "estimator_examples" / "README.md").read_text(encoding="utf-8")
    [line] = [line for line in readme.splitlines() if f"run_pretraining --distribute {kind}" in line]
    before, options = line.split("python -m estimator_examples.bert.run_pretraining")
    options += f" --input={text} {SMALL} --dupe_factor=1 --num_train_steps=8"
    program = [sys.executable, bert_variables.__file__, *shlex.split(options), f"--model_dir={directory / 'model'}"]
    return replica_processes.under_horovod(program) if before.split() == ["horovodrun", "-np", "2"] else program


def _check_workers(finished: replica_processes.Finished, model_dir: pathlib.Path) -> None:
    assert set(finished.codes) == {0}, str(finished)
    first, second = (state for states in finished.states("variables") for state in states)
    assert first == second
    assert {"loss_scale", "global_step"} <= {name.partition("/")[0] for name in first}
    summary = json.loads((model_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps_applied"] == 8
    # The loss scale starts at 2**32, so the first steps overflow.
    assert summary["steps_skipped"] > 10
    assert math.isfinite(summary["mlm_loss_end"] + summary["nsp_loss_end"] + summary["evaluation"]["MLM loss"])
    assert {path.name for path in (model_dir / "worker_1").iterdir()} == {"data", "settings.json"}
    # Only one worker has printed.
    assert "\n".join(finished.logs).count("training and") == 1


@pytest.mark.estimator
@pytest.mark.horovod
def test_two_workers_of_horovod_end_with_equal_variables_of_gradients_sent_in_float16(
    tmp_path: pathlib.Path, text: pathlib.Path
) -> None:
    # In their own type they are sent by the other test's workers, and by those of `tests/optimizers`.
    command = [*_command_of_readme("horovod", tmp_path, text), "--aggregation_dtype=float16"]
    _check_workers(replica_processes.run(command, tmp_path, 120), tmp_path / "model")


@pytest.mark.estimator
def test_two_workers_of_tf_config_end_with_equal_variables_and_resume(
    tmp_path: pathlib.Path, text: pathlib.Path
) -> None:
    command = _command_of_readme("tf_config", tmp_path, text)
    first = replica_processes.run([*command, "--num_train_steps=4"], tmp_path, 120, replica_processes.two_workers())
    assert first.codes == [0, 0], str(first)
    _check_workers(replica_processes.run(command, tmp_path, 120, replica_processes.two_workers()), tmp_path / "model")
