"""The benchmark of memory, at sizes that take seconds; the tests do not look at its times and bytes."""

import json
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

from benchmarks.memory import __main__ as memory
from benchmarks.memory import nets, training_process
from benchmarks.memory.training_process import WAYS, Case

pytestmark = pytest.mark.skipif(not keras.__version__.startswith("3."), reason="runs with Keras 3 only")


@pytest.fixture(autouse=True)
def _policy_of_before() -> Iterator[None]:
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def _trained(name: str, case: Case) -> training_process.Measured:
    return training_process.measure(*training_process.training(WAYS[name], case), case.steps)


def test_a_process_for_each_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "memory.json", tmp_path / "memory.png"
    chosen = ["--models", "convolutional", "--policies", "float32", "--modes", "graph", "--contenders"]
    chosen += ["Recompute", "keras.RematScope"]
    sizes = ["--size", "tiny", "--steps", "3", "--rounds", "2"]
    assert memory.main([*chosen, *sizes, "--json", str(path), "--plot", str(picture)]) == 0
    (figures,) = json.loads(path.read_text())["figures"]
    assert list(figures["results"]) == ["plain", "Recompute", "keras.RematScope"]
    # An error of a contender is a result.
    assert "keywords arguments only when eager" in figures["results"].pop("keras.RematScope")["error"]
    for result in figures["results"].values():
        assert result["difference"] <= 1e-6
        assert len(result["step_seconds"]) == 2
    printed = capsys.readouterr().out
    assert "Recompute (2 of 3): trained" in printed
    assert "keras.RematScope (3 of 3): ValueError" in printed
    assert "difference of weights" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", nets.NETS)
@pytest.mark.parametrize("name", ["Recompute", "both"])
def test_recomputation_changes_no_weights(model: str, name: str) -> None:
    case = Case(model, "float32", "eager", "tiny", 2)
    recomputed, expected = (_trained(each, case)["weights"] for each in (name, WAYS[name].base))
    for one, other in zip(recomputed, expected, strict=True):
        assert memory.difference(one, other) == 0
    assert memory.difference(*expected) > 0


@pytest.mark.parametrize("model", nets.NETS)
def test_recompute_grad_computes_something_else(model: str) -> None:
    case = Case(model, "float32", "graph", "tiny", 2)
    naive, expected = (_trained(name, case)["weights"] for name in ("tf.recompute_grad", "plain"))
    assert memory.difference(naive[0], expected[0]) == 0
    assert memory.difference(naive[1], expected[1]) > 1e-5


def test_weights_of_unequal_starts_are_refused() -> None:
    with pytest.raises(ArithmeticError, match="Recompute did not start from the same weights as plain"):
        memory._check_equal("Recompute", [np.zeros(2)], [np.ones(2)])
