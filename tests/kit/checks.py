"""Compares what a host did with what the oracle says, and its weights and slots with those of the bare optimizer."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from kit.hosts import Host, State
from kit.oracle import Course, Steps


def train(host: Host, steps: Steps) -> list[State]:
    """Train from the start, and return the state before the first step and the state after each step."""
    host.begin()
    return host.train(steps)


def violations(course: Course, states: Sequence[State], plain: Host | None, *, rtol: float = 0) -> list[str]:
    """Return sentences that describe the violated expectations; an empty list if there are none.

    `plain` is the host of the same optimizer without tfmp, which takes the applied steps; None if one device cannot.
    """
    plain_states = [] if plain is None else train(plain, [[fed] for fed in course.applied])
    if len(states) != len(course.expected):
        return [f"{len(states) - 1} steps of {len(course.expected) - 1} were taken"]
    found = []
    for step, (before, after) in enumerate(pairwise(states)):
        then, expected = course.expected[step : step + 2]
        if then.applied == expected.applied and not _same(before.moving, after.moving):
            found.append(f"step {step} must be skipped, and something moved")
        if plain is not None and not _same_on_replicas(after.moving, plain_states[expected.applied].moving, rtol):
            found.append(f"after step {step} weights or slots are not those without a wrapper")
        if after.steps != expected.applied:
            found.append(f"after step {step} the count of steps is {after.steps}, not {expected.applied}")
        found += [
            f"after step {step} {name} is {told}, not {wanted}"
            for name, told in after.told.items()
            if not _told_right(name, told, states[0].told.get(name), wanted := getattr(expected, name))
        ]
    scale = states[0].told.get("loss_scale")
    if scale is not None and scale != course.expected[0].loss_scale:
        found.append(f"the scale before the first step is {scale}")
    return found


def saved(state: State) -> Any:
    """Return what a checkpoint holds of a state. In graphs the counts start at 0 in each session."""
    return [value.tolist() for value in state.moving], state.steps, float(state.told["loss_scale"])


def description(states: Sequence[State]) -> str:
    """Return a description of which steps were applied or skipped, and of the changes of the scale."""
    phrases = []
    for applied, group in groupby(pairwise(states), lambda pair: pair[1].steps > pair[0].steps):
        pairs = list(group)
        before, after = (pairs[place][place].told.get("loss_scale", 1.0) for place in (0, -1))
        times = f" {len(pairs)}" if len(pairs) > 1 else ""
        scale = f", scale {before:g} → {after:g}" if before != after else ""
        phrases.append(f"{'applied' if applied else 'skipped'}{times}{scale}")
    return "; ".join(phrases)


def _told_right(name: str, told: Any, at_first: Any, expected: Any) -> bool:
    if name == "overflowed":
        # These counts go on when a host begins anew.
        first: Mapping[str, int] = at_first or {}
        return all(each not in expected or count - first.get(each, 0) == expected[each] for each, count in told.items())
    if name == "norm":
        # Before the first step it may be that of an earlier training.
        return math.isnan(expected) or (
            not np.isfinite(told) if expected == math.inf else bool(np.isclose(told, expected))
        )
    return bool(told == expected)


def _same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """Return whether all values are equal bit for bit."""
    return len(first) == len(second) and all(
        np.array_equal(_bits(a), _bits(b)) for a, b in zip(first, second, strict=True)
    )


def _bits(value: np.ndarray) -> np.ndarray:
    return np.atleast_1d(value).view(np.uint8)


def _same_on_replicas(moving: Sequence[np.ndarray], plain: Sequence[np.ndarray], rtol: float) -> bool:
    """Return whether each replica has the values of the training on one device."""
    replicas, rest = divmod(len(moving), max(len(plain), 1))
    if rest or not replicas:
        return False
    # Not compared bit for bit: where a sum over replicas is 0, its sign may differ.
    repeated = [value for value in plain for _ in range(replicas)]
    return all(np.allclose(a, b, rtol, rtol, equal_nan=True) for a, b in zip(moving, repeated, strict=True))
