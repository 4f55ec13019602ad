"""Runs go on exactly that an earlier tfmp saved; tests/contract stops every host."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import earlier_runs
import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, skip_before

_RECORDINGS = Path(__file__).parent.parent / "recordings" / "earlier"


def _recorded(name: str) -> tuple[list[Any], Path]:
    folder = _RECORDINGS / name
    return json.loads((folder / "expected.json").read_text()), folder / earlier_runs.RUNS[name][1]


def _assert_same(reached: list[Any], expected: list[Any]) -> None:
    # The order of sums differs between machines.
    assert len(reached) == len(expected)
    for own, recorded in zip(reached, expected, strict=True):
        if isinstance(recorded, dict):
            assert own == recorded
        elif isinstance(recorded, list) and isinstance(recorded[0], str):
            assert own[0] == recorded[0]
            np.testing.assert_allclose(own[1], recorded[1], rtol=1e-4, atol=1e-7)
        else:
            np.testing.assert_allclose(own, recorded, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("form", ["", "_checkpoint", "_weights"])
@for_every_keras()
def test_model_of_keras_goes_on_in_the_middle_of_its_window(keras: ModuleType, form: str) -> None:
    skip_before((3, 15), keras, "the file holds layers of Keras 3.15")
    expected, path = _recorded(f"keras{keras.__version__[0]}{form}")
    _assert_same(earlier_runs.of_keras(keras, path, saves=False), expected)


@pytest.mark.parametrize(("name", "run"), [("session", earlier_runs.of_session), ("scaler", earlier_runs.of_scaler)])
def test_checkpoint_goes_on_in_the_middle_of_its_window(name: str, run: Callable[..., list[Any]]) -> None:
    if name == "scaler" and not tf.compat.v1.executing_eagerly_outside_functions():
        pytest.skip("trains eagerly")
    expected, path = _recorded(name)
    _assert_same(run(path, saves=False), expected)
