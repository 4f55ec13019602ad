"""Settings of all tests: TensorFlow 2's or TensorFlow 1's behaviour, and the markers."""

import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--v1-behavior",
        action="store_true",
        help="run after tf.compat.v1.disable_v2_behavior(): graph mode, reference variables, control flow v1",
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


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("needs Horovod, which the tox environment `horovod` builds")
