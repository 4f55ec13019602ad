"""Every scenario in every host, compared with the oracle and with the same optimizer without tfmp."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kit import checks
from kit.hosts import Host
from kit.installed import hosts, rows
from scenarios import SCENARIOS, STRUCTURE, Scenario

# Keras 3 warns about the variable that the loss does not depend on.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")

_HOSTS = hosts()


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
def _plain(name: str, clips: bool) -> Host:
    return _HOSTS[name].make_plain(STRUCTURE, None, Scenario([], (), clips=clips).plain_settings)


@pytest.mark.parametrize(("name", "scenario_name"), _cases())
def test_host_does_what_the_oracle_says(name: str, scenario_name: str) -> None:
    scenario = SCENARIOS[scenario_name]
    host = _HOSTS[name].make(STRUCTURE, scenario.rule, scenario.settings)
    states = checks.train(host, scenario.steps())
    assert checks.violations(scenario.course(), states, _plain(name, scenario.clips), rtol=scenario.rtol) == []


#: What is stopped: the micro-batches of a window, of which one is dropped, and the window of a spike detector.
_RESUMED = {name: SCENARIOS[name] for name in ("windows end with the epoch", "spikes")}


@pytest.mark.promise("resumes")
@pytest.mark.parametrize("scenario", _RESUMED.values(), ids=_RESUMED)
@pytest.mark.parametrize("name", [name for name in rows(_HOSTS) if not name.values[0].endswith("XLA")])
def test_training_that_stops_anywhere_goes_on_in_every_bit(name: str, scenario: Scenario, tmp_path: Path) -> None:
    make, steps = _HOSTS[name].make, scenario.steps()
    # In the first window, at the end of an epoch, and right after a step that was skipped. Each part is one call of
    # `fit`, at whose end Keras overwrites weights by their averages.
    parts = [steps[:3], steps[3:6], steps[6:8], steps[8:]]
    whole = make(STRUCTURE, scenario.rule, scenario.settings)
    whole.begin()
    expected = []
    for number, part in enumerate(parts):
        expected.append([_saved(state) for state in whole.train(part)[1:]])
        whole.save(tmp_path / str(number))
    for number in range(3):
        resumed = make(STRUCTURE, scenario.rule, scenario.settings)
        resumed.restore(tmp_path / str(number))
        for part, states in zip(parts[number + 1 :], expected[number + 1 :], strict=True):
            assert [_saved(state) for state in resumed.train(part)[1:]] == states


def _saved(state: Any) -> Any:
    """Return what a checkpoint holds of a state. In graphs the counts start at 0 in each session."""
    return [value.tolist() for value in state.moving], state.steps, float(state.told["loss_scale"])
