"""Scripts in the shape of the NPU bridge's samples: the command alone makes each one train in one process."""

from pathlib import Path

import pytest
import python_process

from tests.migrate.rules.rule_cases import RuleCase, cases

_SAMPLES = cases("npu_samples")


@pytest.fixture(autouse=True)
def _no_rank_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK_SIZE", raising=False)


def _ported(case: RuleCase, directory: Path) -> str:
    """Let the command rewrite the script of a case, and return its path."""
    script = directory / f"{case.path.stem}.py"
    script.write_text(case.before)
    done = python_process.run("-m", "tfmp.migrate", "--write", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left to you: nothing" in done.stdout + done.stderr
    return str(script)


@pytest.mark.parametrize("case", _SAMPLES.values(), ids=_SAMPLES)
def test_a_script_that_the_command_has_rewritten_trains(case: RuleCase, tmp_path: Path) -> None:
    done = python_process.run(_ported(case, tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    words = done.stdout.split("loss from ")[-1].split()
    assert float(words[2]) < 0.2 * float(words[0]), done.stdout


def test_a_script_that_expects_several_processes_says_what_to_write(tmp_path: Path) -> None:
    done = python_process.run(_ported(_SAMPLES["npu_samples/number_of_devices"], tmp_path), RANK_SIZE="8")
    assert done.returncode == 1
    assert "RuntimeError: RANK_SIZE is '8'" in done.stderr
    assert "hvd.size()" in done.stderr
