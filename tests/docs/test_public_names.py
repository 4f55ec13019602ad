"""The pages of the reference and of stability speak of every public name."""

import importlib
import re
from pathlib import Path

import pytest

_REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
_STABILITY = (_REFERENCE / "stability.md").read_text()

#: The names of packages that a page of the reference documents elsewhere.
_ELSEWHERE = {"tfmp": {"__version__"}, "tfmp.grad_scaler": {"GradScaler"}}

_PACKAGES = ("bert", "bert.google", "checkpoints", "grad_scaler", "mixed_precision", "npu", "ranges")
_SETTLED = ("checkpoints", "grad_scaler", "mixed_precision", "optimizers", "ranges")


@pytest.mark.parametrize("package", ["tfmp", *(f"tfmp.{name}" for name in _PACKAGES)])
def test_every_public_name_is_on_one_page(package: str) -> None:
    text = "\n".join(page.read_text() for page in (_REFERENCE / "api").glob("*.md"))
    named = re.findall(r"(?m)^::: (\S+)$", text)
    of_module = [name.rpartition(".")[2] for name in named if name.rpartition(".")[0] == package]
    public = set(importlib.import_module(package).__all__) - _ELSEWHERE.get(package, set())
    # What stands beside them are modules that a page opens with.
    assert sorted(set(of_module) - {"bert", "npu"}) == sorted(public)
    assert len(of_module) == len(set(of_module))


@pytest.mark.parametrize("package", ["tfmp", *(f"tfmp.{name}" for name in _SETTLED)])
def test_every_public_name_is_stable_or_provisional(package: str) -> None:
    current = _STABILITY.partition("## What is stable")[2].partition("## What is never promised")[0]
    spoken_of = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", current)}
    assert set(importlib.import_module(package).__all__) - {"__version__"} - spoken_of == set()
