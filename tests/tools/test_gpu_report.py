"""The report of a GPU, on a CPU: which parts run, what becomes of those that fail, and what the page says."""

import importlib
import signal
import time
from pathlib import Path

import pytest

from benchmarks.harness import keras_contenders
from tools.gpu_report import __main__ as command
from tools.gpu_report import machine, running
from tools.gpu_report.machine import Machine
from tools.gpu_report.parts import Part, parts

pytestmark = pytest.mark.skipif(keras_contenders.KERAS != "Keras 3", reason="its benchmarks compare with Keras 3")

_CPU = Machine([], {"GPU": "no GPU is visible to TensorFlow"})
_HELLO = Part("hello", "a greeting", ["-c", "print('hello')"])
_FAULT = Part("fault", "an error", ["-c", "print(*range(1000), sep='\\n'); raise SystemExit(3)"])
_KILLED = Part("killed", "a crash", ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"])
_ON_TWO = Part("on_two", "two GPUs", ["-c", "print('on two')"], gpus=2)


def _rows(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the rows of the table of parts, by their names, without the times."""
    text = (folder / "report.md").read_text()
    table = text.partition("## The parts\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {name: (result, status) for name, result, status, _ in rows}


def test_parts_run_on_a_cpu_and_their_outputs_are_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(tmp_path), "--tiny", "--parts", "versions", "digits_on_two"]) == 0
    printed = capsys.readouterr().out
    assert "[1/2] versions: python -m tfmp" in printed
    assert f"{tmp_path / 'report.md'} is written. No part failed." in printed
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# tfmp on a machine on which TensorFlow sees no GPU\n")
    assert "no figure on this page is a measurement" in page
    for said in ("* GPU: no GPU is visible to TensorFlow", "These versions are supported."):
        assert said in page
    assert _rows(tmp_path) == {
        "versions": ("passed", "0"),
        "digits_on_two": ("skipped: it needs 2 GPUs, and TensorFlow sees 0", ""),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "versions.log"}


def test_a_part_that_fails_does_not_keep_the_others_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = Part("part", "nothing", ["-c", "pass"], writes=("--json", "part.json"))
    (tmp_path / "part.json").write_text("what an earlier run has written")
    chosen = [_FAULT, _KILLED, _ON_TWO, writes, _HELLO]
    assert command.report(chosen, _CPU, tmp_path, limit=60) == 128 + signal.SIGSEGV
    assert _rows(tmp_path) == {
        "fault": ("failed", "3"),
        "killed": ("failed", "139"),
        "on_two": ("skipped: it needs 2 GPUs, and TensorFlow sees 0", ""),
        "part": ("passed", "0"),
        "hello": ("passed", "0"),
    }
    page = (tmp_path / "report.md").read_text()
    assert "## on_two\n\nTwo GPUs: skipped: it needs" in page
    assert "~~~~\nhello\n~~~~" in page
    assert "~~~~\n[850 lines before these are in fault.log]\n850\n" in page
    assert "These parts failed: fault, killed." in capsys.readouterr().out
    assert not (tmp_path / "part.json").exists()
    two = Machine(["NVIDIA A100, compute capability 8.0"] * 2, {})
    assert command.report([_ON_TWO], two, tmp_path, limit=60) == 0
    assert _rows(tmp_path) == {"on_two": ("passed", "0")}
    assert (tmp_path / "report.md").read_text().startswith("# tfmp on NVIDIA A100 and NVIDIA A100\n")


#: Waits for a process that writes to a file again and again.
_WAITS = """\
import subprocess, sys
print("waits", flush=True)
code = "import time\\nwhile True: open(sys.argv[1], 'a').write('x'); time.sleep(0.05)"
subprocess.run([sys.executable, "-c", "import sys\\n" + code, sys.argv[1]])
"""


def test_a_part_that_takes_too_long_is_stopped_with_the_processes_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "_SECONDS_BETWEEN_LINES", 0.5)
    written = tmp_path / "written"
    waits = Part("waits", "a wait", ["-c", _WAITS, str(written)])
    assert command.report([waits, _HELLO], _CPU, tmp_path, limit=2) == running.TOO_LONG
    assert _rows(tmp_path) == {"waits": ("stopped after 2 s", "124"), "hello": ("passed", "0")}
    assert " s: waits\n" in capsys.readouterr().out
    size = written.stat().st_size
    time.sleep(0.5)
    assert written.stat().st_size == size > 0


def test_an_interrupt_leaves_a_report_of_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(part: Part, folder: Path, limit: float) -> running.Outcome:
        if part is _KILLED:
            raise KeyboardInterrupt
        return run_part(part, folder, limit)

    run_part = running.run
    monkeypatch.setattr(running, "run", run)
    assert command.report([_HELLO, _KILLED, _FAULT], _CPU, tmp_path, limit=60) == 130
    assert _rows(tmp_path) == {
        "hello": ("passed", "0"),
        "killed": ("interrupted", ""),
        "fault": ("not run, because of the interrupt", ""),
    }


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'NVIDIA A100, 535.104.05, 40960 MiB'", "NVIDIA A100, 535.104.05, 40960 MiB (name,driver_version,"),
        ("exit 9", "not known: Command "),
        (None, "not known: there is no nvidia-smi"),
    ],
)
def test_the_machine_has_what_the_driver_says_and_no_secrets(
    script: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    # A TensorFlow that cannot be imported is a fact, too.
    (tmp_path / "tensorflow.py").write_text("raise OSError('libcudart.so.12 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    monkeypatch.setenv("TF_VAR_password", "a secret of Terraform")
    monkeypatch.setenv("NVIDIA_API_KEY", "another secret")
    found = machine.look()
    assert (found.gpus, found.rows["TensorFlow"]) == ([], "raises OSError: libcudart.so.12 is missing")
    assert found.rows["driver"].startswith(said)
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in found.rows["environment"]
    assert "secret" not in str(found)


def test_lines_are_those_that_a_terminal_shows(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_text(
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        "I0000 00:00:1795710760.018164   32380 port.cc:153] oneDNN custom operations are on.\n"
        "2025-01-01 12:00:00.1: I tensorflow/core/util/port.cc:113] oneDNN custom operations are on.\n"
        "\x1b[31mred\x1b[0m\n"
        "10%\r50%\r100%\n"
        "E0000 00:00:1795710761.416165   32380 cuda_platform.cc:52] failed call to cuInit\n\n"
    )
    red, bar, error = running.lines(log)
    assert (red, bar, error[:5]) == ("red", "100%", "E0000")


@pytest.mark.parametrize("tiny", [False, True])
def test_the_options_of_each_part_exist(tiny: bool, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert [part.name for part in parts(0, tiny=tiny)] == [part.name for part in parts(2, tiny=tiny)]
    for gpus, device in ((0, "cpu"), (1, "gpu")):
        commands = {part.name: part.command for part in parts(gpus, tiny=tiny)}
        assert f"--device {device}" in commands["digits"]
    checked = []
    for part in parts(1, tiny=tiny):
        _, module, *options = part.arguments_in(Path("folder"))
        if module in {"tfmp", "pytest"}:
            continue
        main = "benchmarks.memory.__main__" if module == "benchmarks.memory" else module
        # What stands before --help is parsed, and an error ends the program with 2.
        with pytest.raises(SystemExit, match=r"^0$"):
            importlib.import_module(main).main([*options, "--help"])
        assert "usage:" in capsys.readouterr().out
        checked.append(part.name)
    assert len(checked) == 8


def test_a_part_has_what_the_user_set_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["TF_FORCE_GPU_ALLOW_GROWTH", "TF_ENABLE_ONEDNN_OPTS", "TF_CPP_MIN_LOG_LEVEL"]
    code = f"import os; print([os.environ[name] for name in {names}])"
    for name in names[:2]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "7")
    part = Part("part", "settings", ["-c", code], environment={"TF_ENABLE_ONEDNN_OPTS": "0"})
    assert running.run(part, tmp_path, limit=60).status == 0
    assert running.lines(tmp_path / "part.log") == ["['true', '0', '7']"]
