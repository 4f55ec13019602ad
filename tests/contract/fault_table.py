"""Prints a table of what every host does with every fault, with a row for each way in which they differ.

PYTHONPATH=.:tests:tests/optimizers python tests/contract/fault_table.py
PYTHONPATH=.:tests:tests/optimizers python tests/contract/fault_table.py --v1-behavior
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial

from faults import FAULTS, LARGE_FAULTS, REPLICA_FAULTS, Fault, course_of, faults_of, replica_faults_of
from kit import checks
from kit.hosts import Host
from kit.installed import Make, hosts, replicated_hosts
from kit.oracle import Rule
from kit.structures import STRUCTURES
from under_tensorflow import mirrored, set_up

#: Functions from the name of a structure: the first makes the host, the second that of the optimizer without tfmp.
Makers = tuple[Callable[[str], Host], Callable[[str], Host]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--v1-behavior", action="store_true", help="after tf.compat.v1.disable_v2_behavior()")
    args = parser.parse_args()

    # Keras warns about the variable that the loss does not depend on.
    warnings.simplefilter("ignore")
    logging.getLogger("tensorflow").setLevel("ERROR")
    set_up(v1_behavior=args.v1_behavior)
    strategy = mirrored()

    one_device = {
        name: (cache(partial(_make, make, Rule())), cache(partial(_make, make_plain, None)))
        for name, (make, make_plain) in hosts().items()
    }
    replicas = {
        name: (cache(partial(_make, make, Rule(), strategy=strategy)), cache(partial(_make, make_plain, None)))
        for name, (make, make_plain) in replicated_hosts().items()
    }
    for makers, names, of_host in (
        (one_device, FAULTS | LARGE_FAULTS, faults_of),
        (replicas, REPLICA_FAULTS, replica_faults_of),
    ):
        print(f"{', '.join(makers)}\n")  # noqa: T201 - a command line prints
        for line in table(makers, names, of_host):
            print(line, flush=True)  # noqa: T201 - the same
        print()  # noqa: T201 - the same


def _make(make: Make, rule: Rule | None, structure: str, **settings: object) -> Host:
    return make(STRUCTURES[structure], rule, **settings)


def table(
    makers: Mapping[str, Makers], names: Iterable[str], of_host: Callable[[str], Mapping[str, Fault]]
) -> Iterator[str]:
    """Train, and return the lines of a table. In a row, "all" means all hosts that have this fault.

    Args:
        makers: The functions that make each host.
        names: The names of the faults.
        of_host: A function from the name of a host to its faults.
    """
    yield "| fault | what happened | on |"
    yield "|---|---|---|"
    for name in names:
        cells = {
            host: _cell(of_host(host)[name], *of_both) for host, of_both in makers.items() if name in of_host(host)
        }
        for cell in dict.fromkeys(cells.values()):
            where = [host for host in cells if cells[host] == cell]
            yield f"| {name} | {cell} | {'all' if len(where) == len(cells) else ', '.join(where)} |"


def _cell(fault: Fault, make: Callable[[str], Host], make_plain: Callable[[str], Host]) -> str:
    states = checks.train(make(fault.structure), fault.steps)
    wrong = checks.violations(course_of(fault), states, make_plain(fault.structure))
    return "; ".join([checks.description(states), *(f"WRONG: {each}" for each in wrong)])


if __name__ == "__main__":
    main()
