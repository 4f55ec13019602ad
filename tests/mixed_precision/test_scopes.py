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
def test_object_is_entered_within_itself_and_a_decorated_function_calls_itself(kind: _Kind) -> None:
    name, result = next(iter(kind.names.items()))
    scope = kind.make(name)

    @scope
    def found(depth: int) -> list[str]:
        with scope:
            return [kind.found(), *(found(depth - 1) if depth else []), kind.found()]

    assert (found(1), kind.found()) == ([result] * 4, "float32")


@pytest.mark.parametrize("main_leaves", ["first", "last"])
@_for_every_kind
def test_object_acts_in_each_of_the_threads_that_enter_it_whichever_leaves_first(kind: _Kind, main_leaves: str) -> None:
    (name, other, _), barrier = kind.names, threading.Barrier(9, timeout=60)
    scope = kind.make(name)

    def run(index: int) -> list[str]:
        found = [kind.found()]
        barrier.wait()
        with scope:
            barrier.wait()
            found.append(kind.found())
            # Half of the threads leave after the others.
            if index % 2:
                barrier.wait()
                found.append(kind.found())
        if not index % 2:
            barrier.wait()
        return [*found, kind.found()]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        with scope, kind.make(other):
            threads = [pool.submit(run, index) for index in range(8)]
            barrier.wait()
            barrier.wait()
            if main_leaves == "last":
                barrier.wait()
                concurrent.futures.wait(threads)
            assert kind.found() == kind.names[other]
        assert kind.found() == "float32"
        if main_leaves == "first":
            barrier.wait()
        of_name = kind.names[name]
        expected = [["float32", of_name, "float32"], ["float32", of_name, of_name, "float32"]]
        assert [each.result() for each in threads] == expected * 4


def _generator() -> Iterator[int]:
    yield 1


async def _coroutine() -> None: ...


@pytest.mark.parametrize("wrong", [_generator, _coroutine])
@_for_every_kind
def test_generators_and_coroutines_are_not_decorated(kind: _Kind, wrong: Any) -> None:
    for name in kind.names:
        with pytest.raises(TypeError, match=r"decorates functions, got .* would run outside of the scope"):
            kind.make(name)(wrong)
