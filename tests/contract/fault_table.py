"""Prints a table of what every host does with every fault, with a row for each way in which they differ.

PYTHONPATH=.:tests:tests/optimizers python tests/contract/fault_table.py
PYTHONPATH=.:tests:tests/optimizers python tests/contract/fault_table.py --v1-behavior
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from faults import FAULTS, LARGE_FAULTS, REPLICA_FAULTS, Fault, course_of, faults_of, replica_faults_of
from kit import checks
from kit.hosts import Host
from kit.installed import Pair, hosts, replicated_hosts
from kit.oracle import Rule
from kit.structures import STRUCTURES
from under_tensorflow import mirrored, set_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--v1-behavior", action="store_true", help="after tf.compat.v1.disable_v2_behavior()")
    args = parser.parse_args()

    # Keras warns about the variable that the loss does not depend on.
    warnings.simplefilter("ignore")
    logging.getLogger("tensorflow").setLevel("ERROR")
    set_up(v1_behavior=args.v1_behavior)
    replicas = table(replicated_hosts(), REPLICA_FAULTS, replica_faults_of, strategy=mirrored())
    for lines in (table(hosts(), FAULTS | LARGE_FAULTS, faults_of), replicas):
        for line in lines:
            print(line, flush=True)  # noqa: T201 - a command line prints


def table(
    pairs: Mapping[str, Pair],
    names: Iterable[str],
    of_host: Callable[[str], Mapping[str, Fault]],
    rule: Rule | None = Rule(),  # noqa: B008 - it is a tuple
    **settings: Any,
) -> Iterator[str]:
    """Train, and return the lines of a table. In a row, "all" means all hosts that have this fault."""
    wrapped = cache(lambda host, structure: pairs[host].make(STRUCTURES[structure], rule, **settings))
    plain = cache(lambda host, structure: pairs[host].make_plain(STRUCTURES[structure], None))
    yield from (", ".join(pairs), "", "| fault | what happened | on |", "|---|---|---|")
    for name in names:
        faults = {host: of_host(host)[name] for host in pairs if name in of_host(host)}
        cells = {
            host: _cell(fault, wrapped(host, fault.structure), plain(host, fault.structure))
            for host, fault in faults.items()
        }
        for cell in dict.fromkeys(cells.values()):
            where = [host for host in cells if cells[host] == cell]
            yield f"| {name} | {cell} | {'all' if len(where) == len(cells) else ', '.join(where)} |"
    yield ""


def _cell(fault: Fault, host: Host, plain: Host) -> str:
    states = checks.train(host, fault.steps)
    wrong = checks.violations(course_of(fault), states, plain)
    return "; ".join([checks.description(states), *(f"WRONG: {each}" for each in wrong)])


if __name__ == "__main__":
    main()
