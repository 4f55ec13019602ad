"""What a release states in several files is the same in all of them."""

import re
from pathlib import Path

import tfmp

_ROOT = Path(__file__).parent.parent


def test_version_is_that_of_the_changelog_and_the_citation() -> None:
    newest = re.search(r"(?m)^## (\d\S*)$", (_ROOT / "docs" / "changelog.md").read_text())
    cited = re.search(r"(?m)^version: (\S+)$", (_ROOT / "CITATION.cff").read_text())
    assert newest is not None
    assert cited is not None
    shown = re.search(r"(?m)^tfmp +(\S+)$", (_ROOT / "docs" / "reference" / "commands.md").read_text())
    assert shown is not None
    assert newest.group(1) == cited.group(1) == shown.group(1) == tfmp.__version__


def test_workflow_runs_every_environment_with_tests() -> None:
    settings = (_ROOT / "pyproject.toml").read_text()
    [by_default] = re.findall(r"(?m)^env_list = \[(.*)\]$", settings)
    environments = set(re.findall(r"(?m)^\[tool\.tox\.env\.(\w+)\]$", settings))
    workflow = (_ROOT / ".github" / "workflows" / "tests.yml").read_text()
    each_change, each_week = (names.split(", ") for names in re.findall(r"environment: \[(.*)\]", workflow))
    assert each_change == by_default.replace('"', "").split(", ")
    # `checks` runs the first six, and `tf215` what needs Horovod. The others train an example, want to be told what to
    # look at, or need a GPU.
    others = {"lint", "package", "docs", "plain", "tf216", "py313_smoke", "horovod"}
    others |= {"digits", "ranges", "spikes", "lora", "bert", "mutation", "gpu", "port_tests"}
    assert {*each_change, *each_week} == environments - others
    [matrix] = re.findall(r"(?m)^labels = \{ matrix = \[(.*)\] \}$", settings)
    # There all that `tf216_every` and `py313` have runs.
    assert {*matrix.replace('"', "").split(", ")} == {*each_change, *each_week, "plain", "horovod"} - {"checks"}
