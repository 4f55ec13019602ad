"""The page on stability speaks of every public name, and knows the deprecated ones."""

import importlib
import re
from pathlib import Path

import pytest

from tfmp.moved_names import MOVED

_PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "stability.md").read_text()


@pytest.mark.parametrize(
    "package",
    ["tfmp", *(f"tfmp.{name}" for name in ("checkpoints", "grad_scaler", "mixed_precision", "optimizers", "ranges"))],
)
def test_every_public_name_is_stable_or_provisional(package: str) -> None:
    current = _PAGE.partition("## What is stable")[2].partition("## What is deprecated")[0]
    spoken_of = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", current)}
    assert set(importlib.import_module(package).__all__) - {"__version__"} - spoken_of == set()


def test_every_deprecated_name_is_listed_with_the_new_one() -> None:
    listed = dict(re.findall(r"(?m)^\| `tfmp\.(\w+)` \| `tfmp\.([\w.]+)` \|$", _PAGE))
    assert listed == {name: ".".join(new) for name, new in MOVED.items()}
