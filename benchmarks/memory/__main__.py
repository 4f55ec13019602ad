"""Measures what recomputation and accumulation save of a training's memory, what they cost, and whether they change it.

    python -m benchmarks.memory --json memory.json --plot docs/images/recomputation.png

A transformer and a convolutional net of twelve blocks are trained on the same batch: as they are ("plain", and once
more to show what differs between two runs of the same), with every block in `tfmp.Recompute`, with the batch in four
micro-batches ("accumulation"), and with both; also with every block named by a `keras.RematScope`, and with every block
in `tf.recompute_grad`. Each contender has a process of its own. It takes 20 steps, in which its peak memory is measured
and after which its weights are compared. Then the processes of a case take more steps in turns, which are timed; ratios
of times compare steps of the same round.

"peak" is the peak of what TensorFlow's allocator has in use, weights included; on a CPU it counts tensors of 256 KiB or
more. Where there is no such figure, it is that of the process. "process" is the growth of the process' resident memory
since before the first step: with what tracing, compiling and the libraries take. The difference of the weights is the
largest one, divided by the largest weight. "both" is compared with "accumulation", the others with "plain":
micro-batches have other masks of Dropout and other statistics of BatchNormalization than one large batch.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import bars, report
from benchmarks.memory import nets
from benchmarks.memory.training_process import WAYS, Case, Measured, TrainingProcess

_POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
_MODES = ("graph", "xla", "eager")

_COLORS = {
    "Recompute": "tab:blue",
    "accumulation": "tab:orange",
    "both": "tab:green",
    "keras.RematScope": "tab:purple",
    "tf.recompute_grad": "0.6",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    conditions = report.printed_conditions()
    cases = [
        Case(model, policy, mode, options.size, options.steps)
        for policy, model, mode in itertools.product(options.policies, options.models, options.modes)
    ]
    figures = []
    for number, case in enumerate(cases, start=1):
        print(f"\n{case} (case {number} of {len(cases)})", flush=True)
        results = measure(case, ["plain", *(name for name in options.contenders if name != "plain")], options.rounds)
        print(f"\n{_table(results)}", flush=True)
        figures.append({**case._asdict(), "results": results})
        # After each case: a run of all of them takes an hour or more.
        report.write_json(options.json, {"conditions": conditions, "figures": figures})
    if options.plot:
        _plot(figures, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = list(nets.NETS)
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="nets (default: all)")
    parser.add_argument(
        "--policies", nargs="+", choices=_POLICIES, default=_POLICIES, help="dtype policies (default: all)"
    )
    parser.add_argument(
        "--modes", nargs="+", choices=_MODES, default=_MODES[:2], help="how steps are run (default: graph and xla)"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=WAYS, default=list(WAYS), help='beside "plain" (default: all)'
    )
    parser.add_argument(
        "--size", choices=nets.SIZES, default="full", help='"tiny" is for trying the command out (default: full)'
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="steps after which weights are compared (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of every contender (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--plot", type=Path, help="a file to draw them in; needs matplotlib")
    return parser


def measure(case: Case, names: Sequence[str], rounds: int) -> dict[str, Measured]:
    """Measure contenders, and print a line for each that is trained.

    Args:
        case: What is trained.
        names: The contenders, keys of `WAYS`.
        rounds: The number of timed steps of each contender.

    Returns:
        The results by contender, without the weights.
    """
    results: dict[str, Measured] = {}
    weights: dict[str, list[list[np.ndarray]]] = {}
    with contextlib.ExitStack() as stack:
        running: dict[str, TrainingProcess] = {}
        for number, name in enumerate(names, start=1):
            process = stack.enter_context(TrainingProcess(name, case))
            results[name] = process.measured
            if "error" in process.measured:
                print(f"{name} ({number} of {len(names)}): {process.measured['error']}", flush=True)
                continue
            running[name] = process
            weights[name] = process.measured.pop("weights")
            print(f"{name} ({number} of {len(names)}): trained, {_mebibytes(_peak(process.measured))} MiB", flush=True)
        for _ in range(rounds):
            for name, process in running.items():
                results[name].setdefault("step_seconds", []).append(process.step())
    for name, (first, last) in weights.items():
        base = WAYS[name].base
        if base in weights:
            _check_equal(name, first, weights[base][0])
            results[name]["difference"] = difference(last, weights[base][1])
    return results


def difference(weights: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return the largest difference between weights, divided by the largest weight.

    Args:
        weights: The weights.
        others: Those to compare with.

    Examples:
        >>> difference([np.float32([2, 1])], [np.float32([2, -4])])
        1.25
    """
    largest = max(float(np.abs(each).max()) for each in others)
    return max(float(np.abs(one - other).max()) for one, other in zip(weights, others, strict=True)) / largest


def _check_equal(name: str, first: Sequence[np.ndarray], of_base: Sequence[np.ndarray]) -> None:
    if not all(map(np.array_equal, first, of_base)):
        raise ArithmeticError(f"{name} did not start from the same weights as {WAYS[name].base}.")


def _peak(result: Measured) -> int | None:
    # The allocator's figure is 0 if all tensors are small.
    return result["allocator_bytes"] or result["process_bytes"]


def _table(results: Mapping[str, Measured]) -> str:
    rows = [[name, *_cells(result, results["plain"])] for name, result in results.items()]
    header = ["", "peak MiB", "/ plain", "process MiB", "/ plain", "ms a step", "/ plain", "difference of weights"]
    errors = [f"{name} raises {result['error']}" for name, result in results.items() if "error" in result]
    return "\n".join([report.table(header, rows), *errors])


def _cells(result: Measured, plain: Measured) -> list[str]:
    if "error" in result:
        return [*[""] * 6, "raises"]
    ratios = _ratios(result, plain)
    return [
        _mebibytes(_peak(result)),
        _text(ratios["memory"]),
        _mebibytes(result["process_bytes"]),
        _text(_quotient(result["process_bytes"], plain.get("process_bytes"))),
        f"{1000 * statistics.median(result['step_seconds']):.0f}",
        _text(ratios["time"]),
        f"{result['difference']:.1g}" if "difference" in result else "",
    ]


def _ratios(result: Measured, plain: Measured) -> dict[str, float | None]:
    """Return a contender's memory and time, divided by those without any way to save memory."""
    if "error" in result or "error" in plain:
        return {"memory": None, "time": None}
    time = report.median_ratio(result["step_seconds"], plain["step_seconds"])
    return {"memory": _quotient(_peak(result), _peak(plain)), "time": time}


def _quotient(one: int | None, other: int | None) -> float | None:
    return one / other if one and other else None


def _mebibytes(size: int | None) -> str:
    return "not known" if size is None else f"{size / 2**20:.0f}"


def _text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _plot(figures: Sequence[dict[str, Any]], path: Path) -> None:
    kinds = {"memory": "peak memory / plain", "time": "time of a step / plain"}
    by_title: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for each in figures:
        results = each["results"]
        ratios = {name: _ratios(result, results["plain"]) for name, result in results.items()}
        by_title.setdefault(f"{each['model']}, {each['mode']}", {})[each["policy"]] = ratios
    rows = [[_panel(title, policies, kind) for kind in kinds] for title, policies in by_title.items()]
    trained = {name for each in figures for name, result in each["results"].items() if "error" not in result}
    bars.draw(rows, list(kinds.values()), {name: _COLORS[name] for name in _COLORS if name in trained}, path)


def _panel(title: str, policies: Mapping[str, Mapping[str, Mapping[str, float | None]]], kind: str) -> bars.Panel:
    groups = {
        policy: {name: ratio[kind] for name, ratio in ratios.items() if name in _COLORS}
        for policy, ratios in policies.items()
    }
    return bars.Panel(title, groups)


if __name__ == "__main__":
    sys.exit(main())
