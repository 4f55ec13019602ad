"""Tests of the BERT example on two workers, with the commands of its README."""

import json
import math
import pathlib
import shlex
import sys

import pytest
import replica_processes

pytest.importorskip("tokenizers")

import bert_variables

pytestmark = pytest.mark.estimator

REPOSITORY = pathlib.Path(__file__).parents[2]
SMALL = (
    "--vocab_size=300 --hidden_size=32 --num_layers=1 --num_heads=2 --seq_length=32 --batch_size=8 "
    "--dupe_factor=1 --num_train_steps=8 --num_warmup_steps=2"
)


def _command(kind: str, directory: pathlib.Path) -> list[str]:
    """Return the README's command, with a small model and text, and changed so that it prints the variables."""
    text = directory / "numbers.txt"
    text.write_text("\n".join(f"The square of {i} is {i * i}." for i in range(300)))
    readme = (REPOSITORY / "estimator_examples" / "README.md").read_text(encoding="utf-8")
    [line] = [line for line in readme.splitlines() if f"run_pretraining --distribute {kind}" in line]
    before, options = line.split("python -m estimator_examples.bert.run_pretraining")
    program = [
        sys.executable,
        bert_variables.__file__,
        *shlex.split(options),
        f"--model_dir={directory / 'model'}",
        f"--input={text}",
        *SMALL.split(),
    ]
    return replica_processes.under_horovod(program) if before.split() == ["horovodrun", "-np", "2"] else program


def _check(finished: replica_processes.Finished, model_dir: pathlib.Path) -> None:
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


@pytest.mark.horovod
def test_two_workers_of_horovod_end_with_equal_variables_of_gradients_sent_in_float16(tmp_path: pathlib.Path) -> None:
    # In their own type they are sent by the other test's workers, and by those of `tests/optimizers`.
    command = [*_command("horovod", tmp_path), "--aggregation_dtype=float16"]
    _check(replica_processes.run(command, tmp_path, 120), tmp_path / "model")


def test_two_workers_of_tf_config_end_with_equal_variables_and_resume(tmp_path: pathlib.Path) -> None:
    command = _command("tf_config", tmp_path)
    first = replica_processes.run([*command, "--num_train_steps=4"], tmp_path, 120, replica_processes.two_workers())
    assert first.codes == [0, 0], str(first)
    _check(replica_processes.run(command, tmp_path, 120, replica_processes.two_workers()), tmp_path / "model")
