"""Settings of all tests: TensorFlow 2's or TensorFlow 1's behaviour, and the markers."""

import importlib.util
import re
from pathlib import Path

import pytest

_ESSENTIAL = Path(__file__).parent / "essential.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--v1-behavior",
        action="store_true",
        help="run after tf.compat.v1.disable_v2_behavior(): graph mode, reference variables, control flow v1",
    )
    parser.addoption(
        "--only-essential",
        action="append",
        default=[],
        metavar="REGEX",
        help="of the tests in tests/ whose names REGEX is found in, run only those that tests/essential.txt lists",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "graph: builds its own graphs, and therefore also runs with --v1-behavior")
    config.addinivalue_line(
        "markers", "horovod: needs Horovod; the tox environment `horovod` builds it and runs only these tests"
    )
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    # With pytest-xdist, the process that hands out tests runs none: there, loading TensorFlow would only take time.
    if not hands_out:
        config.pluginmanager.import_plugin("under_tensorflow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    patterns = [re.compile(regex) for regex in config.getoption("--only-essential")]
    if not patterns:
        return
    lines = _ESSENTIAL.read_text("utf-8").splitlines()
    listed = tuple(line for line in lines if line.startswith("tests/"))
    unlisted = tuple(line.removeprefix("--deselect=") for line in lines if line.startswith("--deselect="))

    def is_left_out(name: str) -> bool:
        essential = name.startswith(listed) and not name.startswith(unlisted)
        return name.startswith("tests/") and not essential and any(each.search(name) for each in patterns)

    left_out = [item for item in items if is_left_out(item.nodeid)]
    items[:] = [item for item in items if not is_left_out(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("needs Horovod, which the tox environment `horovod` builds")
