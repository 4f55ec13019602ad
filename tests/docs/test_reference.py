"""The reference has every public name, once."""

import re
import types
from pathlib import Path

import pytest

import tfmp
import tfmp.bert
import tfmp.npu

_PAGES = Path(__file__).parents[2] / "docs" / "reference" / "api"


@pytest.mark.parametrize("module", [tfmp, tfmp.bert, tfmp.npu], ids=lambda module: module.__name__)
def test_every_public_name_is_on_one_page(module: types.ModuleType) -> None:
    named = re.findall(r"(?m)^::: (\S+)$", "\n".join(page.read_text() for page in _PAGES.glob("*.md")))
    of_module = [name.rpartition(".")[2] for name in named if name.rpartition(".")[0] == module.__name__]
    public = set(module.__all__) - {"__version__"}
    # What stands beside them are modules that a page opens with.
    assert sorted(set(of_module) - {"bert", "npu"}) == sorted(public)
    assert len(of_module) == len(set(of_module))
