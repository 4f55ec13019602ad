"""A package has the names that its stub lists, and imports each on its first use."""

import sys
from pathlib import Path

import pytest

from tfmp.lazy import names_of_stub


@pytest.fixture
def boat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "boat"
    (package / "deck").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__init__.pyi").write_text(
        "from boat import deck as deck\nfrom boat.deck.mast import sail as sail\n\n__version__: str\n"
    )
    (package / "deck" / "__init__.py").write_text("")
    (package / "deck" / "mast.py").write_text("sail = 'white'\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("boat", "boat.deck", "boat.deck.mast"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(package / "__init__.py")


def test_names_are_imported_on_their_first_use(boat: str) -> None:
    getter, directory, public = names_of_stub("boat", boat)
    assert (directory(), public) == (["deck", "sail"], ["sail"])
    assert "boat.deck" not in sys.modules
    assert getter("deck") is sys.modules["boat.deck"]
    assert "boat.deck.mast" not in sys.modules
    assert getter("sail") == "white"


def test_other_names_are_attribute_errors(boat: str) -> None:
    getter, _, _ = names_of_stub("boat", boat)
    with pytest.raises(AttributeError, match="module 'boat' has no attribute 'keel'"):
        getter("keel")
