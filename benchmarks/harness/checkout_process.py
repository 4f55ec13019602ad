"""Takes the steps of a cell with the tfmp of one checkout; `baseline` starts this module as a process.

    python -m benchmarks.harness.checkout_process ROOT CONTENDERS CELL NAMES

ROOT is the root of the checkout, CONTENDERS the module that makes the contenders, CELL the fields of the cell as JSON,
and NAMES the contenders' names as JSON. The process writes its answers to the standard output, one line of JSON each:

1. The first answer, after each contender has traced and compiled its step, is the seconds of one step by contender.
2. A line `[name, steps]` on the standard input lets this contender take so many steps; the answer is the mean seconds
   of a step.
3. After the end of the input, the last answer is the names of the contenders that took wrong steps.
"""

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.cells import Cell

if TYPE_CHECKING:
    from benchmarks.harness.contest import Contender


def main() -> None:
    """Take steps until the standard input ends."""
    root, module, cell, names = sys.argv[1:]
    # The standard output is for answers only: whatever else prints goes to the standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:  # noqa: ANN401 - anything that JSON can hold
        print(json.dumps(value), file=answers, flush=True)

    import_tfmp(Path(root))
    # Not before: a checkout that cannot be imported is to end the process at once.
    import tensorflow as tf

    from benchmarks.harness import contest

    # TensorFlow warns of a function that is traced too often: it takes the contenders' functions for one function.
    tf.get_logger().setLevel("ERROR")
    make: Callable[..., AbstractContextManager[list[Contender]]] = importlib.import_module(module).contenders
    chosen = Cell(*json.loads(cell))
    with make(chosen, json.loads(names)) as contenders:
        for each in contenders:
            each.step()
        answer({each.name: contest.seconds_of(each.step) for each in contenders})
        steps_of = {each.name: each.step for each in contenders}
        for line in sys.stdin:
            name, steps = json.loads(line)
            answer(contest.seconds_of(functools.partial(contest.taken, steps_of[name], steps)) / steps)
        answer(contest.with_wrong_steps(contenders, chosen.outcome))


def import_tfmp(root: Path) -> None:
    """Import the tfmp of a checkout; everything that is imported later gets it too.

    Args:
        root: The checkout's root.

    Raises:
        ImportError: Another tfmp was imported.
    """
    # The path is only for tfmp. The benchmark's own modules come from the checkout in which it was started.
    sys.path.insert(0, str(root))
    tfmp = importlib.import_module("tfmp")
    sys.path.remove(str(root))
    if Path(str(tfmp.__file__)).parents[1].resolve() != root.resolve():
        raise ImportError(f"tfmp must come from {root}, got {tfmp.__file__}.")


if __name__ == "__main__":
    main()
