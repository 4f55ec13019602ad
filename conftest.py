"""Which tests are collected: those of the lane that is asked for, if the installed packages can run them."""

import importlib.metadata
import re
from pathlib import Path

import lane_table
import pytest

#: What each of these files imports, or what its example is about.
_NEEDS = {
    "docs/howto/half_state.md": "keras 3",
    "tfmp/npu/estimator.py": "keras 2",
    "tfmp/optimizer_state/half_state.py": "keras 3",
    "tests/migrate/rules/npu/test_npu_samples.py": "keras 2",
    "tests/mixed_precision": "keras",
    "tests/migrate/tables": "keras 2",
    "tfmp/migrate": "libcst",
    "tools/exported_program.py": "jax",
    "tools/mutation": "mutmut",
    "tools/run_exported_steps.py": "jax",
    "tools/run_exported_trainings.py": "jax",
    "tools/site/notebooks.py": "mkdocs",
    **{
        f"tfmp/{package}/{module}.py": need
        for package in ("hosts/keras", "optimizer_state", "recomputation/layers")
        for module, need in {
            "keras215": "keras 2",
            "keras3": "keras 3",
            "keras3_scope": "keras 3",
            "tf_keras": "tf_keras",
        }.items()
    },
}


def _has(need: str) -> bool:
    package, _, major = need.partition(" ")
    try:
        return importlib.metadata.version(package).startswith(major)
    except importlib.metadata.PackageNotFoundError:
        return False


collect_ignore = [path for path, need in _NEEDS.items() if not _has(need)]

#: Cases of Keras 2, tf_keras and Estimator; but the legacy optimizers of tf_keras are others than those of Keras 2.15.
_OLD = re.compile("keras2|tf_keras(?! legacy)|Estimator")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for a lane."""
    parser.addoption(
        "--lane", choices=[*lane_table.LANES], help="run what tests/lanes.toml lists for it; by default, all"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each of several processes whole files, in their order, since a file trains once for all of its tests."""
    if config.getoption("numprocesses", None):
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over the modules of other lanes: to import them takes long, or needs what the lane has not."""
    lane = config.getoption("--lane")
    if lane is None or collection_path.is_dir():
        return None
    return None if lane_table.may_run(collection_path.relative_to(lane_table.ROOT).as_posix(), lane) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose and order the tests of the lane."""
    if lane := config.getoption("--lane"):
        kinds = lane_table.LANES[lane]
        of_others = [item for item in items if lane_table.kind_of(item.nodeid, old=_is_old(item)) not in kinds]
        config.hook.pytest_deselected(items=of_others)
        left_out = {*of_others}
        items[:] = [item for item in items if item not in left_out]
        items.sort(key=lambda item: lane_table.place(item.nodeid))


def _is_old(item: pytest.Item) -> bool:
    """Return whether a test is about Keras 2, Estimator or Horovod: an old one in tests/lanes.toml."""
    if not item.nodeid.startswith("tests/"):
        return False
    case = item.name.partition("[")[2]
    marks = ("estimator", "horovod")
    return bool(_OLD.search(case)) or "keras2" in item.nodeid or any(item.get_closest_marker(mark) for mark in marks)
