"""Fixtures of the tests of levels and autocast: the global policy of a Keras, and that no scope is left open."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tfmp.mixed_precision.autocast import hooks, state


@pytest.fixture
def global_policy(keras: ModuleType) -> Iterator[Callable[[str], None]]:
    """Set the global policy of a Keras until the test ends."""
    yield keras.mixed_precision.set_global_policy
    keras.mixed_precision.set_global_policy("float32")


def _functions() -> dict[str, Any]:
    return {path: getattr(owner, name) for path, (owner, name, _) in hooks._functions().items()}


@pytest.fixture(autouse=True)
def replaced() -> Iterator[Callable[[], list[str]]]:
    """Tell which functions a scope has replaced; if a test leaves a scope open, fail, and close it for the others."""
    # Between tests there may become more: a copy of a module that is imported late.
    before = _functions()

    def names() -> list[str]:
        return [name for name, function in _functions().items() if function is not before[name]]

    yield names
    left = (names(), list(state._thread.scopes), hooks.open_scopes._count)
    hooks.open_scopes._replaced.close()
    hooks.open_scopes._count = 0
    state._thread.scopes[:] = [None]
    assert left == ([], [None], 0)
