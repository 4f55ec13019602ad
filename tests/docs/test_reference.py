"""The reference has every public name, once."""

import importlib
import re
from pathlib import Path

import pytest

_PAGES = Path(__file__).parents[2] / "docs" / "reference" / "api"


#: The names of packages that a page documents elsewhere.
_ELSEWHERE = {"tfmp": {"__version__"}, "tfmp.grad_scaler": {"GradScaler"}}


_PACKAGES = ("bert", "bert.google", "checkpoints", "grad_scaler", "mixed_precision", "npu", "ranges")


@pytest.mark.parametrize("package", ["tfmp", *(f"tfmp.{name}" for name in _PACKAGES)])
def test_every_public_name_is_on_one_page(package: str) -> None:
    named = re.findall(r"(?m)^::: (\S+)$", "\n".join(page.read_text() for page in _PAGES.glob("*.md")))
    of_module = [name.rpartition(".")[2] for name in named if name.rpartition(".")[0] == package]
    public = set(importlib.import_module(package).__all__) - _ELSEWHERE.get(package, set())
    # What stands beside them are modules that a page opens with.
    assert sorted(set(of_module) - {"bert", "npu"}) == sorted(public)
    assert len(of_module) == len(set(of_module))
