"""The faults: the gradients that a training is fed, and the steps of the training that must be skipped."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from kit.oracle import Course, Rule, course
from kit.structures import LARGE, STRUCTURES, Fed

_LARGEST = float(np.finfo(np.float32).max)


class Fault(NamedTuple):
    """A training with unusual gradients.

    Attributes:
        structure: The name of the structure that is trained, a key of `STRUCTURES`.
        steps: For each step, the values that each replica is fed.
        skipped: The indices of the steps that must be skipped.
    """

    structure: str
    steps: Sequence[Sequence[Fed]]
    skipped: Sequence[int]


def course_of(fault: Fault, rule: Rule = Rule()) -> Course:  # noqa: B008 - it is a tuple
    """Return what a training with a fault must do."""
    return course(STRUCTURES[fault.structure], fault.steps, rule, skipped=fault.skipped)


def healthy(step: int, replica: int = 0) -> Fed:
    """Return finite gradients for the structure "all forms" with which float32 computes exactly."""
    return {
        "kernel": np.float32([0.25 * (step + 1), -0.5 - replica, 0.125]),
        # In one of every four steps, both indices name the same row.
        "indices": np.int32([step % 4, 2 - replica]),
        "rows": np.float32([[0.5, -0.25], [1, 0.25 * step + replica]]),
    }


def _fed(step: int, replica: int = 0, **faulty: object) -> Fed:
    return {**healthy(step, replica), **faulty}


def _kernel(value: float, other: float = 0.5) -> dict[str, np.ndarray]:
    return {"kernel": np.float32([other, 0.25, value])}


def _row(value: float) -> dict[str, np.ndarray]:
    return {"rows": np.float32([[0.5, -0.25], [1, value]])}


_NO_ROWS = {"rows": np.zeros([0, 2], np.float32), "indices": np.zeros([0], np.int32)}
_TWICE = {"indices": np.int32([1, 1])}


def _at(faulty: dict[str, np.ndarray], where: Sequence[int], count: int, skipped: Sequence[int] | None = None) -> Fault:
    """Return a training with a fault in some of its steps; by default these steps must be skipped."""
    steps = [[_fed(step, **(faulty if step in where else {}))] for step in range(count)]
    return Fault("all forms", steps, where if skipped is None else skipped)


def _once(**faulty: np.ndarray) -> Fault:
    return _at(faulty, [1], 5)


def _harmless(**unusual: np.ndarray) -> Fault:
    return _at(unusual, [1, 2], 5, skipped=[])


def _always(**unusual: np.ndarray) -> Fault:
    return _at(unusual, range(5), 5, skipped=[])


def _persistent(skips: int, **faulty: np.ndarray) -> Fault:
    """Return a training whose fault repeats until the scale is so low that the scaled gradient does not overflow."""
    return _at(faulty, range(1, skips + 2), skips + 5, skipped=range(1, skips + 1))


def _float16(values: Sequence[float], skipped: Sequence[int]) -> Fault:
    return Fault("float16", [[{"half": np.float32([1, value])}] for value in values], skipped)


def _empty(empty: float, bias: float, skipped: Sequence[int]) -> Fault:
    fed = [(1, 1), (empty, bias), (1, 1)]
    return Fault("empty", [[{"empty": np.float32(e), "bias": np.float32([b])}] for e, b in fed], skipped)


def _one_in(structure: str) -> Fault:
    size = LARGE[structure]
    fed = [(0, 1), (0, math.inf), (size // 2, math.nan), (size - 1, -math.inf), (1, 2)]
    steps = [[{"position": np.int32([position]), "value": np.float32([value])}] for position, value in fed]
    return Fault(structure, steps, [1, 2, 3])


#: The faults on one device.
FAULTS = {
    "None for a variable outside the loss": _at({}, [], 5),
    "inf": _once(**_kernel(math.inf)),
    "-inf": _once(**_kernel(-math.inf)),
    "nan": _once(**_kernel(math.nan)),
    "inf and -inf": _once(**_kernel(math.inf, other=-math.inf)),
    "inf and nan": _once(**_kernel(math.inf, other=math.nan)),
    "2e19, whose square overflows": _harmless(**_kernel(2e19)),
    "1e38, until it fits": _persistent(9, **_kernel(1e38)),
    "-1e38, until it fits": _persistent(9, **_kernel(-1e38)),
    "largest float32, until it fits": _persistent(10, **_kernel(_LARGEST)),
    "1e38 beside nan": _once(**_kernel(1e38, other=math.nan)),
    "denormal 1e-40": _always(**_kernel(1e-40)),
    "smallest normal 2**-126": _always(**_kernel(2.0**-126)),
    "all zero": _harmless(kernel=np.zeros(3, np.float32), rows=np.zeros([2, 2], np.float32)),
    "-0": _harmless(**_kernel(-0.0)),
    "sparse: inf in a row": _once(**_row(math.inf)),
    "sparse: -inf in a row": _once(**_row(-math.inf)),
    "sparse: nan in a row": _once(**_row(math.nan)),
    "sparse: inf in a row named twice": _once(**_row(math.inf), **_TWICE),
    "sparse: 1e38 in a row, until it fits": _persistent(9, **_row(1e38)),
    "sparse: no rows": _harmless(**_NO_ROWS),
    "sparse: no rows, nan elsewhere": _once(**_NO_ROWS, **_kernel(math.nan)),
    "inf on every step": _at(_kernel(math.inf), range(12), 15),
    "nan on the first step": _at(_kernel(math.nan), [0], 4),
    "inf on the last step": _at(_kernel(math.inf), [4], 5),
    "inf on every other step": _at(_kernel(math.inf), [0, 2, 4, 6], 9),
    "float16: 100, whose scaled form overflows": _float16([1, 100, 100, 1], [1]),
    "float16: 1e5, which does not fit": _float16([1, *[1e5] * 11, 1, 1], range(1, 12)),
    "float16: inf": _float16([1, math.inf, 1], [1]),
    "float16: nan": _float16([1, math.nan, 1], [1]),
    "float16: denormal 2**-20": _float16([0, 2.0**-20, 2.0**-20, 0], []),
    "float16: 2**-30, below all float16": _float16([0, 2.0**-30, 2.0**-30, 0], []),
    "empty: a variable without values": _empty(1, 0.5, []),
    "empty: inf times no value": _empty(math.inf, 0.5, []),
    "empty: inf beside it": _empty(1, math.inf, [1]),
    "one in a million: the first inf, one nan, the last -inf": _one_in("million"),
}

#: Replacements for faults of `FAULTS` with TensorFlow 2.16 and 2.17. There XLA on CPUs computes float16 operations in
#: float32, so that these gradients do not overflow.
FAULTS_WITH_WIDE_FLOAT16 = {"float16: 100, whose scaled form overflows": _float16([1, 100, 100, 1], [])}

#: More faults on one device, for some hosts only: each takes seconds.
LARGE_FAULTS = {"one in 10 million: the same": _one_in("10 million")}


def _on_replicas(faulty: dict[str, np.ndarray], where: Sequence[Sequence[int]], **skipped: Sequence[int]) -> Fault:
    """Return a training of two replicas with a fault; `where` lists for each step the replicas that have the fault."""
    steps = [
        [_fed(step, replica, **(faulty if replica in replicas else {})) for replica in range(2)]
        for step, replicas in enumerate(where)
    ]
    return Fault("all forms", steps, skipped.get("skipped", [step for step, replicas in enumerate(where) if replicas]))


_FIRST, _SECOND, _BOTH, _NEITHER = [0], [1], [0, 1], []

#: The fault for which it makes a difference whether gradients are summed before they are checked, or after.
OPPOSITE = "3e38 on the first, -3e38 on the second"

#: The faults on two replicas, for hosts that check each replica's gradients before these are summed.
REPLICA_FAULTS = {
    "none": _on_replicas({}, [_NEITHER] * 4),
    **{
        f"{name} on the {which}": _on_replicas(_kernel(value), [_NEITHER, replicas, _NEITHER, _NEITHER])
        for name, value in (("inf", math.inf), ("-inf", -math.inf), ("nan", math.nan))
        for which, replicas in (("first", _FIRST), ("second", _SECOND))
    },
    "inf on both": _on_replicas(_kernel(math.inf), [_NEITHER, _BOTH, _NEITHER, _NEITHER]),
    "inf, by turns": _on_replicas(_kernel(math.inf), [_FIRST, _SECOND] * 3 + [_NEITHER] * 3),
    "inf by turns, every other step": _on_replicas(
        _kernel(math.inf), [_FIRST, _NEITHER, _SECOND, _NEITHER, _FIRST, _NEITHER, _SECOND, _NEITHER]
    ),
    "1e38 on the second, until it fits": _on_replicas(
        _kernel(1e38), [_NEITHER, *[_SECOND] * 10, *[_NEITHER] * 3], skipped=range(1, 10)
    ),
    # The sum overflows at every scale.
    "3e38 on both, whose sum overflows": _on_replicas(_kernel(3e38), [_NEITHER, *[_BOTH] * 11, *[_NEITHER] * 3]),
    OPPOSITE: Fault(
        "all forms",
        [
            [_fed(step, 0, **(_kernel(3e38) if faulty else {})), _fed(step, 1, **(_kernel(-3e38) if faulty else {}))]
            for step, faulty in enumerate([False, *[True] * 11, *[False] * 3])
        ],
        range(1, 12),
    ),
    "sparse, nan in a row of the second": _on_replicas(_row(math.nan), [_NEITHER, _SECOND, _NEITHER, _NEITHER]),
    "sparse, no rows on the first": _on_replicas(_NO_ROWS, [_NEITHER, _FIRST, _FIRST, _NEITHER], skipped=[]),
    "all zero on the first": _on_replicas(
        {"kernel": np.zeros(3, np.float32)}, [_NEITHER, _FIRST, _FIRST, _NEITHER], skipped=[]
    ),
}


#: The faults on two replicas, for hosts that sum gradients first: at a scale of 1 the opposite gradients cancel.
REPLICA_FAULTS_IF_SUMMED_FIRST = REPLICA_FAULTS | {OPPOSITE: REPLICA_FAULTS[OPPOSITE]._replace(skipped=range(1, 11))}


def faults_of(host: str) -> Mapping[str, Fault]:
    """Return the faults for a host of `kit.installed.hosts`.

    Only a session of TF1 and the `tf.function` of each Keras have the faults with large variables.
    """
    is_fed_large = host == "v1 graph, resource variables" or host.endswith(" function")
    faults = FAULTS | LARGE_FAULTS if is_fed_large else FAULTS
    has_wide_float16 = host.endswith(" XLA") and tf.__version__.startswith(("2.16.", "2.17."))
    return faults | FAULTS_WITH_WIDE_FLOAT16 if has_wide_float16 else faults


def replica_faults_of(host: str) -> Mapping[str, Fault]:
    """Return the faults for a host of `kit.installed.replicated_hosts`."""
    return REPLICA_FAULTS_IF_SUMMED_FIRST if host in ("keras2", "tf_keras") else REPLICA_FAULTS
