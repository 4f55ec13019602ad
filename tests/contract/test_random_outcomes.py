"""Random steps under random settings: a skipped step changes nothing, an applied step changes the same as unwrapped."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kit import checks
from kit.hosts import Host
from kit.installed import Make, hosts, rows
from kit.oracle import Rule, Spikes, Window
from kit.strategies import FEDS, RULES, SPIKES, WINDOWS
from kit.structures import Fed, Structure
from scenarios import Scenario

#: The number of random settings, for each of which a host is built, and the largest number of its steps.
_SETTINGS = 8
_STEPS = 16

TWO_VARIABLES = Structure(
    {"first": np.float32([1, 2]), "second": np.float32([3])},
    {"first": tf.TensorSpec([2]), "second": tf.TensorSpec([1])},
    # The reversal keeps TensorFlow's graph optimizer from cancelling the scale, as in `kit.structures`.
    lambda variables, fed: tf.add_n(
        [tf.reduce_sum(tf.reverse(variables[name], [0]) * tf.reverse(fed[name], [0])) for name in fed]
    ),
    {"momentum": 0.5},
)

_HOSTS = hosts()
_STEPPED = [
    name
    for name in _HOSTS
    if name.startswith(("v1 graph", "v1 eager", "GradScaler"))
    or (name.endswith((" function", "compiled update")) and name != "v1 function")
]


@cache
def _plain(make: Make) -> Host:
    return make(TWO_VARIABLES, None)


@pytest.mark.promise(1, 2, 3, 4, 5, 6, 7, 8, 10, 11)
@pytest.mark.parametrize("name", rows(_STEPPED))
# The health checks are suppressed because building a host takes a second and sequences have many values. To look for
# the simplest of failing steps would take minutes.
@settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=_SETTINGS,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(rule=RULES, window=WINDOWS, spikes=SPIKES, feds=st.lists(FEDS, max_size=_STEPS))
def test_random_outcomes_under_random_settings(
    name: str, rule: Rule, window: Window | None, spikes: Spikes | None, feds: Sequence[Fed]
) -> None:
    # The mean of three micro-batches rounds.
    rtol = 0 if window is None else 2e-6
    scenario = Scenario(feds, (), rule, window, spikes, rtol=rtol, structure=TWO_VARIABLES)
    make, make_plain = _HOSTS[name]
    states = checks.train(make(TWO_VARIABLES, rule, scenario.settings), scenario.steps())
    assert checks.violations(scenario.course(), states, _plain(make_plain), rtol=scenario.rtol) == []
