"""The table of docs/howto/levels.md says what the code does, and the code what Keras computes."""

from pathlib import Path

import pytest

from tools import level_table

_PAGE = Path(__file__).parents[2] / "docs" / "howto" / "levels.md"


def _rows_of_page() -> dict[str, tuple[str, ...]]:
    table = _PAGE.read_text().split("| layers | O1 | O2 | O3 |\n|---|---|---|---|\n")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {name: tuple(cells) for names, *cells in rows for name in names.split(", ")}


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_page_has_each_layer_of_keras(package: str) -> None:
    keras = pytest.importorskip(package)
    rows = level_table.rows(keras)
    assert len(rows) > 100
    page = _rows_of_page()
    assert {name: page.get(name) for name in rows} == rows


def test_page_has_the_table_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip("tf_keras")
    if not hasattr(keras.layers, "AdaptiveAveragePooling1D"):
        pytest.skip("the page is made with the newest Keras")
    assert level_table.main(["keras", "tf_keras"]) == 0
    assert capsys.readouterr().out in _PAGE.read_text()
