"""The benchmark of first uses, each called in few processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import start_cost
from benchmarks.harness import first_uses, keras_contenders


@pytest.mark.skipif(keras_contenders.KERAS != "Keras 3", reason="is for Keras 3")
def test_each_call_of_a_use_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    options = ["--uses", "import", "construction", "--repetitions", "1", "--json", str(path)]
    assert start_cost.main(options) == 0
    figures = json.loads(path.read_text())["figures"]
    assert {use: list(of_use) for use, of_use in figures.items()} == {
        "import": ["tfmp"],
        "construction": ["bare", "Keras", "tfmp"],
    }
    assert [len(calls) for calls in figures["construction"]["tfmp"]] == [2]
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["", "import, call 1", "construction, call 1", "construction, call 2"]


@pytest.mark.skipif(keras_contenders.KERAS != "Keras 3", reason="is for Keras 3")
@pytest.mark.parametrize("use", first_uses.USES)
@pytest.mark.parametrize("contender", first_uses.CONTENDERS)
def test_each_use_can_be_called_repeatedly(use: str, contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers, weights, models = (_noted(monkeypatch, name) for name in ("_optimizer", "_weights", "_model"))
    prepare, calls = first_uses.USES[use]
    action = prepare(contender)
    for _ in range(calls):
        action()
    if "construction" in use:
        assert len(optimizers) == calls
    elif "step" in use:
        ((kernel, _),) = weights
        # Each step of Adam moves the values by about the learning rate.
        np.testing.assert_allclose(kernel.numpy(), 1 - 1e-3 * calls, rtol=1e-5)
    elif "fit" in use:
        (optimizer,) = optimizers
        assert int(getattr(optimizer, "inner_optimizer", optimizer).iterations) == 4 * calls
    elif use == "set_precision":
        expected = "float32" if contender == "bare" else "float16"
        assert [model.layers[0].compute_dtype for model in models] == [expected] * calls
    else:
        assert use == "import"


def _noted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Return a list that will have what a function of the module returns in the test."""
    make, made = getattr(first_uses, name), []

    def noting(*args: Any) -> Any:
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(first_uses, name, noting)
    return made


def test_tfmp_is_not_imported_before_its_import_is_measured() -> None:
    # The processes that measure import the module of the benchmark again.
    code = "import sys, benchmarks.start_cost; sys.exit('tfmp' in sys.modules)"
    root = Path(start_cost.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
