"""The replay of recorded norms through rules that detect spikes."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from benchmarks import spike_rules

_TFMP = list(spike_rules.RULES.values())[-1]


@pytest.mark.parametrize("window", [64, 128])
def test_rule_of_tfmp_is_that_of_its_detector(window: int) -> None:
    norms = spike_rules.recordings()["digits_sgd_high"][0][:400].copy()
    norms[::40] *= 300
    norms[300:] *= 1000
    detector = tfmp.SpikeDetector(window)
    stored = detector.state_of(0)

    @tf.function
    def is_skipped(norm: tf.Tensor) -> tf.Tensor:
        state = stored.read()
        is_above = norm > detector.bound(state)
        skipped = detector.is_skipped(state, is_above)
        stored.assign(detector.next_state(state, norm, tf.constant(True), is_above, skipped))
        return skipped

    found = [bool(is_skipped(tf.constant(norm, tf.float64))) for norm in norms]
    assert found == spike_rules.alarms(norms[:, np.newaxis], _TFMP, window)[:, 0].tolist()
    assert sum(found[:300]) > 2
    # The lasting change is found, and accepted.
    assert 10 <= sum(found[300:]) < 50


def test_every_rule_replays_every_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert spike_rules.main(["--steps", "300", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert [figure["rule"] for figure in figures] == [name for name in spike_rules.RULES for _ in range(2)]
    for figure in figures:
        assert figure["trainings"].keys() == spike_rules.recordings().keys()
        assert all(found["steps"] > 0 for found in figure["trainings"].values())
    assert "BERT and GAN: 12 runs, 2064 counted steps" in capsys.readouterr().out


def test_spikes_that_enter_the_window_hide_others_from_means_only() -> None:
    norms = np.random.default_rng(0).lognormal(0, 0.2, [600, 1])
    norms[9::10] *= 10
    late = {name: spike_rules.alarms(norms, rule, 128)[128:].sum() for name, rule in spike_rules.RULES.items()}
    assert list(late.values()) == [0, 0, 0, 48]
