"""Scopes are entered and left in any nesting, thread and way of calling, and TensorFlow is as before after the last."""

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from autocast_ways import types

import tfmp
from tfmp.mixed_precision.autocast import hooks, state


def _functions() -> dict[str, Any]:
    return {path: getattr(owner, name) for path, (owner, name, _) in hooks._functions().items()}


#: What stands there before the test. Between tests there may become more: a copy of a module that is imported late.
_ORIGINALS: dict[str, Any] = {}


def _replaced() -> list[str]:
    return [name for name, function in _functions().items() if function is not _ORIGINALS[name]]


@pytest.fixture(autouse=True)
def tensorflow_is_as_before() -> Iterator[None]:
    """Check that a test leaves nothing behind; if it does, put it back, for the other tests."""
    _ORIGINALS.clear()
    _ORIGINALS.update(_functions())
    yield
    left = (_replaced(), list(state._thread.scopes), hooks.open_scopes._count)
    hooks.open_scopes._replaced.close()
    hooks.open_scopes._count = 0
    state._thread.scopes[:] = [None]
    assert left == ([], [None], 0)


def _product() -> str:
    return (tf.ones([2, 3]) @ tf.ones([3, 2])).dtype.name


def _in_thread(function: Callable[[], Any]) -> Any:
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    assert len(results) == 1, "the thread ended with an error"
    return results[0]


def test_every_function_is_replaced_within_a_scope_only_and_nothing_is_added() -> None:
    owners = {path: owner for path, (owner, _, _) in hooks._functions().items()}
    before = {name: set(vars(owner)) for name, owner in owners.items()}
    with tfmp.autocast(enabled=False):
        assert (_product(), _replaced()) == ("float32", [])
    with tfmp.autocast():
        _product()
        assert _replaced() == list(_ORIGINALS)
        inner = _functions()
        with tfmp.autocast("bfloat16"):
            assert _functions() == inner
    assert _replaced() == []
    assert {name: set(vars(owner)) for name, owner in owners.items()} == before


def test_nothing_is_replaced_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), tfmp.autocast(), tfmp.autocast("bfloat16"):
        raise ZeroDivisionError
    assert _replaced() == []
    with tfmp.autocast():
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.ones([2, 3]) @ tf.ones([2, 3])
        for inner in (tfmp.autocast("bfloat16"), tfmp.autocast(enabled=False)):
            with pytest.raises(ZeroDivisionError), inner:
                raise ZeroDivisionError
            assert (_product(), _replaced()) == ("float16", list(_ORIGINALS))


def test_innermost_scope_acts() -> None:
    # An object can be entered again, also within itself.
    scope, off = tfmp.autocast("bfloat16"), tfmp.autocast(enabled=False)
    moved = tfmp.autocast(float32=["MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"])
    scopes = [tfmp.autocast(), scope, off, moved, scope, scope, tfmp.autocast(), off]
    expected = ["float16", "bfloat16", "float32", "float32", "bfloat16", "bfloat16", "float16", "float32"]

    def found(scopes: list[Any]) -> list[str]:
        if not scopes:
            return []
        with scopes[0]:
            return [_product(), *found(scopes[1:]), _product()]

    for _ in range(2):
        assert found(scopes) == [*expected, *reversed(expected)]
        assert _product() == "float32"
    assert found([scope] * 100) == ["bfloat16"] * 200


def test_scope_acts_in_its_thread_only() -> None:
    with tfmp.autocast():
        assert _in_thread(_product) == "float32"
        assert _in_thread(tfmp.autocast("bfloat16")(_product)) == "bfloat16"
        assert _in_thread(tf.function(lambda: tf.ones([2, 3]) @ tf.ones([3, 2]))).dtype == tf.float32
        assert _product() == "float16"
        assert _replaced() == list(_ORIGINALS)


def test_object_is_entered_in_several_threads_at_once() -> None:
    scope, barrier, found = tfmp.autocast(), threading.Barrier(8, timeout=60), []

    def run() -> None:
        for _ in range(20):
            barrier.wait()
            before = _product()
            with scope:
                within = _product()
                barrier.wait()
                assert _replaced() == list(_ORIGINALS)
            found.append((before, within, _product()))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [("float32", "float16", "float32")] * 160


def test_thread_outlives_the_scope_that_started_it() -> None:
    entered, left, found = threading.Event(), threading.Event(), []

    def run() -> None:
        with tfmp.autocast("bfloat16"):
            entered.set()
            assert left.wait(60)
            found.append((_product(), _replaced()))
        found.append((_product(), _replaced()))

    with tfmp.autocast():
        thread = threading.Thread(target=run)
        thread.start()
        assert entered.wait(60)
    assert _product() == "float32"
    left.set()
    thread.join()
    assert found == [("bfloat16", list(_ORIGINALS)), ("float32", [])]


def test_scopes_are_left_in_any_order() -> None:
    first, second = tfmp.autocast(), tfmp.autocast(enabled=False)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert (_product(), _replaced()) == ("float32", [])

    def products() -> Iterator[str]:
        with tfmp.autocast():
            yield _product()
            yield _product()

    generator = products()
    assert next(generator) == "float16"
    with tfmp.autocast("bfloat16"):
        next(generator)
    generator.close()
    assert (_product(), _replaced()) == ("float32", [])
    with pytest.raises(RuntimeError):
        tfmp.autocast().__exit__(None, None, None)


class _Decorated:
    @tfmp.autocast()
    def method(self, times: int = 1, *, flag: bool = False) -> tuple[int, bool, str]:
        """Compute it."""
        return times, flag, _product()

    @staticmethod
    @tfmp.autocast()
    def static() -> str:
        return _product()

    @classmethod
    @tfmp.autocast()
    def of_class(cls) -> tuple[str, str]:
        return cls.__name__, _product()


def test_decorated_functions_of_all_kinds_run_in_the_scope_and_look_as_before() -> None:
    decorated = _Decorated()
    assert decorated.method(3, flag=True) == (3, True, "float16")
    assert (decorated.static(), _Decorated.of_class()) == ("float16", ("_Decorated", "float16"))
    for function in (_product, _Decorated.static, lambda: [_product()][0], functools.partial(_product)):
        result = tfmp.autocast("bfloat16")(function)()
        assert (result, _product()) == ("float16" if function is _Decorated.static else "bfloat16", "float32")
    method = _Decorated.method
    assert (method.__name__, method.__doc__, method.__module__) == ("method", "Compute it.", __name__)
    assert list(inspect.signature(method).parameters) == ["self", "times", "flag"]
    assert tf.function(method).function_spec.arg_names == ["self", "times"]


def test_decorated_function_calls_itself_and_leaves_the_scope_with_an_error() -> None:
    @tfmp.autocast()
    def products(depth: int) -> list[str]:
        if depth < 0:
            raise ZeroDivisionError
        return [_product(), *(products(depth - 1) if depth else []), _product()]

    assert products(2) == ["float16"] * 6
    with pytest.raises(ZeroDivisionError):
        products(-1)
    assert _replaced() == []


class _Model(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scope, self.w = tfmp.autocast("bfloat16"), tf.Variable(tf.ones([2, 2]))

    @tf.function
    @tfmp.autocast()
    def decorated(self, x: tf.Tensor, count: tf.Tensor, *, training: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
        y, steps = x @ self.w, 0
        if tf.reduce_sum(x) > 0:
            y = y * 2
        for _ in tf.range(count):
            y = y + 1
            steps += 1
        while steps > 2:
            steps -= 1
        return y if training else -y, steps

    @tf.function
    def entering(self, x: tf.Tensor) -> tf.Tensor:
        with self.scope:
            return x @ self.w


def test_autograph_converts_decorated_methods_and_a_scope_can_be_an_attribute() -> None:
    model = _Model()
    for sign, expected in ((1.0, 7.0), (-1.0, 1.0)):
        y, steps = model.decorated(tf.fill([2, 2], sign), tf.constant(3), training=True)
        assert (y.dtype.name, y.numpy().tolist(), int(steps)) == ("float16", [[expected] * 2] * 2, 2)
    assert model.decorated(tf.ones([1, 2]), tf.constant(0))[0].numpy().tolist() == [[-4, -4]]
    assert model.entering(tf.ones([1, 2])).dtype == tf.bfloat16
    assert types(model.variables) == ["float32"]


def test_subclass_may_have_arguments_like_those_of_torch() -> None:
    class OfSubclass(tfmp.autocast):
        def __init__(self, device_type: str) -> None:
            super().__init__("bfloat16")
            self.device_type = device_type

    assert OfSubclass("cuda").device_type == OfSubclass(device_type="cuda").device_type == "cuda"


def _generator() -> Iterator[str]:
    yield _product()


async def _coroutine() -> str:
    return _product()


_OUTSIDE = "A generator or a coroutine would run outside of the scope"
_OF_TORCH = "^tfmp.autocast takes no {}, .* leave it out, and write tfmp.autocast"

#: Arguments of the scope, and what it then says.
_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dtype": "float32"}, ValueError, "float16 or bfloat16, got 'float32'"),
    ({"dtype": tf.float64}, ValueError, "float16 or bfloat16, got tf.float64"),
    ({"dtype": "float8_e5m2"}, ValueError, "got 'float8_e5m2'"),
    ({"dtype": "mixed_float16"}, ValueError, "got 'mixed_float16'"),
    ({"dtype": None}, ValueError, "got None"),
    ({"dtype": ["float16"]}, ValueError, re.escape("got ['float16']")),
    ({"dtype": "float32", "enabled": False}, ValueError, "got 'float32'"),
    ({"enabled": "False"}, TypeError, "enabled must be True or False, got 'False' of type str"),
    ({"half": "Exp"}, TypeError, "half must be a list of names, got 'Exp' of type str"),
    ({"widest": ""}, TypeError, "widest must be a list of names"),
    ({"half": 3}, TypeError, "half must be a list of names"),
    ({"half": ["Matmul"]}, ValueError, "half names 'Matmul'.*did you mean.*MatMul"),
    ({"float32": ["Softmaxx"]}, ValueError, "float32 names 'Softmaxx'.*did you mean.*Softmax"),
    ({"widest": ["exp"]}, ValueError, "widest names 'exp'.*did you mean.*Exp"),
    ({"half": [tf.exp]}, TypeError, "half must be a list of names, and has <function exp"),
    ({"half": ["MatMul", "xyzzy_qq"]}, ValueError, "half names 'xyzzy_qq'.*see dir"),
    ({"half": ["Exp", None]}, TypeError, "half must be a list of names, and has None of type NoneType"),
    ({"half": [["Exp"]]}, TypeError, re.escape("half must be a list of names, and has ['Exp'] of type list")),
    ({"half": ["Cast"]}, ValueError, "half names 'Cast', which returns the type that it is asked for: leave it out"),
    ({"half": ["Exp"], "widest": ["Exp"]}, ValueError, "Exp stands in half and widest: leave it in one of them"),
    ({"half": ["Sum"], "float32": ["Sum"], "widest": ["Sum"]}, ValueError, "Sum stands in half and float32 and widest"),
    ({"half": ["Expp"], "enabled": False}, ValueError, "half names 'Expp'"),
    ({"dtype": _product}, TypeError, r"got <function _product.* write @tfmp\.autocast\(\)"),
    ({"device_type": "cuda", "dtype": "bfloat16"}, TypeError, _OF_TORCH.format("device_type, got 'cuda'")),
    ({"": "cuda", "dtype": "bfloat16"}, TypeError, _OF_TORCH.format("device, got 'cuda'")),
    ({"dtype": "bfloat16", "cache_enabled": True}, TypeError, _OF_TORCH.format("cache_enabled, got True")),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [pytest.param(*row, id=re.sub(r" at 0x\w+", "", str(row[0]))) for row in _REFUSED],
)
def test_arguments_that_cannot_be_meant_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    positional = [arguments[""]] if "" in arguments else []
    with pytest.raises(error, match=message), tfmp.autocast(*positional, **{k: v for k, v in arguments.items() if k}):
        pass
    assert (_product(), _replaced()) == ("float32", [])


@pytest.mark.parametrize("enabled", [True, False])
def test_what_cannot_be_decorated_is_refused(enabled: bool) -> None:
    above = r"put @tf.function above @tfmp.autocast\(\)"
    for wrong, message in (
        (_generator, _OUTSIDE),
        (_coroutine, _OUTSIDE),
        (tf.function(_product), above),
        (3, "got 3"),
    ):
        with pytest.raises(TypeError, match=message):
            tfmp.autocast(enabled=enabled)(wrong)


@pytest.mark.parametrize("owner", ["tensorflow.python.ops.math_ops", "tensorflow.python.no_such_module"])
def test_missing_private_function_is_named_and_nothing_replaced(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    missing = hooks._Replacement((owner,), ("_no_such_function",), lambda function: function)
    monkeypatch.setattr(hooks, "_REPLACEMENTS", (*hooks._REPLACEMENTS, missing))
    scope = tfmp.autocast()
    message = rf"does not know this TensorFlow, {tf.__version__}, which has no {owner}\._no_such_function"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message), scope:
            pass
    monkeypatch.undo()
    assert _replaced() == []
    with scope:
        assert _product() == "float16"


def test_replacement_that_fails_leaves_nothing_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Any) -> Any:
        raise ZeroDivisionError

    last = hooks._REPLACEMENTS[-1]
    monkeypatch.setattr(hooks, "_REPLACEMENTS", (*hooks._REPLACEMENTS, last._replace(around=fails)))
    with pytest.raises(ZeroDivisionError), tfmp.autocast():
        pass
    monkeypatch.undo()
    assert _replaced() == []


def _step(w: tf.Variable, x: tf.Tensor) -> list[Any]:
    @tf.custom_gradient
    def twice(x: tf.Tensor) -> Any:
        return x * 2, lambda dy: dy * 2

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: x @ w, lambda: x - 1)
        y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, twice(y)), [0, y])[1]
        mean, variance = tf.nn.moments(y, [0])
        loss = tf.reduce_mean(y / 3.0 + mean - variance * tf.exp(y))
        loss += tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(y, tf.nn.softmax(y)))
    return [loss, *tape.gradient(loss, [w, x])]


def _ops(step: Callable[..., Any]) -> Any:
    w = tf.Variable(tf.ones([2, 2]))
    found = tf.function(lambda x: step(w, x)).get_concrete_function(tf.TensorSpec([2, 2])).graph.as_graph_def()
    # The names of functions count up in the process, and decide on their order.
    nodes = [found.node, *(function.node_def for function in found.library.function)]
    return sorted(sorted((node.op, node.attr["T"].type, len(node.input)) for node in each) for each in nodes)


def test_off_is_off() -> None:
    off = tfmp.autocast(enabled=False)(_step)
    plain = _ops(_step)
    assert _ops(off) == _ops(tfmp.autocast()(off)) == plain
    assert _ops(tfmp.autocast()(_step)) != plain
    assert _ops(_step) == plain


@pytest.mark.parametrize("scope", [tfmp.autocast(enabled=False), tfmp.autocast()], ids=["off", "on"])
def test_graph_without_anything_to_cast_is_the_same_to_the_byte(scope: Any) -> None:
    def integers(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cond(x[0] > 0, lambda: x * 2, lambda: tf.nn.relu(x) + 1))

    def graph_def(function: Any) -> str:
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.int32, [3])
            function(x)
            names = graph.as_graph_def()
        return "\n".join(f"{node.op} {node.name} {list(node.input)}" for node in names.node)

    assert graph_def(scope(integers)) == graph_def(integers)
