"""Processes that rewrite many files end in order, whatever ends them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.migrate.cli.scripts import REWRITTEN, SCRIPT, Run, ended, started, write
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits import rewriting
from tfmp.migrate.edits.results import Edit, Result

_INTERRUPTED = "interrupted: what was done so far is in the report; run it again for the rest.\n"

_on_posix = pytest.mark.skipif(os.name != "posix", reason="sends signals of POSIX, to groups of processes")
_with_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds a process's children in /proc")


def _interrupting(script: Script) -> Iterator[Result]:
    # Once: a file that was written is looked at again.
    if script.text == SCRIPT:
        os.kill(os.getpid(), signal.SIGINT)
        # The main thread handles the interrupt while this one waits, and so before the next file is begun.
        time.sleep(1)
    yield Edit("R1", 0, 6, "import  ")


@pytest.mark.parametrize("ignores", [False, True])
def test_an_interrupt_lets_a_file_be_finished_and_is_ignored_by_what_was_started_to_do_so(
    ignores: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "RULES", (_interrupting,))
    write(a=SCRIPT, b=SCRIPT)
    # A shell without job control starts what is in its background with interrupts ignored, and so these tests.
    handler = signal.SIG_IGN if ignores else signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)
    try:
        status, shown, error = run("--write", "a.py", "b.py")
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (status, error) == ((0, "") if ignores else (130, _INTERRUPTED))
    assert f"\n{'2 files: 2' if ignores else '1 file: 1'} rewritten, 0 unchanged, 0 not done\n" in shown
    assert Path("a.py").read_text() != SCRIPT
    assert (Path("b.py").read_text() == SCRIPT) is not ignores


# Its files take some seconds: it is interrupted, or loses a process, in the midst of them.
def _busy_process() -> "subprocess.Popen[str]":
    write({f"many/f{number:03}.py": SCRIPT * 6 for number in range(60)})
    script = (
        "import signal, sys; from tfmp.migrate.cli import command, workers; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "workers._cores = lambda: 2; sys.exit(command.main(sys.argv[1:]))"
    )
    process = started("python", "-c", script, "--write", "many")
    _wait(lambda: bool(_rewritten_ones()), 60)
    return process


def _wait(until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)


def _rewritten_ones() -> set[str]:
    return {f"many/{path.name}" for path in Path("many").glob("*.py") if "import tfmp" in path.read_text()}


@_on_posix
def test_an_interrupt_ends_all_processes_and_tells_what_was_written() -> None:
    process = _busy_process()
    os.killpg(process.pid, signal.SIGINT)
    status, shown, error = ended(process, 10)
    assert (status, error) == (130, _INTERRUPTED)
    written = {line.partition(":")[0] for line in shown.splitlines() if ": rewritten by R2" in line}
    assert 0 < len(written) < 60
    assert written == _rewritten_ones()


def _workers(process: "subprocess.Popen[str]") -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 2
    return found


@_with_proc
def test_a_process_that_is_ended_from_outside_costs_no_file() -> None:
    process = _busy_process()
    os.kill(_workers(process)[0], signal.SIGKILL)
    status, shown, error = ended(process)
    assert (status, error) == (0, "")
    assert "not done:" not in shown
    assert len(_rewritten_ones()) == 60


@_with_proc
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_command(ending: signal.Signals) -> None:
    process = _busy_process()
    workers = _workers(process)
    process.send_signal(ending)
    time.sleep(0.05)
    process.send_signal(ending)  # the second interrupt waits for no file
    assert ended(process, 10).status == (130 if ending == signal.SIGINT else -ending)
    _wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 10)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not list(Path("many").glob(".*"))


@_on_posix
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_command_while_it_replaces_a_file_leaves_no_other_file(ending: signal.Signals) -> None:
    write(a=SCRIPT, b=SCRIPT)
    script = (
        "import os, sys, time; from tfmp.migrate.cli import command; chmod = os.chmod; "
        "os.chmod = lambda *given: (print('replacing', flush=True), time.sleep(1), chmod(*given)); "
        "sys.exit(command.main(['--write', 'a.py', 'b.py']))"
    )
    process = started("python", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "replacing\n"
    process.send_signal(ending)
    status, shown, error = ended(process)
    assert (status, error) == (130, _INTERRUPTED)
    assert shown.startswith("a.py: rewritten by R2\n")
    assert {path.name: path.read_text() for path in Path().iterdir()} == {"a.py": REWRITTEN, "b.py": SCRIPT}
