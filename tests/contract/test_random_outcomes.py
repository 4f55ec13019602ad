"""Random steps under random settings: a skipped step changes nothing, an applied step changes the same as unwrapped."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kerases import installed
from kit import checks
from kit.hosts import Host, V1Graph
from kit.keras_hosts import KerasLoop, compiled
from kit.oracle import Rule, course
from kit.structures import Fed, Structure

#: The number of random settings, for each of which a host is built; the number of sequences of steps that each
#: host takes; and the largest number of steps in a sequence.
_SETTINGS = 8
_SEQUENCES = 6
_STEPS = 8

_TWO_VARIABLES = Structure(
    {"first": np.float32([1, 2]), "second": np.float32([3])},
    {"first": tf.TensorSpec([2]), "second": tf.TensorSpec([1])},
    # The reversal keeps TensorFlow's graph optimizer from cancelling the scale, as in `structures`.
    lambda variables, fed: tf.add_n(
        [tf.reduce_sum(tf.reverse(variables[name], [0]) * tf.reverse(fed[name], [0])) for name in fed]
    ),
    {"momentum": 0.5},
)

_FINITE = [-1.0, -0.25, 0.0, 0.5, 2.0]
_VALUES = st.sampled_from([*_FINITE, *_FINITE, 2.0**100, math.inf, -math.inf, math.nan])
_FEDS = st.builds(
    lambda first, second: {"first": np.float32([0.5, first]), "second": np.float32([second])}, _VALUES, _VALUES
)
_SEQUENCES_OF_STEPS = st.lists(st.lists(_FEDS, max_size=_STEPS), min_size=_SEQUENCES, max_size=_SEQUENCES)
# Scales are powers of two, with which scaling is exact.
_RULES = st.builds(
    Rule,
    st.integers(-10, 40).map(lambda exponent: 2.0**exponent),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([2.0, 4.0]),
    st.sampled_from([0.5, 0.25]),
    st.sampled_from([2.0**-10, 2.0**-12]),
    st.sampled_from([None, 2.0**40, 2.0**41]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.25, 0.5]),
)


def _makers() -> dict[str, Callable[..., Host]]:
    makers: dict[str, Callable[..., Host]] = {"v1 graph": V1Graph}
    if tf.compat.v1.executing_eagerly_outside_functions():
        makers |= {name: partial(KerasLoop, keras, compiled=compiled) for name, keras in installed().items()}
    return makers


_MAKERS = _makers()


@cache
def _plain(name: str) -> Host:
    return _MAKERS[name](_TWO_VARIABLES, None)


@pytest.mark.promise(1, 2, 5)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.graph] if name == "v1 graph" else []) for name in _MAKERS]
)
# The health checks are suppressed because building a host takes a second and sequences have many values.
@settings(
    max_examples=_SETTINGS,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(rule=_RULES, sequences=_SEQUENCES_OF_STEPS)
def test_random_outcomes_under_random_settings(name: str, rule: Rule, sequences: Sequence[Sequence[Fed]]) -> None:
    host = _MAKERS[name](_TWO_VARIABLES, rule)
    for feds in sequences:
        steps = [[fed] for fed in feds]
        expected = course(_TWO_VARIABLES, steps, rule)
        assert checks.violations(expected, checks.train(host, steps), _plain(name)) == []
