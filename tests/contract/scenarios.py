"""The scenarios: what every host is fed, with which settings; the oracle says what each step must do.

A new scenario is one row of `SCENARIOS`, or of `REPLICATED`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from faults import healthy
from kit import oracle
from kit.oracle import Course, Rule, Spikes, Window
from kit.structures import STRUCTURES, Fed, Structure

import tfmp

STRUCTURE = STRUCTURES["all forms"]


def clip(grads: Sequence[Any]) -> Sequence[Any]:
    """Clip gradients as a script does; the norms of the scenarios' gradients are larger."""
    return tfmp.clip_by_global_norm(list(grads), 0.5)[0]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a host is fed, and its settings.

    Attributes:
        fed: What each step or micro-batch is fed; a list for each of several replicas.
        promises: The numbers of the promises of docs/explanation/step.md that the scenario is about.
        rule: The settings of the manager.
        window: The settings of accumulation.
        spikes: The settings of a spike detector.
        limit: The limit of a detector of saturation.
        clips: Whether the script clips the gradients.
        rtol: The relative error of weights; it is 0 where float32 computes exactly.
        structure: What is trained.
        by_xla: Whether the hosts run it that compile the whole step by XLA, which takes them seconds.
    """

    fed: Sequence[Fed | list[Fed]]
    promises: tuple[int, ...]
    rule: Rule = Rule()  # noqa: RUF009 - it is a tuple
    window: Window | None = None
    spikes: Spikes | None = None
    limit: float | None = None
    clips: bool = False
    rtol: float = 0
    by_xla: bool = False
    structure: Structure = STRUCTURE

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments of a host's wrapper. Norms are recorded where no detector of spikes does it."""
        found: dict[str, Any] = {}
        if self.window is not None:
            found |= dataclasses.asdict(self.window)
        if self.spikes is not None:
            has_norm = self.spikes.max_norm != math.inf
            given = dataclasses.asdict(self.spikes) | {"max_norm": self.spikes.max_norm if has_norm else None}
            if self.spikes.window is None:
                given = {name: given[name] for name in ("max_norm", "max_consecutive_skips")}
            found["skip_spikes"] = tfmp.SpikeDetector(**given)
        else:
            found["records_norm"] = True
        if self.limit is not None:
            found["overflow_detector"] = tfmp.SaturationDetector(self.limit)
        if self.clips:
            found["clip"] = clip
        return found

    def runs_on(self, name: str) -> bool:
        """Return whether a host with several replicas can run the scenario."""
        # A loop with GradScaler would step in a conditional, in which TensorFlow allows no reduction over replicas.
        return self.window is None or "GradScaler" not in name

    def plain_settings(self) -> Mapping[str, Any]:
        """Return the arguments of the host of the optimizer without tfmp."""
        return {"clip": clip} if self.clips else {}

    def course(self) -> Course:
        """Return what the host must do."""
        return oracle.course(
            self.structure, self.steps(), self.rule, self.window or Window(), self.spikes, limit=self.limit or math.inf
        )

    def steps(self) -> list[list[Fed]]:
        """Return what each replica is fed."""
        return [fed if isinstance(fed, list) else [fed] for fed in self.fed]


def _kernel(value: float) -> Fed:
    return {**healthy(1), "kernel": np.float32([0.5, 0.25, value])}


def _rows(value: float) -> Fed:
    return {**healthy(1), "rows": np.float32([[0.5, -0.25], [1, value]])}


_OK = [healthy(step) for step in range(8)]
_INF, _NAN, _SPARSE_INF, _SPARSE_NAN = _kernel(math.inf), _kernel(math.nan), _rows(math.inf), _rows(math.nan)
_SPIKE, _SPARSE_SPIKE = _kernel(300), _rows(-300)
_NO_ROWS = {**healthy(2), "rows": np.zeros([0, 2], np.float32), "indices": np.zeros([0], np.int32)}
_TWICE = {**healthy(2), "indices": np.int32([1, 1])}
_ZERO = {**healthy(0), "kernel": np.zeros(3, np.float32), "rows": np.zeros([2, 2], np.float32)}
_DROPPED = [_OK[0], _INF, _OK[2], _OK[3], *_OK[4:], *[_NAN] * 4, *_OK[:3], _SPARSE_INF, *_OK[4:]]

#: What one device is fed.
SCENARIOS = {
    "norms": Scenario(
        [_OK[0], _INF, _OK[1], _SPARSE_NAN, _TWICE, _NO_ROWS, _ZERO, _kernel(1e-28), _kernel(1e25), _OK[2]],
        (8, 7),
        by_xla=True,
    ),
    "clipped": Scenario([_OK[0], _INF, _OK[1], _SPARSE_INF, _OK[2]], (9, 8), clips=True, rtol=1e-6),
    "window dropped": Scenario(_DROPPED, (10, 7), window=Window(4), by_xla=True),
    "micro-batch dropped": Scenario(_DROPPED, (10,), window=Window(4, "micro_batch"), rtol=2e-6, by_xla=True),
    # At the end, four spikes are a lasting change of the norm.
    "spikes": Scenario(
        [*_OK[:3], _SPIKE, _INF, _SPARSE_SPIKE, _OK[1], _SPIKE, *_OK[2:5], *[_SPIKE] * 4, _OK[0], *[_SPIKE] * 3],
        (11, 3),
        spikes=Spikes(3, max_consecutive_skips=2),
        by_xla=True,
    ),
    # A spike is one of the finite steps after which the scale grows: it doubles after the third.
    "spikes count as finite steps": Scenario(
        [_OK[0], _SPIKE, _OK[1], _OK[2], _SPIKE, _SPIKE, _INF], (5, 11), spikes=Spikes(max_norm=50)
    ),
    "spikes that are clipped": Scenario(
        [*_OK[:3], _SPIKE, _OK[0]], (11, 9), spikes=Spikes(max_norm=50), clips=True, rtol=1e-6
    ),
    "spike of a window": Scenario(
        [*_OK[:2], _OK[2], _SPIKE, *_OK[4:6], _INF, _SPIKE], (11, 10), window=Window(2), spikes=Spikes(max_norm=50)
    ),
    # The micro-batch that overflowed was not in the report if the mean of the others was a spike.
    "spike of a window with an overflow": Scenario(
        [_SPIKE, _INF, *_OK[:2], _SPARSE_NAN, _SPARSE_SPIKE, *_OK[2:4]],
        (7, 11),
        window=Window(2, "micro_batch"),
        spikes=Spikes(max_norm=50),
    ),
    "saturation": Scenario(
        [_OK[0], _kernel(64), _OK[1], _rows(-64), _rows(63), *_OK[2:5], _kernel(32)], (12, 7), limit=65536
    ),
    "rule with settings": Scenario(
        [_INF, _OK[0], _INF, *_OK[:5], _NAN, _NAN, _OK[0], _SPARSE_NAN],
        (5,),
        rule=Rule(2.0**12, 4, 2, 4.0, 0.25, 2.0**9, 2.0**13, 2),
    ),
    # A window at the end of an epoch has two micro-batches, of which one is dropped in the first and the last epoch.
    "all together": Scenario(
        [
            *[*_OK[:5], _INF],
            *[*_OK[:2], _TWICE, _NO_ROWS, *_OK[4:6]],
            *[*_OK[:2], _SPIKE, *_OK[3:6]],
            *[_NAN, *_OK[1:5], _SPARSE_INF],
        ],
        (7, 10, 11),
        window=Window(4, "micro_batch", 6),
        spikes=Spikes(3),
        rtol=2e-6,
    ),
}

#: What is stopped and resumed.
RESUMED = SCENARIOS["all together"]


def _pair(step: int, **of_second: Any) -> list[Fed]:
    return [healthy(step, 0), {**healthy(step, 1), **of_second}]


_PAIRS = [_pair(step) for step in range(8)]
_SECOND_INF = _pair(1, kernel=np.float32([0, math.inf, 0]))
_SECOND_NAN = _pair(2, rows=np.float32([[0, 0], [0, math.nan]]))
_FIRST_INF = _SECOND_INF[::-1]
#: The norm of each replica's gradients is below 50, and that of their sum is above it.
_SPIKE_OF_SUM = [{**fed, "kernel": np.float32([32, 0, 0])} for fed in _pair(1)]
#: Those of each replica are large, and their sum is small.
_OPPOSITE = [
    {**fed, "kernel": np.float32(kernel)}
    for fed, kernel in zip(_pair(2), ([1000, -500, 250], [-1001, 502, -249]), strict=True)
]

#: What two replicas are fed.
REPLICATED = {
    "norms of sums": Scenario(
        [*_PAIRS[:2], _SECOND_INF, _OPPOSITE, _SECOND_NAN, _SPIKE_OF_SUM, _FIRST_INF, _PAIRS[3]], (8, 14)
    ),
    "spikes of sums": Scenario(
        [
            _PAIRS[0],
            _SECOND_INF,
            _SPIKE_OF_SUM,
            _OPPOSITE,
            _pair(3, kernel=np.float32([0, 300, 0])),
            _SECOND_NAN,
            _PAIRS[4],
        ],
        (11, 14),
        spikes=Spikes(max_norm=50),
    ),
    "spikes by a window": Scenario(
        [*_PAIRS[:3], _pair(3, kernel=np.float32([0, 300, 0])), *_PAIRS[4:6], _FIRST_INF, _PAIRS[6]],
        (11, 14),
        spikes=Spikes(3),
    ),
    "clipped": Scenario([_PAIRS[0], _SECOND_INF, _PAIRS[2]], (8, 9, 14), clips=True),
    "window dropped": Scenario(
        [*_PAIRS[:2], _PAIRS[2], _SECOND_INF, *_PAIRS[4:6], _FIRST_INF, _SECOND_NAN, *_PAIRS[:2]],
        (10, 14),
        window=Window(2),
    ),
    # The divisor is the number of micro-batches that are kept on all replicas together.
    "micro-batch dropped": Scenario(
        [*_PAIRS[:2], _PAIRS[2], _SECOND_INF, *_PAIRS[4:6], _FIRST_INF, _SECOND_NAN, *_PAIRS[:2]],
        (10, 14),
        window=Window(2, "micro_batch"),
        rtol=2e-6,
    ),
    "saturation": Scenario(
        [_PAIRS[0], _pair(1, kernel=np.float32([0, 0, 64])), _PAIRS[2], _pair(3, kernel=np.float32([0, 0, 31]))],
        (12, 14),
        limit=65536,
    ),
}
