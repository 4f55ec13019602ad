"""Collects what the tests of other libraries found; `--works-with` writes it down or compares it with what is there."""

from typing import Any

import pytest
from table import FEATURES, Findings, recorded, write

_found = Findings()


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
        metafunc.parametrize("model", models)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        library, feature = (item.get_closest_marker(name) for name in ("works_with", "feature"))
        if library is None:
            continue
        if feature is None or feature.args[0] not in FEATURES:
            raise pytest.UsageError(f"{item.nodeid} needs the mark `feature` with one of {', '.join(FEATURES)}.")
        model = feature.args[1] if len(feature.args) > 1 else item.callspec.params["model"]  # type: ignore[attr-defined]
        item.user_properties.append(("works_with", [library.args[0].to_dict(), model, feature.args[0]]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = getattr(report, "wasxfail", None) if report.outcome == "skipped" else "yes"
    if outcome is None or (report.when != "call" and report.outcome != "failed"):
        return
    for name, found in report.user_properties:
        if name == "works_with":
            _found.add(*_arguments(found), outcome if report.outcome != "failed" else "a test fails")


def _arguments(found: Any) -> tuple[dict[str, Any], str, str]:
    library, model, feature = found
    return library, model, feature


def pytest_sessionfinish(session: pytest.Session) -> None:
    asked = session.config.getoption("--works-with")
    if asked is None or hasattr(session.config, "workerinput"):
        return
    found = _found.recording()
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
