"""A pytest plugin that runs the collected tests against each mutant, in place of running them once.

TensorFlow and the test modules are imported once. Each mutant is tried in a fork of that process, in which the mutant's
code takes the place of the function's, so that whoever holds the function runs the mutant. The tests that run the
mutant's line are run, the fastest first, until one fails. The process itself runs no test: a fork of a process in which
TensorFlow has started its threads would hang. For the same reason mutants are not seen by the tests' own processes.
"""

import contextlib
import dataclasses
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import coverage
import pytest
import tensorflow as tf
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item
from tensorflow.python.autograph.impl.api import autograph_artifact
from tqdm import tqdm

from tools.mutation.mutants import Mutant, is_at

#: A mutant is taken for one that never ends after so many seconds, and so many times the time of its tests.
_GRACE, _PATIENCE = 20.0, 5.0

#: The seconds after which no further test of a mutant is begun: hundreds of tests may run a line.
_LIMIT = 60.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the tests said to a mutant: `killed_by` is the test that failed, "time" if one hung, None if all passed."""

    mutant: Mutant
    killed_by: str | None
    num_tests: int


class Trials:
    """The plugin; `outcomes` are there when pytest has ended."""

    def __init__(self, mutants: Sequence[Mutant], processes: int) -> None:
        self.outcomes: list[Outcome] = []
        self._mutants = mutants
        self._files = sorted({str(mutant.path.resolve()) for mutant in mutants})
        self._processes = processes

    @pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try all mutants; return that pytest need not run the tests."""
        try:
            tf.config.threading.set_intra_op_parallelism_threads(1)
        except RuntimeError:
            raise pytest.UsageError("one of these test modules makes tensors while it is imported") from None
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            functions = _functions_by_file(self._files)
            coverages = self._run_unchanged(session.items)
            trials = [_Trial(mutant, functions, coverages) for mutant in self._mutants]
            self.outcomes = self._run_all(trials, session.items)
        return True

    def _run_unchanged(self, items: Sequence[pytest.Item]) -> "_Coverages":
        """Run all tests without a mutant, and note which lines each of them runs, and for how long."""
        print(f"Running {len(items)} tests without a mutant", file=sys.stderr)
        modules = list(dict.fromkeys(item.path for item in items))
        shares = [
            [index for index, item in enumerate(items) if modules.index(item.path) % self._processes == share]
            for share in range(self._processes)
        ]
        forks = [_Fork(partial(_run_with_coverage, items, share, self._files)) for share in shares]
        merged = _Coverages({}, {})
        for fork in forks:
            found = fork.result()
            if isinstance(found, str):
                raise pytest.UsageError(f"without a mutant, this fails already: {found}")
            merged.seconds.update(found.seconds)
            for place, tests in found.tests.items():
                merged.tests.setdefault(place, set()).update(tests)
        return merged

    def _run_all(self, trials: "Sequence[_Trial]", items: Sequence[pytest.Item]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        killers: defaultdict[str, Counter[int]] = defaultdict(Counter)
        running: dict[int, tuple[_Fork, list[int], float]] = {}
        waiting = list(enumerate(trials))[::-1]
        progress = tqdm(total=len(trials), unit="mutant", file=sys.stderr)
        while waiting or running:
            while waiting and len(running) < self._processes:
                number, trial = waiting.pop()
                tests = trial.tests(killers[trial.function])
                if not tests:
                    outcomes[number] = Outcome(trial.mutant, None, 0)
                    progress.update()
                    continue
                fork = _Fork(partial(trial.run, [items[index] for index in tests]))
                running[number] = fork, tests, time.monotonic() + _GRACE + _PATIENCE * min(trial.seconds, _LIMIT)
            for number, (fork, tests, deadline) in list(running.items()):
                if not fork.ended() and time.monotonic() < deadline:
                    continue
                del running[number]
                failed = fork.result(patience=False)
                name = failed if failed is None or failed == "time" else items[tests[failed]].nodeid
                if isinstance(failed, int):
                    killers[trials[number].function][tests[failed]] += 1
                outcomes[number] = Outcome(trials[number].mutant, name, len(tests))
                progress.update()
                progress.set_postfix(survived=sum(each.killed_by is None for each in outcomes.values()))
            time.sleep(0.005)
        progress.close()
        return [outcomes[number] for number in range(len(trials))]


@dataclasses.dataclass(frozen=True)
class _Coverages:
    """The tests that run a line, by file and line; the seconds that a test takes. Tests are numbers in the session."""

    tests: dict[tuple[str, int], set[int]]
    seconds: dict[int, float]


class _Trial:
    """A mutant, the function objects that it changes, and the tests that run its line."""

    def __init__(self, mutant: Mutant, functions: dict[str, list[types.FunctionType]], coverages: _Coverages) -> None:
        self.mutant = mutant
        self.function = f"{mutant.path} {mutant.function}"
        file = str(mutant.path.resolve())
        self._functions = [
            function for function in functions[file] if is_at(function.__code__, mutant.function, mutant.first_line)
        ]
        ran = [coverages.tests.get((file, line), set()) for line in mutant.lines]
        self._tests = set().union(*ran)
        self._seconds = coverages.seconds
        self.seconds = sum(self._seconds[test] for test in self._tests)

    def tests(self, killers: Counter[int]) -> list[int]:
        """Order the tests: first those that killed most mutants of the function, then the fastest."""
        return sorted(self._tests, key=lambda test: (-killers[test], self._seconds[test]))

    def run(self, items: Sequence[pytest.Item]) -> int | None:
        """Change the function, and run the tests; return the number of the one that fails, None if none does.

        When the tests have taken `_LIMIT`, no further one is run: the mutant then counts as one that survived.
        """
        code = self.mutant.code()
        if code is None or not self._functions:
            return None
        for function in self._functions:
            try:
                function.__code__ = code
            except ValueError:
                # The change uses `super()` no more: it cannot be tried, and counts as one that survived.
                return None
        start = time.monotonic()
        for index, item in enumerate(items):
            if time.monotonic() - start > _LIMIT:
                break
            if _fails(item, items[index + 1 : index + 2]):
                return index
        return None


def _fails(item: pytest.Item, next_items: Sequence[pytest.Item]) -> bool:
    # The protocol leaves out what pytest wraps around it: the filters that a test sets for its warnings.
    with catch_warnings_for_item(item.config, item.ihook, "runtest", item):
        reports = runtestprotocol(item, log=False, nextitem=next_items[0] if next_items else None)
    return any(report.failed for report in reports)


def _run_with_coverage(items: Sequence[pytest.Item], share: Sequence[int], files: Sequence[str]) -> "_Coverages | str":
    """Run a share of the tests; return the test that failed, if one does."""
    measured = coverage.Coverage(data_file=None, include=list(files), config_file=False)
    # A share may be empty, or run none of the files.
    measured.set_option("run:disable_warnings", ["no-data-collected"])
    seconds = {}
    measured.start()
    for position, index in enumerate(share):
        measured.switch_context(str(index))
        start = time.monotonic()
        following = share[position + 1 : position + 2]
        if _fails(items[index], [items[each] for each in following]):
            return items[index].nodeid
        seconds[index] = time.monotonic() - start
    measured.stop()
    tests: dict[tuple[str, int], set[int]] = {}
    found = measured.get_data()
    for file in files:
        for line, contexts in found.contexts_by_lineno(file).items():
            tests[file, line] = {int(context) for context in contexts if context}
    return _Coverages(tests, seconds)


def _functions_by_file(files: Sequence[str]) -> dict[str, list[types.FunctionType]]:
    """Find the function objects that were made from the files, wherever they are held."""
    for file in files:
        # tfmp imports its modules on their first use, which so far was only in the fork that ran the tests.
        importlib.import_module(".".join(Path(file).relative_to(Path.cwd()).with_suffix("").parts))
    found: dict[str, list[types.FunctionType]] = {file: [] for file in files}
    gc.unfreeze()  # What is frozen is not listed.
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and each.__code__.co_filename in found:
            found[each.__code__.co_filename].append(each)
            # AutoGraph compiles a function from its file, in which there is no mutant. What TensorFlow's public API has
            # against it makes another function, which nobody holds.
            autograph_artifact(each)
    gc.freeze()
    return found


class _Fork:
    """A fork of this process that computes something and ends."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `result` closes it
        self._process = os.fork()
        if self._process:
            return
        os.setpgid(0, 0)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            result = compute()
        except BaseException:  # The parent raises it.
            result = _Crash(traceback.format_exc())
        pickle.dump(result, self._file)
        self._file.flush()
        os._exit(0)

    def ended(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self._process, os.WNOHANG)[0] != 0
        return True

    def result(self, *, patience: bool = True) -> Any:  # noqa: ANN401 - what was computed
        """Return what the process computed. Without patience it is ended if it has not; then the result is "time"."""
        if not self.ended():
            if not patience:
                os.killpg(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        self._file.seek(0)
        content = self._file.read()
        self._file.close()
        found = pickle.loads(content) if content else "time"
        if isinstance(found, _Crash):
            raise RuntimeError(f"a fork of the process failed:\n{found.traceback}")
        return found


@dataclasses.dataclass(frozen=True)
class _Crash:
    """An exception in a fork that no test raised."""

    traceback: str
