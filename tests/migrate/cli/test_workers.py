"""Many files are rewritten in several processes, and an interrupt ends them in order."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.migrate.cli.scripts import ENVIRONMENT, REWRITTEN, SCRIPT, write
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.cli import command, workers
from tfmp.migrate.edits import rewriting
from tfmp.migrate.edits.results import Edit, Result

_INTERRUPTED = "interrupted: what was done so far is in the report; run it again for the rest.\n"


def _edits_import(script: Script) -> Iterator[Result]:
    del script
    yield Edit("R1", 0, 6, "import  ")


def test_many_files_are_shared_among_processes_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    write(
        **{f"f{number:02}": "import hccl\nprint 'x'\n" if number == 7 else "x = 1\n" for number in range(48)}, g=SCRIPT
    )
    assert command.main(["--write", "."]) == 1
    assert Path("g.py").read_text() == REWRITTEN
    shown = capsys.readouterr()
    assert "\n./f07.py:2: not done: Python 3" in shown.out
    assert "\n49 files: 1 rewritten, 47 unchanged, 1 not done\n" in shown.out
    # Progress is for terminals.
    assert shown.err == ""


def test_an_interrupt_ends_it_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(script: Script) -> Iterator[Result]:
        raise KeyboardInterrupt

    monkeypatch.setattr(rewriting, "RULES", (interrupted,))
    write(a=SCRIPT)
    assert command.main(["--write", "a.py"]) == 130
    assert capsys.readouterr().err == _INTERRUPTED


def _interrupting(script: Script) -> Iterator[Result]:
    # Once: a file that was written is looked at again.
    if script.text == SCRIPT:
        os.kill(os.getpid(), signal.SIGINT)
        # The main thread handles the interrupt while this one waits, and so before the next file is begun.
        time.sleep(1)
    yield from _edits_import(script)


@pytest.fixture
def _takes_interrupts() -> Iterator[None]:
    # A shell without job control starts what is in its background with interrupts ignored, and so these tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_takes_interrupts")
def test_an_interrupt_lets_files_be_finished_and_tells_of_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "RULES", (_interrupting,))
    write(a=SCRIPT, b=SCRIPT)
    assert command.main(["--write", "a.py", "b.py"]) == 130
    shown = capsys.readouterr()
    assert "\n1 file: 1 rewritten, 0 unchanged, 0 not done\n" in shown.out
    assert shown.err == _INTERRUPTED
    assert Path("a.py").read_text() != SCRIPT
    assert Path("b.py").read_text() == SCRIPT


@pytest.mark.usefixtures("_takes_interrupts")
def test_what_was_started_to_ignore_interrupts_does_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(rewriting, "RULES", (_interrupting,))
    write(a=SCRIPT, b=SCRIPT)
    assert command.main(["--write", "a.py", "b.py"]) == 0
    assert "\n2 files: 2 rewritten, 0 unchanged, 0 not done\n" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


# Its files take some seconds: it is interrupted, or loses a process, in the midst of them.
def _busy_process() -> "subprocess.Popen[str]":
    Path("many").mkdir()
    for number in range(60):
        Path(f"many/f{number:03}.py").write_text(SCRIPT * 6)
    script = (
        "import signal, sys; from tfmp.migrate.cli import command, workers; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "workers._cores = lambda: 2; sys.exit(command.main(sys.argv[1:]))"
    )
    command_line = [sys.executable, "-c", script, "--write", "many"]
    process = subprocess.Popen(
        command_line,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not _rewritten_ones() and time.monotonic() < deadline:
        time.sleep(0.01)
    return process


def _rewritten_ones() -> set[str]:
    return {f"many/{path.name}" for path in Path("many").glob("*.py") if "import tfmp" in path.read_text()}


@pytest.mark.skipif(os.name != "posix", reason="needs groups of processes")
def test_an_interrupt_ends_all_processes_and_tells_what_was_written() -> None:
    process = _busy_process()
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors == _INTERRUPTED
    written = {line.partition(":")[0] for line in output.splitlines() if ": rewritten by R2" in line}
    assert 0 < len(written) < 60
    assert written == _rewritten_ones()


def _workers(process: "subprocess.Popen[str]") -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 2
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a process's children in /proc")
def test_a_process_that_is_ended_from_outside_costs_no_file() -> None:
    process = _busy_process()
    os.kill(_workers(process)[0], signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "not done:" not in output
    assert len(_rewritten_ones()) == 60


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a process's children in /proc")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_command(ending: signal.Signals) -> None:
    process = _busy_process()
    workers = _workers(process)
    process.send_signal(ending)
    time.sleep(0.05)
    process.send_signal(ending)  # the second interrupt waits for no file
    process.communicate(timeout=10)
    assert process.returncode == (130 if ending == signal.SIGINT else -ending)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not list(Path("many").glob(".*"))


@pytest.mark.skipif(os.name != "posix", reason="sends signals of POSIX")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_command_while_it_replaces_a_file_leaves_no_other_file(ending: signal.Signals) -> None:
    write(a=SCRIPT, b=SCRIPT)
    script = (
        "import os, sys, time; from tfmp.migrate.cli import command; chmod = os.chmod; "
        "os.chmod = lambda *given: (print('replacing', flush=True), time.sleep(1), chmod(*given)); "
        "sys.exit(command.main(['--write', 'a.py', 'b.py']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "replacing\n"
    process.send_signal(ending)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, _INTERRUPTED)
    assert output.startswith("a.py: rewritten by R2\n")
    assert {path.name: path.read_text() for path in Path().iterdir()} == {"a.py": REWRITTEN, "b.py": SCRIPT}
