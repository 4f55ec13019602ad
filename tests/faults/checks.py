"""The checks of a training with a fault, which are the same for all front-ends."""

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
from faults import Fault, Rule, scales, sum_over_replicas
from front_ends import FrontEnd, State


def train(front_end: FrontEnd, fault: Fault) -> list[State]:
    """Train from the start, and return the state before the first step and the state after each step.

    Args:
        front_end: The front-end that trains.
        fault: The fault, which says what each step is fed.
    """
    front_end.begin()
    return front_end.train(fault.steps)


def train_without_wrapper(plain: FrontEnd, fault: Fault) -> list[State]:
    """Train on one device, only with the steps of a fault that must be applied, and return the states.

    Args:
        plain: A front-end whose optimizer has no wrapper.
        fault: The fault; its skipped steps are left out.
    """
    steps = [[sum_over_replicas(feds)] for step, feds in enumerate(fault.steps) if step not in fault.skipped]
    return train(plain, Fault(fault.structure, steps, []))


def violations(
    fault: Fault, states: Sequence[State], plain_states: Sequence[State], rule: Rule | None = None
) -> list[str]:
    """Return sentences that describe the violated expectations; an empty list if there are none.

    Args:
        fault: The fault.
        states: The states of the training.
        plain_states: The states of the training without a wrapper, which `train_without_wrapper` returned.
        rule: The settings of the manager; by default those of `Rule`.
    """
    if len(states) != len(fault.steps) + 1:
        return [f"{len(states) - 1} steps of {len(fault.steps)} were taken"]
    skipped = [step in fault.skipped for step in range(len(fault.steps))]
    found = []
    applied = 0
    in_a_row = 0
    for step, (before, after) in enumerate(pairwise(states)):
        if skipped[step] and not _same(before.moving, after.moving):
            found.append(f"step {step} must be skipped, and something moved")
        applied += not skipped[step]
        in_a_row = (in_a_row + 1) * skipped[step]
        if not _same_on_replicas(after.moving, plain_states[applied].moving):
            found.append(f"after step {step} weights or slots are not those without a wrapper")
        if after.steps != applied:
            found.append(f"after step {step} the count of steps is {after.steps}, not {applied}")
        expected = (applied, step + 1 - applied, in_a_row, not skipped[step])
        if after.outcomes != expected:
            found.append(f"after step {step} the outcomes are {after.outcomes}, not {expected}")
    seen, expected_scales = [state.loss_scale for state in states], scales(skipped, rule or Rule())
    if seen != expected_scales:
        found.append(f"the scales are {seen}, not {expected_scales}")
    return found


def description(states: Sequence[State]) -> str:
    """Return a description of which steps were applied or skipped, and of the changes of the scale.

    Args:
        states: The states of the training.
    """
    phrases = []
    for applied, group in groupby(pairwise(states), lambda pair: pair[1].outcomes[0] > pair[0].outcomes[0]):
        pairs = list(group)
        before, after = pairs[0][0].loss_scale, pairs[-1][1].loss_scale
        times = f" {len(pairs)}" if len(pairs) > 1 else ""
        scale = f", scale {before:g} → {after:g}" if before != after else ""
        phrases.append(f"{'applied' if applied else 'skipped'}{times}{scale}")
    return "; ".join(phrases)


def _same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    """Return whether all values are equal bit for bit."""
    return len(first) == len(second) and all(
        np.array_equal(_bits(a), _bits(b)) for a, b in zip(first, second, strict=True)
    )


def _bits(value: np.ndarray) -> np.ndarray:
    return np.atleast_1d(value).view(np.uint8)


def _same_on_replicas(moving: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> bool:
    """Return whether each replica has the values of the training on one device."""
    replicas, rest = divmod(len(moving), max(len(plain), 1))
    if rest or not replicas:
        return False
    # Not compared bit for bit: where a sum over replicas is 0, its sign may differ.
    repeated = [value for value in plain for _ in range(replicas)]
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(moving, repeated, strict=True))
