"""Collects what the tests of other libraries found; `--works-with` writes it down or compares it with what is there."""

from typing import Any

import pytest
from table import FEATURES, arranged, library, recorded, write

_found: dict[str, Any] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--works-with",
        choices=["check", "write"],
        help="fail if the libraries' tests found another thing than what is recorded, or record it",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of a `Suite` the models of its library that do not lack what the test is about."""
    if metafunc.cls is None or "model" not in metafunc.fixturenames:
        return
    [feature] = [mark.args for mark in metafunc.definition.iter_markers("feature")]
    # A test that is about one model names it.
    if len(feature) == 1:
        subject = metafunc.cls.subject
        models = [model for model in metafunc.cls.models if feature[0] not in subject(model).lacks]
        if feature[0] == "callbacks":
            models = [model for model in models if subject(model).callbacks is not None]
        metafunc.parametrize("model", models)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in [*items]:
        of_library, feature = (item.get_closest_marker(name) for name in ("works_with", "feature"))
        if of_library is None:
            continue
        if feature is None or feature.args[0] not in FEATURES:
            raise pytest.UsageError(f"{item.nodeid} needs the mark `feature` with one of {', '.join(FEATURES)}.")
        model = feature.args[1] if len(feature.args) > 1 else item.callspec.params["model"]  # type: ignore[attr-defined]
        if isinstance(model, str):
            item.user_properties.append(("works_with", [of_library.args[0], model, feature.args[0]]))
        else:
            # This test of its suite is about no model of the library.
            items.remove(item)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.failed and (report.when != "call" or report.skipped):
        return
    for kind, found in report.user_properties:
        if kind == "works_with":
            name, model, feature = found
            cells = _found.setdefault(name, library(name))["models"].setdefault(model, {})
            # A cell may be what several tests are about.
            cells[feature] = "a test fails" if report.failed else cells.get(feature, "yes")


def pytest_sessionfinish(session: pytest.Session) -> None:
    asked = session.config.getoption("--works-with")
    if asked is None or hasattr(session.config, "workerinput"):
        return
    found = arranged(_found)
    if asked == "write":
        write(found)
        return
    known = {name: library for name, library in recorded().items() if name in found}
    if not found or known != found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        differing = [name for name, library in found.items() if library != known.get(name)]
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        what = f"says other things of {', '.join(differing)}" if found else "has no say: no library was tested"
        reporter.write_line(f"tests/recordings/works_with.json {what}", red=True)
        for name in differing:
            reporter.write_line(f"found: {found[name]}\nrecorded: {known.get(name)}")
