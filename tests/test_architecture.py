"""The list of modules in the page of the design, and the test file of each module.

Which modules may import which is checked by the contracts of import-linter.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_MODULES = sorted((_ROOT / "tfmp").rglob("*.py"))

#: The packages each of whose modules has a test file of its name.
_TESTED_BY_NAME = ("core", "grad_scaler", "hosts", "optimizers")

#: The modules of those packages that have no test file of their name, and the reason.
_WITHOUT_TESTS = {
    "core/adapters/program.py": "protocols; the tests of adapters test what fulfils them",
    "core/distribute/base.py": "a protocol; the tests of single_process, mirrored and horovod test its methods",
    "core/dtypes.py": "two tables",
    "core/overflow/results.py": "tuples",
    "hosts/keras/layers.py": "the tests of levels and of check_precision run it with every layer of Keras",
    "grad_scaler/scaler.py": "one class, whose tests stand in several files by their subject: test_scaler_*.py",
    "optimizers/keras215.py": "makes two classes; test_keras2.py and test_keras_legacy.py test them for every Keras 2",
    "optimizers/tf_keras.py": "makes two classes; test_keras2.py and test_keras_legacy.py test them for every Keras 2",
}


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


def test_each_module_has_a_test_file_of_its_name() -> None:
    """The test file is in the same folder of `tests/`; its name also has the folder's if it would not be unique."""
    modules = {path.relative_to(_ROOT / "tfmp") for path in _MODULES if not path.name.startswith("_")}
    without_tests = {
        module.as_posix()
        for module in modules
        if module.parts[0] in _TESTED_BY_NAME
        and not any(
            (_ROOT / "tests" / module).with_name(f"test_{name}.py").exists()
            for name in (module.stem, f"{module.parent.name}_{module.stem}")
        )
    }
    assert without_tests == _WITHOUT_TESTS.keys()


def test_names_of_test_files_are_unique() -> None:
    # Pytest imports each by its name alone, since the folders are no packages; a conftest.py it knows by its path.
    names = Counter(path.name for path in (_ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
