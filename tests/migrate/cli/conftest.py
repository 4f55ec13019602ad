"""Each test of the command runs in an empty directory."""

from pathlib import Path

import pytest

from tests.migrate.cli.scripts import Ran, Run
from tfmp.migrate.cli import command


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Ran:
        return Ran(command.main([*arguments]), *capsys.readouterr())

    return run
