"""Prints a table of what every front-end does with every fault, with a row for each way in which they differ.

PYTHONPATH=.:tests/optimizers python tests/faults/fault_table.py
PYTHONPATH=.:tests/optimizers python tests/faults/fault_table.py --v1-behavior
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial

import checks
import lanes
import tensorflow as tf
from faults import FAULTS, LARGE_FAULTS, REPLICA_FAULTS, Fault, Rule
from front_ends import FrontEnd
from structures import STRUCTURES

#: Two functions from the name of a structure: the first makes the front-end, the second makes the same front-end with
#: an optimizer without a wrapper.
Makers = tuple[Callable[[str], FrontEnd], Callable[[str], FrontEnd]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--v1-behavior", action="store_true", help="after tf.compat.v1.disable_v2_behavior()")
    args = parser.parse_args()

    # Keras warns about the variable that the loss does not depend on.
    warnings.simplefilter("ignore")
    logging.getLogger("tensorflow").setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if args.v1_behavior:
        tf.compat.v1.disable_v2_behavior()
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())

    one_device = {
        name: (cache(partial(_make, make, Rule())), cache(partial(_make, make_plain, None)))
        for name, (make, make_plain) in lanes.front_ends().items()
    }
    replicas = {
        name: (cache(partial(_make, make, Rule(), strategy=strategy)), cache(partial(_make, make, None)))
        for name, make in lanes.replicated_front_ends().items()
    }
    for front_ends, names, faults_of in (
        (one_device, FAULTS | LARGE_FAULTS, lanes.faults_of),
        (replicas, REPLICA_FAULTS, lanes.replica_faults_of),
    ):
        print(f"{', '.join(front_ends)}\n")  # noqa: T201 - a command line prints
        for line in table(front_ends, names, faults_of):
            print(line, flush=True)  # noqa: T201 - the same
        print()  # noqa: T201 - the same


def _make(make: lanes.Make, rule: Rule | None, structure: str, **settings: object) -> FrontEnd:
    return make(STRUCTURES[structure], rule, **settings)


def table(
    front_ends: Mapping[str, Makers], names: Iterable[str], faults_of: Callable[[str], Mapping[str, Fault]]
) -> Iterator[str]:
    """Train, and return the lines of a table. In a row, "all" means all front-ends that have this fault.

    Args:
        front_ends: The functions that make each front-end.
        names: The names of the faults.
        faults_of: A function from the name of a front-end to its faults.
    """
    yield "| fault | what happened | on |"
    yield "|---|---|---|"
    for name in names:
        cells = {
            front_end: _cell(faults_of(front_end)[name], *makers)
            for front_end, makers in front_ends.items()
            if name in faults_of(front_end)
        }
        for cell in dict.fromkeys(cells.values()):
            where = [front_end for front_end in cells if cells[front_end] == cell]
            yield f"| {name} | {cell} | {'all' if len(where) == len(cells) else ', '.join(where)} |"


def _cell(fault: Fault, make: Callable[[str], FrontEnd], make_plain: Callable[[str], FrontEnd]) -> str:
    states = checks.train(make(fault.structure), fault)
    wrong = checks.violations(fault, states, checks.train_without_wrapper(make_plain(fault.structure), fault))
    return "; ".join([checks.description(states), *(f"WRONG: {each}" for each in wrong)])


if __name__ == "__main__":
    main()
