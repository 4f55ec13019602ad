"""Every scenario in every host, compared with the oracle and with the same optimizer without tfmp."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kit import checks
from kit.hosts import Host, V1Graph
from kit.installed import Make, hosts, replicated_hosts, rows
from kit.keras_hosts import compiled
from kit.oracle import Rule, Spikes, Window
from kit.strategies import FEDS, RULES, SPIKES, WINDOWS
from kit.structures import Fed, Structure
from scenarios import REPLICATED, RESUMED, SCENARIOS, STRUCTURE, Scenario

import tfmp

# Keras 3 warns about the variable that the loss does not depend on.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")

_HOSTS = hosts()
_REPLICATED = replicated_hosts()


def _cases() -> list[Any]:
    return [
        pytest.param(*host.values, name, marks=[*host.marks, pytest.mark.promise(*scenario.promises)])
        for name, scenario in SCENARIOS.items()
        for host in rows(_HOSTS)
        if scenario.by_xla or not host.values[0].endswith("XLA")
        if not (scenario.clips and "clip" in _lacks(host.values[0]))
    ]


def _lacks(name: str) -> frozenset[str]:
    make = _HOSTS[name].make
    return getattr(make, "func", make).lacks


@cache
def _plain(make: Make, clips: bool) -> Host:
    return make(STRUCTURE, None, Scenario([], (), clips=clips).plain_settings)


@pytest.mark.parametrize(("name", "scenario_name"), _cases())
def test_host_does_what_the_oracle_says(name: str, scenario_name: str) -> None:
    scenario = SCENARIOS[scenario_name]
    make, make_plain = _HOSTS[name]
    states = checks.train(make(STRUCTURE, scenario.rule, scenario.settings), scenario.steps())
    assert checks.violations(scenario.course(), states, _plain(make_plain, scenario.clips), rtol=scenario.rtol) == []


def _replicated_cases() -> list[Any]:
    return [
        pytest.param(*host.values, name, marks=host.marks)
        for name, scenario in REPLICATED.items()
        for host in rows(_REPLICATED)
        if scenario.runs_on(host.values[0])
    ]


@pytest.mark.promise(8, 9, 10, 11, 12, 14)
@pytest.mark.parametrize(("name", "scenario_name"), _replicated_cases())
def test_replicas_do_together_what_the_oracle_says(
    name: str, scenario_name: str, strategy: tf.distribute.MirroredStrategy
) -> None:
    scenario = REPLICATED[scenario_name]
    make, make_plain = _REPLICATED[name]
    states = checks.train(make(STRUCTURE, scenario.rule, scenario.settings, strategy=strategy), scenario.steps())
    # What each replica clips, one device cannot take as one step.
    plain = None if scenario.clips else _plain(make_plain, clips=False)
    assert checks.violations(scenario.course(), states, plain, rtol=scenario.rtol) == []


@pytest.mark.promise(15)
@pytest.mark.parametrize("name", [name for name in rows(_HOSTS) if not name.values[0].endswith("XLA")])
def test_training_that_stops_anywhere_goes_on_in_every_bit(name: str, tmp_path: Path) -> None:
    make, steps = _HOSTS[name].make, RESUMED.steps()
    # In the first window, at the end of an epoch, in a window with a spike, and right after it. Each part is one call
    # of `fit`, at whose end Keras overwrites weights by their averages.
    parts = [steps[start:end] for start, end in itertools.pairwise([0, 3, 6, 15, 16, None])]
    whole = make(STRUCTURE, RESUMED.rule, RESUMED.settings)
    whole.begin()
    expected = []
    for number, part in enumerate(parts):
        expected.append([checks.saved(state) for state in whole.train(part)[1:]])
        whole.save(tmp_path / str(number))
    resumed = make(STRUCTURE, RESUMED.rule, RESUMED.settings)
    for number in range(len(parts) - 1):
        # A new host, then one that has trained on.
        resumed.restore(tmp_path / str(number))
        for part, states in zip(parts[number + 1 :], expected[number + 1 :], strict=True):
            assert [checks.saved(state) for state in resumed.train(part)[1:]] == states


def _log_max() -> dict[str, Any]:
    return {"loss_scale_manager": tfmp.LogMaxLossScaleManager(init_loss_scale=2**20)}


#: The largest magnitudes of the steps, and the scales after them. After 4 the scale is the largest power of two whose
#: product with 4 is at most 65504. The NaN halves it and leaves a margin of 1. After the last step log2 of the
#: magnitudes has been 2 and 0, with a mean of 1 and a deviation of 2, and the exponent of
#: 2**(15.99... - 1 - 3 * 2 - 1) is rounded down.
_MAGNITUDES = {math.inf: 2.0**19, -4.0: 2.0**13, math.nan: 2.0**12, 1.0: 2.0**7}


def _small(value: float = 0.25) -> Any:
    return {
        "kernel": np.float32([0.25, value, 0]),
        "indices": np.int32([1, 1]),
        "rows": np.float32([[0.25, 0], [0.25, 0.125]]),
    }


@pytest.mark.promise(13)
@pytest.mark.parametrize("name", rows(_HOSTS))
def test_manager_that_asks_for_it_gets_the_largest_magnitude(name: str) -> None:
    states = checks.train(_HOSTS[name].make(STRUCTURE, Rule(), _log_max), [[_small(value)] for value in _MAGNITUDES])
    assert [state.told["loss_scale"] for state in states] == [2.0**20, *_MAGNITUDES.values()]


@pytest.mark.promise(13, 14)
@pytest.mark.parametrize("name", rows(_REPLICATED))
def test_manager_gets_the_largest_magnitude_of_all_replicas(
    name: str, strategy: tf.distribute.MirroredStrategy
) -> None:
    host = _REPLICATED[name].make(STRUCTURE, Rule(), _log_max, strategy=strategy)
    # Keras 2 sums the gradients first.
    states = checks.train(host, [[_small(0), _small(value)] for value in _MAGNITUDES])
    assert [state.told["loss_scale"] for state in states] == [2.0**20, *_MAGNITUDES.values()]


@pytest.mark.promise(17)
@pytest.mark.parametrize("name", [name for name in _HOSTS if name.endswith(" function")])
def test_function_is_traced_once_whatever_becomes_of_its_steps(name: str) -> None:
    traces = []

    def counted(step: Callable[..., Any], signature: Any) -> Callable[..., Any]:
        def traced(*args: Any) -> Any:
            traces.append(1)
            return step(*args)

        return compiled(traced, signature)

    host = _HOSTS[name].make(STRUCTURE, RESUMED.rule, RESUMED.settings, compiled=counted)
    host.begin()
    host.train(RESUMED.steps()[:1])
    # Where the first call makes variables, TensorFlow traces twice.
    at_first = len(traces)
    host.train(RESUMED.steps()[1:])
    assert at_first in {1, 2}
    assert len(traces) == at_first


@pytest.mark.promise(17)
@pytest.mark.graph
def test_graph_is_not_changed_by_its_steps() -> None:
    host = V1Graph(STRUCTURE, RESUMED.rule, RESUMED.settings)
    host.graph.finalize()
    states = checks.train(host, RESUMED.steps())
    assert [state.steps for state in states] == [each.applied for each in RESUMED.course().expected]


_TWO_VARIABLES = Structure(
    {"first": np.float32([1, 2]), "second": np.float32([3])},
    {"first": tf.TensorSpec([2]), "second": tf.TensorSpec([1])},
    # The reversal keeps TensorFlow's graph optimizer from cancelling the scale, as in `kit.structures`.
    lambda variables, fed: tf.add_n(
        [tf.reduce_sum(tf.reverse(variables[name], [0]) * tf.reverse(fed[name], [0])) for name in fed]
    ),
    {"momentum": 0.5},
)

_STEPPED = [
    name
    for name in _HOSTS
    if name.startswith(("v1 graph", "v1 eager", "GradScaler"))
    or (name.endswith((" function", "compiled update")) and name != "v1 function")
]


@cache
def _plain_of_two(make: Make) -> Host:
    return make(_TWO_VARIABLES, None)


@pytest.mark.promise(1, 2, 3, 4, 5, 6, 7, 8, 10, 11)
@pytest.mark.parametrize("name", rows(_STEPPED))
# The health checks are suppressed because building a host takes a second and sequences have many values. To look for
# the simplest of failing steps would take minutes.
@settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(rule=RULES, window=WINDOWS, spikes=SPIKES, feds=st.lists(FEDS, max_size=16))
def test_random_outcomes_under_random_settings(
    name: str, rule: Rule, window: Window | None, spikes: Spikes | None, feds: Sequence[Fed]
) -> None:
    # The mean of three micro-batches rounds.
    rtol = 0 if window is None else 2e-6
    scenario = Scenario(feds, (), rule, window, spikes, rtol=rtol, structure=_TWO_VARIABLES)
    make, make_plain = _HOSTS[name]
    states = checks.train(make(_TWO_VARIABLES, rule, scenario.settings), scenario.steps())
    assert checks.violations(scenario.course(), states, _plain_of_two(make_plain), rtol=scenario.rtol) == []
