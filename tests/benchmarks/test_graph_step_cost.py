"""The benchmark of steps in graph mode, on tiny weights."""

import json
from pathlib import Path

import pytest
import tensorflow as tf

from benchmarks import graph_step_cost

_CONTENDERS = {"copy", "read", "bare", "contrib's formula", "TF core", "tfmp"}


@pytest.mark.parametrize("mode", ["reference", "resource"])
def test_all_contenders_take_good_steps_and_skipped_ones(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    resource_variables = tf.compat.v1.resource_variables_enabled()
    assert graph_step_cost.main(["--shapes", "tiny", "--modes", mode, "--rounds", "2", "--json", str(path)]) == 0
    assert tf.compat.v1.resource_variables_enabled() == resource_variables
    figures = json.loads(path.read_text())["figures"]
    assert [(each["optimizer"], each["clipping"], each["dtype"], each["outcome"]) for each in figures] == [
        ("SGD", "unclipped", "float32", "good"),
        ("Adam", "unclipped", "float32", "good"),
        ("Adam", "clipped", "float32", "good"),
        ("Adam", "unclipped", "float16", "good"),
        ("Adam", "unclipped", "float32", "skipped"),
    ]
    for figure in figures:
        assert figure["steps_checked"]
        assert figure["turns"].keys() | figure["left_out"].keys() == _CONTENDERS
    assert capsys.readouterr().out.count("cost of wrapping:") == 4
