"""What a scope replaces in TensorFlow, how functions and methods are decorated, and what is refused."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from autocast_ways import types

import tfmp
from tfmp.mixed_precision.autocast import hooks

#: Tells which functions are replaced.
_Replaced = Callable[[], list[str]]


def _product() -> str:
    return (tf.ones([2, 3]) @ tf.ones([3, 2])).dtype.name


def test_every_function_is_replaced_within_a_scope_only_also_after_an_error_and_nothing_is_added(
    replaced: _Replaced,
) -> None:
    functions = hooks._functions()
    before = {path: set(vars(owner)) for path, (owner, _, _) in functions.items()}

    def found() -> list[Any]:
        return [getattr(owner, name) for owner, name, _ in functions.values()]

    with tfmp.autocast(enabled=False):
        assert (_product(), replaced()) == ("float32", [])
    with tfmp.autocast():
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.ones([2, 3]) @ tf.ones([2, 3])
        assert (_product(), replaced()) == ("float16", list(functions))
        outer = found()
        with tfmp.autocast("bfloat16"):
            assert found() == outer
    assert replaced() == []
    assert {path: set(vars(owner)) for path, (owner, _, _) in functions.items()} == before


def test_scopes_are_left_in_any_order(replaced: _Replaced) -> None:
    first, second = tfmp.autocast(), tfmp.autocast(enabled=False)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert (_product(), replaced()) == ("float32", [])

    def products() -> Iterator[str]:
        with tfmp.autocast():
            yield _product()
            yield _product()

    generator = products()
    assert next(generator) == "float16"
    with tfmp.autocast("bfloat16"):
        next(generator)
    generator.close()
    assert (_product(), replaced()) == ("float32", [])
    with pytest.raises(RuntimeError):
        tfmp.autocast().__exit__(None, None, None)


class _Decorated(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scope, self.w = tfmp.autocast("bfloat16"), tf.Variable(tf.ones([2, 2]))

    @tfmp.autocast()
    def method(self, times: int = 1, *, flag: bool = False) -> tuple[int, bool, str]:
        """Compute it."""
        return times, flag, _product()

    static = staticmethod(tfmp.autocast()(_product))
    of_class = classmethod(tfmp.autocast()(lambda cls: (cls.__name__, _product())))

    @tf.function
    @tfmp.autocast()
    def converted(self, x: tf.Tensor, *, training: bool = False) -> tf.Tensor:
        y = x @ self.w
        if tf.reduce_sum(x) > 0:
            y = y * 2
        return y if training else -y

    @tf.function
    def entering(self, x: tf.Tensor) -> tf.Tensor:
        with self.scope:
            return x @ self.w


def test_decorated_functions_of_all_kinds_run_in_the_scope_and_look_as_before() -> None:
    decorated, method = _Decorated(), _Decorated.method
    assert decorated.method(3, flag=True) == (3, True, "float16")
    assert (decorated.static(), _Decorated.of_class()) == ("float16", ("_Decorated", "float16"))
    assert tfmp.autocast("bfloat16")(_Decorated.static)() == "float16"
    for function in (lambda: [_product()][0], functools.partial(_product)):
        assert (tfmp.autocast("bfloat16")(function)(), _product()) == ("bfloat16", "float32")
    assert (method.__name__, method.__doc__, method.__module__) == ("method", "Compute it.", __name__)
    assert list(inspect.signature(method).parameters) == ["self", "times", "flag"]
    assert tf.function(method).function_spec.arg_names == ["self", "times"]


def test_autograph_converts_decorated_methods_and_a_scope_can_be_an_attribute() -> None:
    model = _Decorated()
    for sign, expected in ((1.0, 4.0), (-1.0, -2.0)):
        y = model.converted(tf.fill([2, 2], sign), training=True)
        assert (y.dtype.name, y.numpy().tolist()) == ("float16", [[expected] * 2] * 2)
    assert model.converted(tf.ones([1, 2])).numpy().tolist() == [[-4, -4]]
    assert model.entering(tf.ones([1, 2])).dtype == tf.bfloat16
    assert types(model.variables) == ["float32"]


def test_subclass_may_have_arguments_like_those_of_torch() -> None:
    class OfSubclass(tfmp.autocast):
        def __init__(self, device_type: str) -> None:
            super().__init__("bfloat16")
            self.device_type = device_type

    assert OfSubclass("cuda").device_type == OfSubclass(device_type="cuda").device_type == "cuda"


_OF_TORCH = "^tfmp.autocast takes no {}, .* leave it out, and write tfmp.autocast"

#: Arguments of the scope, and what it then says.
_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dtype": "float32"}, ValueError, "float16 or bfloat16, got 'float32'"),
    ({"dtype": tf.float64}, ValueError, "float16 or bfloat16, got tf.float64"),
    ({"dtype": ["float16"]}, ValueError, re.escape("got ['float16']")),
    ({"dtype": "float32", "enabled": False}, ValueError, "got 'float32'"),
    ({"enabled": "False"}, TypeError, "enabled must be True or False, got 'False' of type str"),
    ({"half": "Exp"}, TypeError, "half must be a list of names, got 'Exp' of type str"),
    ({"half": ["Matmul"]}, ValueError, "half names 'Matmul'.*did you mean.*MatMul"),
    ({"float32": ["Softmaxx"]}, ValueError, "float32 names 'Softmaxx'.*did you mean.*Softmax"),
    ({"half": [tf.exp]}, TypeError, "half must be a list of names, and has <function exp"),
    ({"half": ["MatMul", "xyzzy_qq"]}, ValueError, "half names 'xyzzy_qq'.*see dir"),
    ({"half": ["Cast"]}, ValueError, "half names 'Cast', which returns the type that it is asked for: leave it out"),
    ({"half": ["Sum"], "float32": ["Sum"], "widest": ["Sum"]}, ValueError, "Sum stands in half and float32 and widest"),
    ({"half": ["Expp"], "enabled": False}, ValueError, "half names 'Expp'"),
    ({"dtype": _product}, TypeError, r"got <function _product.* write @tfmp\.autocast\(\)"),
    ({"device_type": "cuda", "dtype": "bfloat16"}, TypeError, _OF_TORCH.format("device_type, got 'cuda'")),
    ({"": "cuda", "dtype": "bfloat16"}, TypeError, _OF_TORCH.format("device, got 'cuda'")),
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


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_no_python_function_is_not_decorated(enabled: bool) -> None:
    for wrong, message in ((tf.function(_product), r"put @tf.function above @tfmp.autocast\(\)"), (3, "got 3")):
        with pytest.raises(TypeError, match=message):
            tfmp.autocast(enabled=enabled)(wrong)


def _fails(function: Any) -> Any:
    raise ZeroDivisionError("no such row")


@pytest.mark.parametrize("owner", ["tensorflow.python.ops.math_ops", "tensorflow.python.no_such_module", None])
def test_nothing_is_replaced_if_one_function_cannot_be(
    owner: str | None, replaced: _Replaced, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, error, message = tfmp.autocast(), ZeroDivisionError, "no such row"
    replacement = hooks._REPLACEMENTS[-1]._replace(around=_fails)
    if owner is not None:
        replacement = hooks._Replacement((owner,), ("_no_such_function",), lambda function: function)
        error, message = RuntimeError, rf"this TensorFlow, {tf.__version__}, which has no {owner}\._no_such_function"
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "_REPLACEMENTS", (*hooks._REPLACEMENTS, replacement))
        for _ in range(2):
            with pytest.raises(error, match=message), scope:
                pass
    assert replaced() == []
    with scope:
        assert _product() == "float16"


@pytest.mark.parametrize(
    ("scopes", "dtype"),
    [
        ([tfmp.autocast(enabled=False)], tf.float32),
        ([tfmp.autocast(), tfmp.autocast(enabled=False)], tf.float32),
        ([tfmp.autocast()], tf.int32),
    ],
    ids=["off", "off within", "nothing to cast"],
)
def test_graph_of_a_scope_that_casts_nothing_has_the_same_ops_of_the_same_names(
    scopes: list[Any], dtype: tf.DType
) -> None:
    def ops(*scopes: Any) -> Any:
        with tf.Graph().as_default() as graph, contextlib.ExitStack() as entered:
            x = tf.compat.v1.placeholder(dtype, [2, 2])
            for scope in scopes:
                entered.enter_context(scope)
            y = tf.cond(x[0, 0] > 0, lambda: x @ x, lambda: x - 1)
            y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.nn.relu(y) * 2), [0, y])[1]
            total = tf.reduce_sum(y if dtype == tf.int32 else y / 3.0 + tf.nn.moments(y, [0])[1] * tf.nn.softmax(y))
            if dtype == tf.float32:
                tf.gradients(total, x)
        found = graph.as_graph_def()
        # The names of functions count up in the process, and decide on their order.
        inner = [[(node.op, node.attr["T"].type) for node in each.node_def] for each in found.library.function]
        return [(node.op, node.name, [*node.input]) for node in found.node], sorted(sorted(each) for each in inner)

    assert ops(*scopes) == ops()
