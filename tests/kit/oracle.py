"""Says in NumPy what each step must do: what is applied, the loss scale, the counts, the norm, what overflowed.

The rules are those of docs/explanation/step.md. Weights and slots are not computed here: they are those of the same
optimizer without tfmp, which takes the steps of `Course.applied`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kit.structures import Fed, Structure

#: For each step or micro-batch, the values that each replica is fed.
Steps = Sequence[Sequence[Fed]]


class Rule(NamedTuple):
    """The settings of an exponential manager, by the names of its arguments."""

    init_loss_scale: float = 1024.0
    incr_every_n_steps: int = 3
    decr_every_n_nan_or_inf: int = 1
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    min_loss_scale: float = 1.0
    max_loss_scale: float | None = None
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    tolerance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Window:
    """The settings of accumulation, by the names of the wrapper's arguments."""

    accumulation_steps: int = 1
    overflow_drops: str = "window"
    micro_batches_per_epoch: int | None = None


@dataclasses.dataclass(frozen=True)
class Spikes:
    """The settings of a spike detector, by the names of its arguments."""

    window: int | None = None
    deviations: float = 4.0
    min_factor: float = 3.0
    max_norm: float = math.inf
    max_consecutive_skips: int = 10


class Expected(NamedTuple):
    """What is known after a step or a micro-batch.

    Attributes:
        applied: The number of applied steps.
        skipped: The number of skipped steps.
        in_a_row: The number of skipped steps in a row until now.
        last_finite: Whether the gradients of the last step were finite, in every micro-batch of its window.
        last_applied: Whether the last step was applied.
        spikes: The number of steps that were skipped as spikes.
        loss_scale: The loss scale.
        norm: The norm of the gradients of the last step; infinite if they overflowed, NaN before the first step.
        overflowed: For each variable, the number of steps on which its gradient overflowed; empty if not known.
    """

    applied: int = 0
    skipped: int = 0
    in_a_row: int = 0
    last_finite: bool = True
    last_applied: bool = True
    spikes: int = 0
    loss_scale: float = 1.0
    norm: float = math.nan
    overflowed: Mapping[str, int] = {}


class Course(NamedTuple):
    """What a training must do.

    Attributes:
        expected: What is known before the first call, and after each call.
        applied: For each applied step, what one device is fed whose optimizer takes the same step without tfmp.
    """

    expected: list[Expected]
    applied: list[Fed]


def scales(skipped: Iterable[bool], rule: Rule) -> list[float]:
    """Return the scale before the first step, and the scale after each step."""
    forgiving = 1 - rule.hysteresis
    scale, good, bad, steps = rule.init_loss_scale, 0, forgiving, 0
    seen = [scale]
    for each in skipped:
        steps += 1
        good = 0 if each else good + 1
        if each:
            bad += 1
        elif rule.consecutive_hysteresis:
            bad = forgiving
        if each and bad >= rule.decr_every_n_nan_or_inf and bad / steps >= rule.tolerance:
            scale, good, bad, steps = max(rule.min_loss_scale, scale * rule.decr_ratio), 0, 0, 0
        elif not each and good >= rule.incr_every_n_steps:
            scale, good, bad, steps = min(rule.max_loss_scale or math.inf, scale * rule.incr_ratio), 0, forgiving, 0
        seen.append(scale)
    return seen


def spikes(norms: Iterable[float], rule: Spikes) -> list[bool]:
    """Return for each step whether it is skipped as a spike."""
    before: list[float] = []
    in_a_row = 0
    found = []
    for norm in norms:
        is_above = math.isfinite(norm) and norm > _bound(before, rule)
        found.append(is_above and in_a_row < rule.max_consecutive_skips)
        if math.isfinite(norm):
            in_a_row = min(in_a_row + 1, rule.max_consecutive_skips) if is_above else 0
            before += [norm] * (norm > 0 and not found[-1])
    return found


def _bound(norms: Sequence[float], rule: Spikes) -> float:
    if rule.window is None or len(norms) < rule.window:
        return rule.max_norm
    logarithms = np.log(norms[-rule.window :])
    median = np.median(logarithms)
    deviation = 1.4826 * np.median(np.abs(logarithms - median))
    return min(rule.max_norm, math.exp(median + max(rule.deviations * deviation, math.log(rule.min_factor))))


def course(
    structure: Structure,
    steps: Steps,
    rule: Rule,
    window: Window = Window(),
    detector: Spikes | None = None,
    *,
    limit: float = math.inf,
    skipped: Sequence[int] | None = None,
) -> Course:
    """Return what a training must do, of which each step is a micro-batch if there is accumulation.

    From the magnitude `limit`, a scaled gradient counts as an overflow. By default those steps overflow whose gradients
    are not finite in float32 when they are scaled; with `skipped`, norms and what overflowed are unknown.
    """
    counts = {} if skipped is not None else dict.fromkeys(structure.initial, 0)
    known = [Expected(loss_scale=rule.init_loss_scale, overflowed=counts)]
    applied: list[Fed] = []
    overflows: list[bool] = []
    norms: list[float] = []
    held: list[Sequence[Fed]] = []
    in_epoch = 0
    for feds in steps:
        held, in_epoch = [*held, feds], in_epoch + 1
        if len(held) < window.accumulation_steps and in_epoch != window.micro_batches_per_epoch:
            known.append(known[-1])
            continue
        before = known[-1]
        found = [(fed, _overflowed(structure, fed, before.loss_scale, limit)) for feds in held for fed in feds]
        if skipped is not None:
            found = [(fed, {"any"} if len(overflows) in skipped else set()) for fed, _ in found]
        kept = [fed for fed, names in found if not names]
        overflowed = set().union(*(names for _, names in found))
        finite = bool(kept) and not (overflowed and window.overflow_drops == "window")
        means = [combined(structure, kept, len(feds) / len(kept))] if finite else []
        overflows.append(bool(overflowed))
        norms.append(math.inf if not finite else norm_of(structure, means[0]) if skipped is None else math.nan)
        is_spike = detector is not None and spikes(norms, detector)[-1]
        takes = finite and not is_spike
        applied += means * takes
        known.append(
            Expected(
                before.applied + takes,
                before.skipped + (not takes),
                0 if takes else before.in_a_row + 1,
                not overflowed,
                takes,
                before.spikes + is_spike,
                scales(overflows, rule)[-1],
                norms[-1],
                {name: count + (name in overflowed) for name, count in before.overflowed.items()},
            )
        )
        held, in_epoch = [], 0 if in_epoch == window.micro_batches_per_epoch else in_epoch
    return Course(known, applied)


def combined(structure: Structure, feds: Sequence[Fed], factor: float = 1) -> Fed:
    """Return what gives one device a factor times the sum of several gradients."""
    if len(feds) == 1 and factor == 1:
        return feds[0]
    rows, indices = (
        (set(names) for names in zip(*structure.sparse.values(), strict=True)) if structure.sparse else ((), ())
    )
    with np.errstate(over="ignore", invalid="ignore"):
        total = {
            name: np.concatenate(values) if name in {*rows, *indices} else np.sum(values, axis=0)
            for name in feds[0]
            if (values := [fed[name] for fed in feds])
        }
        return {name: value if name in indices else np.float32(factor) * value for name, value in total.items()}


def norm_of(structure: Structure, fed: Fed) -> float:
    """Return the norm of the gradients in float64; rows of a sparse gradient with the same index are added."""
    squares = 0.0
    for name, (values, indices) in structure.gradients(fed).items():
        dense = np.zeros(structure.initial[name].shape)
        np.add.at(dense, ... if indices is None else indices, np.float64(values))
        squares += float(np.sum(dense**2))
    return math.sqrt(squares)


def _overflowed(structure: Structure, fed: Fed, scale: float, limit: float) -> set[str]:
    """Return the variables whose scaled gradient is not finite in float32, or reaches the limit."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = {name: np.abs(np.float32(scale) * values) for name, (values, _) in structure.gradients(fed).items()}
    return {name for name, values in scaled.items() if not (np.isfinite(values) & (values < limit)).all()}
