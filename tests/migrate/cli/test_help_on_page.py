"""The page docs/reference/commands.md has the help text of the command."""

from pathlib import Path

import pytest

from tfmp.migrate.cli import command

_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "commands.md"


def test_page_has_the_help_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", ["__main__.py"])
    with pytest.raises(SystemExit):
        command.main(["--help"])
    help_text = capsys.readouterr().out
    assert help_text.startswith("usage: python -m tfmp.migrate")
    assert help_text in _PAGE.read_text()
