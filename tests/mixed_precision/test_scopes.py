"""The scopes `tfmp.autocast` and `tfmp.precision` are entered and left in any nesting, thread and way of calling."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import kerases
import pytest
import tensorflow as tf

import tfmp


class _Kind(NamedTuple):
    """A scope of a name, what finds out which scope acts, and what it finds in those of three names; else float32."""

    make: Callable[[str], Any]
    found: Callable[[], str]
    names: dict[str, str]


def _autocast(name: str) -> Any:
    return tfmp.autocast(enabled=False) if name == "off" else tfmp.autocast(name)


_LEVELS = {"O2": "mixed_float16", "O3": "float16", "O0": "float32"}
_KINDS = {
    "autocast": _Kind(
        _autocast,
        lambda: (tf.ones([2, 3]) @ tf.ones([3, 2])).dtype.name,
        {"bfloat16": "bfloat16", "float16": "float16", "off": "float32"},
    ),
    **{
        f"precision, {title}": _Kind(
            tfmp.precision,
            lambda keras=keras: str(keras.layers.Dense(2).dtype_policy.name),  # type: ignore[misc] # the default
            _LEVELS,
        )
        for title, keras in kerases.installed().items()
    },
}
_for_every_kind = pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in _KINDS.items()])


@_for_every_kind
def test_innermost_scope_acts_until_it_is_left_also_by_an_error(kind: _Kind) -> None:
    # An object can be entered again within itself, and later.
    (first, second, off), results = (kind.make(name) for name in kind.names), [*kind.names.values()]
    scopes = [second, first, off, first, first, kind.make([*kind.names][1]), off]
    expected = [results[at] for at in (1, 0, 2, 0, 0, 1, 2)]

    def descend(rest: list[Any]) -> list[str]:
        if not rest:
            return []
        with rest[0]:
            with pytest.raises(ZeroDivisionError), second:
                _ = 1 / 0
            return [kind.found(), *descend(rest[1:]), kind.found()]

    for _ in range(2):
        assert descend(scopes) == [*expected, *reversed(expected)]
        assert kind.found() == "float32"


@_for_every_kind
def test_decorated_function_calls_itself_and_leaves_the_scope_also_by_an_error(kind: _Kind) -> None:
    name, result = next(iter(kind.names.items()))

    @kind.make(name)
    def found(depth: Any) -> list[str]:
        """Compute it."""
        return [kind.found(), *(found(depth - 1) if depth else []), kind.found()]

    assert (found(2), kind.found(), found.__doc__) == ([result] * 6, "float32", "Compute it.")
    with pytest.raises(TypeError):
        found("deep")
    assert kind.found() == "float32"


@_for_every_kind
def test_object_is_entered_in_several_threads_at_once(kind: _Kind) -> None:
    (name, other, _), barrier = kind.names, threading.Barrier(8, timeout=60)
    scope = kind.make(name)

    def run(_: int) -> list[Any]:
        found = []
        for _ in range(10):
            barrier.wait()
            before = kind.found()
            with scope:
                within = kind.found()
                barrier.wait()
            found.append((before, within, kind.found()))
        return found

    with kind.make(other), concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == [[("float32", kind.names[name], "float32")] * 10] * 8


@pytest.mark.parametrize("thread_leaves_first", [True, False])
@_for_every_kind
def test_scope_acts_in_its_thread_whichever_leaves_first(kind: _Kind, thread_leaves_first: bool) -> None:
    entered, may_leave = threading.Event(), threading.Event()
    scope, (name, other, _) = kind.make(next(iter(kind.names))), kind.names

    def run() -> list[str]:
        with scope:
            entered.set()
            assert may_leave.wait(60)
            within = kind.found()
        return [within, kind.found()]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with scope, kind.make(other):
            found = pool.submit(run)
            assert entered.wait(60)
            if thread_leaves_first:
                may_leave.set()
                found.result()
            assert kind.found() == kind.names[other]
        assert kind.found() == "float32"
        may_leave.set()
        assert found.result() == [kind.names[name], "float32"]


def _generator() -> Iterator[int]:
    yield 1


async def _coroutine() -> None: ...


@pytest.mark.parametrize("wrong", [_generator, _coroutine])
@_for_every_kind
def test_generators_and_coroutines_are_not_decorated(kind: _Kind, wrong: Any) -> None:
    for name in kind.names:
        with pytest.raises(TypeError, match=r"decorates functions, got .* would run outside of the scope"):
            kind.make(name)(wrong)
