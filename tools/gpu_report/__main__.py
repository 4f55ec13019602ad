"""Runs tests, examples and benchmarks on a GPU, and writes a report to send.

    python -m tools.gpu_report [FOLDER] [--parts NAME ...]

The report has the chip's name, the versions, and of each part the command, the exit status, the time and the output. A
part that fails does not keep the others from running. What needs more GPUs than TensorFlow sees is skipped; all else
runs on a CPU too. The folder gets report.md, the outputs, the figures as JSON, and pictures.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_report import machine, page, running
from tools.gpu_report.machine import Machine
from tools.gpu_report.parts import Part, parts
from tools.gpu_report.running import Outcome

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write the report.

    Returns:
        The exit status: the highest one of all parts, or 130 after an interrupt (Ctrl-C).
    """
    options = _parser().parse_args(argv)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = machine.look()
    for name, value in found.rows.items():
        print(f"{name + ':':22}{value}")
    chosen = [part for part in parts(len(found.gpus), tiny=options.tiny) if part.name in options.parts]
    return report(chosen, found, folder, options.limit * 60, tiny=options.tiny)


def report(chosen: Sequence[Part], found: Machine, folder: Path, limit: float, *, tiny: bool = False) -> int:
    """Run parts and write the report, anew after each of them; return the exit status.

    Args:
        chosen: The parts.
        found: The machine.
        folder: The folder of the report.
        limit: The seconds that a part may take.
        tiny: Whether the parts are shortened.
    """
    outcomes: list[Outcome] = []
    status = 0
    for number, part in enumerate(chosen, start=1):
        _remove_files(part, folder)
        print(f"[{number}/{len(chosen)}] {part.name}: {part.command}", flush=True)
        try:
            outcomes.append(_outcome(part, len(found.gpus), folder, limit))
        except KeyboardInterrupt:
            rest = [Outcome(each, None, why_not="not run, because of the interrupt") for each in chosen[number:]]
            outcomes += [Outcome(part, None, why_not="interrupted"), *rest]
            status = _INTERRUPTED
        last = outcomes[number - 1]
        took = "" if last.why_not else f" in {running.duration(last.seconds)}"
        print(f"      {last.result}{took}", flush=True)
        path = page.write(folder, found, outcomes, tiny=tiny)
        if status:
            break
    bad = [each.part.name for each in outcomes if each.status]
    ending = f"These parts failed: {', '.join(bad)}." if bad else "No part failed."
    print(f"{path} is written. {'The run was interrupted. ' if status else ''}{ending}")
    return max([status, *(each.status or 0 for each in outcomes)])


def _outcome(part: Part, gpus: int, folder: Path, limit: float) -> Outcome:
    if part.gpus > gpus:
        return Outcome(part, None, why_not=f"skipped: it needs {part.gpus} GPUs, and TensorFlow sees {gpus}")
    return running.run(part, folder, limit)


def _remove_files(part: Part, folder: Path) -> None:
    """Remove what an earlier run has left, which would be taken for this one's."""
    running.log_of(part, folder).unlink(missing_ok=True)
    if part.writes is not None:
        written = folder / part.writes[1]
        if written.is_dir():
            shutil.rmtree(written)
        written.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts(0, tiny=False)]
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("gpu_report"), help="where to write (default: %(default)s)"
    )
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="what to run (default: all)")
    parser.add_argument("--limit", type=float, default=60, help="minutes that a part may take (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="shorten all parts, to try the command out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
