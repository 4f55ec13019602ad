"""The list of modules in the page of the design; which of them may import which, import-linter's contracts say."""

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_MODULES = sorted((_ROOT / "tfmp").rglob("*.py"))


def _listed_in_design() -> Iterator[str]:
    """Yield the paths of the list of layers; what stands in a line beside the first name is of the same directory."""
    text = (_ROOT / "docs" / "design.md").read_text()
    parents: list[str] = []
    for line in text.split("```\ntfmp/\n")[1].split("```")[0].splitlines():
        first, *words = line.split()
        del parents[(len(line) - len(line.lstrip())) // 2 - 1 :]
        path = "/".join([*parents, first])
        yield path
        if path.endswith("/"):
            parents.append(first.rstrip("/"))
        else:
            yield from ("/".join([*parents, word]) for word in words if word.endswith(".py"))


def test_design_lists_every_module() -> None:
    listed = set(_listed_in_design())
    # A directory without lines of its own stands for all that is in it.
    whole = tuple(path for path in listed if path.endswith("/") and sum(each.startswith(path) for each in listed) == 1)
    modules = {path.relative_to(_ROOT / "tfmp").as_posix() for path in _MODULES}
    named = {path for path in modules if not path.startswith(whole) and "/__" not in path}
    assert named == {path for path in listed if path.endswith(".py")}
    assert all(any(module.startswith(path) for module in modules) for path in whole)


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    folders = {path.parent for path in _MODULES}
    sizes = {folder.relative_to(_ROOT).as_posix(): len([*folder.glob("[!_]*.py")]) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > 13} == {}
