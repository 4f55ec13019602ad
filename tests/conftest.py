"""Settings of all tests: TensorFlow 2's or 1's behaviour, and the markers."""

import importlib.util
from pathlib import Path

import hypothesis
import pytest

# The same examples in each run. To look for others: --hypothesis-profile=default
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")

_MARKERS = {
    "graph": "builds its own graphs, and therefore also runs with --v1-behavior",
    "horovod": "needs Horovod, which the tox environments `tf215` and `horovod` have",
    "estimator": "needs tf.estimator, which TensorFlow 2.15 is the last to have",
    "library(package)": "needs a package that the tox environment `works_with_keras2` installs",
    "promise(*numbers)": "holds these promises of docs/explanation/step.md",
    "works_with(name)": "is about this library of tests/recordings/works_with.json, for docs/reference/works_with.md",
    "feature(name, model)": "is about this column of these tables, and this row: by default, the parameter `model`",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--v1-behavior",
        action="store_true",
        help="run after tf.compat.v1.disable_v2_behavior(): graph mode, reference variables, control flow v1",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    # With pytest-xdist, the process that hands out tests runs none: there, loading TensorFlow would only take time. The
    # lane `plain` has none.
    if not hands_out and importlib.util.find_spec("tensorflow") is not None:
        config.pluginmanager.import_plugin("under_tensorflow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over the modules that have no test with the marker that is asked for: to import them takes long."""
    if not collection_path.name.startswith("test_"):
        return None
    asked = [marker for marker in ("graph", "horovod") if config.getoption("markexpr") == marker]
    text = collection_path.read_text("utf-8")
    return True if any(f"pytest.mark.{marker}" not in text for marker in asked) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("needs Horovod, which the tox environments `tf215` and `horovod` have")
    for marker in item.iter_markers("library"):
        if importlib.util.find_spec(marker.args[0].partition(".")[0]) is None:
            pytest.skip(f"needs {marker.args[0]}, which the tox environment `works_with_keras2` installs")
    if item.get_closest_marker("estimator") and importlib.util.find_spec("tensorflow_estimator") is None:
        pytest.skip("this TensorFlow has no tf.estimator; 2.15 has")
