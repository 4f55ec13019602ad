"""Settings of all tests: TensorFlow 2's or 1's behaviour, the markers, and which tests a tox environment runs."""

import importlib.util
from pathlib import Path

import pytest

_MARKERS = {
    "graph": "builds its own graphs, and therefore also runs with --v1-behavior",
    "horovod": "needs Horovod; the tox environment `horovod` builds it and runs only these tests",
    "estimator": "needs tf.estimator, which TensorFlow 2.15 is the last to have",
    "library(package)": "needs a package that the tox environment `works_with_keras2` installs",
    "essential(*cases)": "also runs on the other versions of TensorFlow, Keras and Python; with cases, those of its "
    "cases whose ids begin with one of them; with None, no case, whatever its module says",
    "promise(*names)": "holds these promises of docs/explanation/step.md",
    "works_with(library)": "is about a library, a `table.Library`, for the tables of docs/reference/works_with.md",
    "feature(name, model)": "is about this column of these tables, and this row: by default, the parameter `model`",
    "home(name)": "runs in the tox environment of this name, in others only if it is essential; with None, in all",
}

#: The homes of other tests, by the beginning of their names; the first that fits. What runs the same code of tfmp on
#: every TensorFlow has its home with the newest; what of it is plain TensorFlow, with an older one, so that no
#: environment takes long. What is marked `estimator`, builds its own graphs, or has a Keras 2 in its name, has its home
#: with TensorFlow 2.15.
_HOMES = {
    "tests/benchmarks/test_fit_speed.py": "tf221",
    "tests/benchmarks/test_memory.py": "tf221",
    "tests/benchmarks/test_recipes_table.py": "tf221",
    "tests/benchmarks/": "tf216",
    "tests/hosts/": "tf221",
    "tests/works_with/test_keras_": "works_with_keras3",
    "tests/works_with/test_page.py": "tf216",
    "tests/works_with/": "works_with_keras2",
    "tests/core/": "tf216",
    "tests/docs/test_recipes.py": "tf221",
    "tests/docs/test_tutorials.py": "docs",
    "tests/estimator_examples/test_digits": "tf221",
    "tests/grad_scaler/test_call_order.py": "tf216",
    "tests/grad_scaler/test_pending_update.py": "tf216",
    "tests/grad_scaler/test_replay.py": "tf216",
    "tests/grad_scaler/test_scaler_checks.py": "tf216",
    "tests/grad_scaler/test_scaler_dropped_steps.py": "tf216",
    "tests/grad_scaler/": "tf221",
    "tests/mixed_precision/autocast/test_autocast_frameworks.py": "tf221",
    "tests/mixed_precision/autocast/test_autocast_op_types.py": "tf221",
    "tests/mixed_precision/autocast/": "tf216",
    "tests/ranges/": "tf221",
    "tests/recomputation/functions/": "tf216",
    "tests/bert/": "tf215",
    "tests/checkpoints/test_exact_resume.py": "tf216",
    "tests/checkpoints/test_interrupted_saves.py": "tf216",
    "tests/checkpoints/test_names.py": "tf216",
    "tests/checkpoints/": "tf221",
    "tests/monitoring/test_stuck.py": "tf216",
    "tests/optimizers/test_v1": "tf215",
    "tests/optimizers/test_norms_on_replicas.py": "tf221",
    "tests/optimizers/test_uneven_workers.py": "tf221",
    "tests/tools/test_mutation.py": "tf216",
    "tests/tools/": "tf221",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--v1-behavior",
        action="store_true",
        help="run after tf.compat.v1.disable_v2_behavior(): graph mode, reference variables, control flow v1",
    )
    parser.addoption(
        "--essential",
        action="store_true",
        help="of the tests in tests/, run only the essential ones, and with --home those whose home that is",
    )
    parser.addoption(
        "--home",
        metavar="ENVIRONMENT",
        help="of the tests in tests/ whose home is another tox environment, run only the essential ones",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    # With pytest-xdist, the process that hands out tests runs none: there, loading TensorFlow would only take time.
    if not hands_out:
        config.pluginmanager.import_plugin("under_tensorflow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over the modules that have no test with the markers that are asked for: to import them takes long."""
    if not collection_path.name.startswith("test_"):
        return None
    asked = [marker for marker in ("graph", "horovod") if config.getoption("markexpr") == marker]
    if config.getoption("--essential"):
        home = _home_of(collection_path.relative_to(config.rootpath).as_posix())
        asked += ["essential"] * (home is None or home != config.getoption("--home"))
    text = collection_path.read_text("utf-8")
    return True if any(f"pytest.mark.{marker}" not in text for marker in asked) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only_essential, here = config.getoption("--essential"), config.getoption("--home")

    def runs(item: pytest.Item) -> bool:
        if not item.nodeid.startswith("tests/") or _is_essential(item):
            return True
        if here is None:
            return not only_essential
        return _home(item) in ((here,) if only_essential else (None, here))

    left_out = [item for item in items if not runs(item)]
    items[:] = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=left_out)


def _is_essential(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("essential")
    if marker is None or marker.args == (None,):
        return False
    return not marker.args or any(f"{_case(item)}-".startswith(f"{each}-") for each in marker.args)


def _home(item: pytest.Item) -> str | None:
    if marker := item.get_closest_marker("home"):
        home: str | None = marker.args[0]
        return home
    if item.get_closest_marker("estimator") or "tf_keras" in _case(item) or "keras2" in item.nodeid:
        return "tf215"
    return _home_of(item.nodeid) or ("tf215" if item.get_closest_marker("graph") else None)


def _home_of(nodeid: str) -> str | None:
    return next((home for start, home in _HOMES.items() if nodeid.startswith(start)), None)


def _case(item: pytest.Item) -> str:
    return item.name.partition("[")[2].removesuffix("]")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("needs Horovod, which the tox environment `horovod` builds")
    for marker in item.iter_markers("library"):
        if importlib.util.find_spec(marker.args[0].partition(".")[0]) is None:
            pytest.skip(f"needs {marker.args[0]}, which the tox environment `works_with_keras2` installs")
    if item.get_closest_marker("estimator") and importlib.util.find_spec("tensorflow_estimator") is None:
        pytest.skip("this TensorFlow has no tf.estimator; 2.15 has")
