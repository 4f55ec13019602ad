"""The benchmark of the device, on small matrices; the test does not look at its times."""

import json
from pathlib import Path

import pytest
import tensorflow as tf

from benchmarks import chip_limits


def test_products_and_a_copy_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert chip_limits.main(["--rows", "16", "--bytes", "4096", "--rounds", "3", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert (figures["device"], list(figures["products"])) == ("CPU:0", ["float32", "bfloat16", "float16"])
    for each in [*figures["products"].values(), figures["copy"]]:
        assert each["seconds"] > 0
    product = figures["products"]["float16"]
    assert product["per_second"] * product["seconds"] == pytest.approx(2 * 16**3)
    printed = capsys.readouterr().out
    assert "On CPU:0, products of matrices of 16 rows:" in printed
    assert "A copy of 0 MiB reads and writes" in printed


@pytest.mark.parametrize("enabled", [False, True])
def test_rounding_of_products_is_as_before_afterwards(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = tf.config.experimental, []
    monkeypatch.setattr(config, "tensor_float_32_execution_enabled", lambda: enabled)
    monkeypatch.setattr(config, "enable_tensor_float_32_execution", seen.append)
    assert len(chip_limits.products(4, 1, rounded=True)) == 4
    assert seen == [False, enabled, True, enabled, False, enabled, False, enabled]
