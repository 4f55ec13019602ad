"""Mutation testing of a package or a module, by the tests that are named, or those in the folder of its name.

    python -m tools.mutation tfmp/core/managers [tests/core/managers tests/contract ...]

It prints each mutant that no test noticed, and how many were noticed. A mutant whose line no test runs is marked so.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.mutation.mutants import mutants_of
from tools.mutation.trials import Outcome, Trials


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests against all mutants.

    Returns:
        The exit status: 1 if a mutant survived, 2 if the tests could not run.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("code", type=Path, help="a package or a module, such as tfmp/core/managers")
    parser.add_argument("tests", nargs="*", help="what pytest runs; by default the folder of the same name in tests/")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="try the mutants whose lines in the report match it"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many mutants are tried at a time")
    arguments = parser.parse_args(argv)
    paths = sorted(arguments.code.glob("*.py")) if arguments.code.is_dir() else [arguments.code]
    mutants = [mutant for path in paths for mutant in mutants_of(path) if re.search(arguments.only, str(mutant))]
    if not mutants:
        parser.error(f"no mutant of {arguments.code} matches {arguments.only!r}")
    tests = arguments.tests or [str("tests" / arguments.code.relative_to("tfmp"))]
    trials = Trials(mutants, arguments.processes)
    status = pytest.main([*tests, "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "--timeout=60"], plugins=[trials])
    if status != pytest.ExitCode.OK or not trials.outcomes:
        return 2
    for outcome in trials.outcomes:
        if outcome.killed_by is None:
            print(("not run:  " if not outcome.num_tests else "survived: ") + str(outcome.mutant))
    _print_counts(trials.outcomes)
    return int(any(outcome.killed_by is None for outcome in trials.outcomes))


def _print_counts(outcomes: Sequence[Outcome]) -> None:
    of_modules = {
        path.name: [outcome for outcome in outcomes if outcome.mutant.path == path]
        for path in dict.fromkeys(outcome.mutant.path for outcome in outcomes)
    }
    for name, some in [*of_modules.items(), ("all", outcomes)]:
        killed = sum(outcome.killed_by is not None for outcome in some)
        hung = sum(outcome.killed_by == "time" for outcome in some)
        print(f"{name}: {killed} of {len(some)} mutants killed ({hung} as they hung), {killed / len(some):.1%}")


if __name__ == "__main__":
    sys.exit(main())
