"""The lists are TensorFlow's, and arguments that cannot be meant are refused before anything is replaced."""

import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import op_def_library

import tfmp

_HEADER = "tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
_METHODS = {"allow": "AllowList", "infer": "InferList", "deny": "DenyList", "clear": "ClearList"}
_TENSOR_LIST_OPS = "AddTensorListOps"


def _header() -> str:
    return (pathlib.Path(tf.sysconfig.get_include()) / _HEADER).read_text()


def _names(text: str) -> set[str]:
    named = re.findall(r'"([A-Z]\w*)"', text)
    return {name for name in named if name != name.upper() and hasattr(tf.raw_ops, name)}


def _lists_of_header(class_name: str) -> dict[str, set[str]]:
    """Return the lists without the ops of custom kernels, and without what only oneDNN adds."""
    header = _header()
    (body,) = re.findall(rf"class {class_name} : .*?\n}};", header, re.DOTALL)
    body = re.sub(r"if \(use_onednn_\) \{.*?\}", "", body, flags=re.DOTALL)
    (tensor_lists,) = re.findall(rf"static void {_TENSOR_LIST_OPS}.*?\n  }}", header, re.DOTALL)
    found = {}
    for name, method in _METHODS.items():
        (text,) = re.findall(rf"FlatSet<string> {method}\(\) override \{{.*?return list;", body, re.DOTALL)
        found[name] = _names(text) | (_names(tensor_lists) if f"{_TENSOR_LIST_OPS}(" in text else set())
    return found


def _is_typed_twice(header: str) -> bool:
    # TensorFlow 2.15 lacks a comma there, which makes one name of two.
    return re.search(r'"Sum"\s+"Tanh"', header) is not None


def test_header_is_read() -> None:
    found = _lists_of_header("AutoMixedPrecisionLists(?:Fp16|Cuda)")
    assert {name: len(ops) > 5 for name, ops in found.items()} == dict.fromkeys(_METHODS, True)
    assert "TensorListStack" in found["clear"]
    assert "Conv3D" in found["allow"]


def test_lists_of_float16_are_those_of_tensorflow() -> None:
    found = _lists_of_header("AutoMixedPrecisionLists(?:Fp16|Cuda)")
    found["allow"].add("BatchMatMulV3")
    assert tfmp.autocast_lists()._asdict() == found
    assert tfmp.autocast_lists("float16") == tfmp.autocast_lists()


@pytest.mark.skipif(_is_typed_twice(_header()), reason="this TensorFlow lacks a comma between two names")
def test_types_that_bfloat16_changes_are_those_of_tensorflow() -> None:
    float16, bfloat16 = (_lists_of_header(f"AutoMixedPrecisionLists{name}") for name in ("(?:Fp16|Cuda)", "Mkl"))
    lists, of_float16 = tfmp.autocast_lists("bfloat16"), tfmp.autocast_lists()
    assert lists.infer - of_float16.infer == bfloat16["infer"] - float16["infer"]
    assert of_float16.deny - lists.deny == float16["deny"] - bfloat16["deny"]
    assert lists.deny == bfloat16["deny"]


@pytest.mark.skipif(_is_typed_twice(_header()), reason="this TensorFlow lacks a comma between two names")
@pytest.mark.parametrize("name", list(_METHODS))
def test_what_tensorflow_lists_for_bfloat16_is_listed(name: str) -> None:
    found = _lists_of_header("AutoMixedPrecisionListsMkl")[name]
    changes = {op for op in found if _changes_types(op, tf.bfloat16)}
    assert sorted(changes - getattr(tfmp.autocast_lists("bfloat16"), name)) == []


def _changes_types(op: str, dtype: tf.DType) -> bool:
    """Return whether the place of an op in the lists changes what it computes in."""
    op_def = op_def_library.op_def_registry.get(op)
    results = {result.type_attr for result in op_def.output_arg}
    allowed = {each.name: each.allowed_values.list.type for each in op_def.attr}
    groups = {given.type_attr for given in op_def.input_arg} & results - {""}
    return any(not allowed[group] or dtype.as_datatype_enum in allowed[group] for group in groups)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_op_stands_in_one_list_and_tensorflow_has_it(dtype: str) -> None:
    ops = [op for ops in tfmp.autocast_lists(dtype) for op in ops]
    assert len(ops) == len(set(ops))
    assert [op for op in ops if not hasattr(tf.raw_ops, op)] == []


@pytest.mark.parametrize("dtype", ["half", tf.float16, np.float16, tf.bfloat16, tf.bfloat16.as_numpy_dtype])
def test_type_can_be_given_in_each_way(dtype: Any) -> None:
    with tfmp.autocast(dtype):
        product = tf.ones([1, 1]) @ tf.ones([1, 1])
    assert product.dtype == tf.as_dtype(dtype)
    assert tfmp.autocast_lists(dtype) == tfmp.autocast_lists(tf.as_dtype(dtype))


def test_lists_that_are_returned_change_nothing() -> None:
    lists = tfmp.autocast_lists()
    assert {type(ops) for ops in lists} == {frozenset}
    lists._replace(allow=frozenset())
    assert "MatMul" in tfmp.autocast_lists().allow


def _result(argument: str, op: str, compute: Any, dtype: str = "float16") -> str:
    half = tf.cast(tf.fill([2, 2], 0.5), dtype)
    names: dict[str, Any] = {argument: [op]}
    with tfmp.autocast(dtype, **names):
        return compute(half).dtype.name


@pytest.mark.parametrize(
    ("op", "compute", "own"),
    [
        ("Exp", tf.exp, "float32"),
        ("MatMul", lambda x: tf.matmul(x, x), "float16"),
        ("Tanh", tf.tanh, "float16"),
        ("Abs", tf.abs, "float16"),
        ("Cumsum", tf.cumsum, "float32"),
    ],
    ids=["deny", "allow", "infer", "clear", "unlisted"],
)
def test_op_of_each_list_can_be_moved_to_each(op: str, compute: Any, own: str) -> None:
    with tfmp.autocast():
        assert compute(tf.ones([2, 2], tf.float16)).dtype == own
    assert _result("half", op, compute) == "float16"
    assert _result("float32", op, compute) == "float32"
    assert _result("widest", op, compute) == "float16"


def test_op_named_half_computes_so_for_float32_inputs() -> None:
    x = tf.fill([2, 2], 0.5)
    with tfmp.autocast(half=["Exp"]):
        assert tf.exp(x).dtype == tf.float16
    with tfmp.autocast(widest=["MatMul"]):
        assert tf.matmul(x, x).dtype == tf.float32


def test_scopes_within_each_other_have_their_own_lists() -> None:
    x = tf.ones([2, 2])
    with tfmp.autocast("bfloat16", half=["Exp"]):
        before = tf.exp(x)
        with tfmp.autocast(float32=["MatMul"]):
            within = [tf.exp(x), x @ x]
        after = tf.exp(x)
    assert [each.dtype.name for each in [before, *within, after]] == ["bfloat16", "float32", "float32", "bfloat16"]


def test_names_can_come_from_any_iterable() -> None:
    x = tf.ones([2, 2])
    for names in (("Exp", "Pow"), {"Exp", "Pow"}, (name for name in ["Exp", "Pow"]), iter(["Exp", "Pow"])):
        with tfmp.autocast(half=names):
            assert (tf.exp(x).dtype, tf.pow(x, 2).dtype) == (tf.float16, tf.float16)


_REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dtype": "float32"}, ValueError, "float16 or bfloat16, got 'float32'"),
    ({"dtype": tf.float64}, ValueError, "float16 or bfloat16, got tf.float64"),
    ({"dtype": "int8"}, ValueError, "got 'int8'"),
    ({"dtype": "float8_e5m2"}, ValueError, "got 'float8_e5m2'"),
    ({"dtype": "fp16"}, ValueError, "got 'fp16'"),
    ({"dtype": "mixed_float16"}, ValueError, "got 'mixed_float16'"),
    ({"dtype": None}, ValueError, "got None"),
    ({"dtype": True}, ValueError, "got True"),
    ({"dtype": ["float16"]}, ValueError, re.escape("got ['float16']")),
    ({"dtype": "float32", "enabled": False}, ValueError, "got 'float32'"),
    ({"half": "Exp"}, TypeError, "half must be a list of names, got 'Exp' of type str"),
    ({"float32": "MatMul"}, TypeError, "float32 must be a list of names"),
    ({"widest": ""}, TypeError, "widest must be a list of names"),
    ({"half": None}, TypeError, "half must be a list of names"),
    ({"half": 3}, TypeError, "half must be a list of names"),
    ({"half": ["Matmul"]}, ValueError, "half names 'Matmul'.*did you mean.*MatMul"),
    ({"float32": ["Softmaxx"]}, ValueError, "float32 names 'Softmaxx'.*did you mean.*Softmax"),
    ({"widest": ["exp"]}, ValueError, "widest names 'exp'.*did you mean.*Exp"),
    ({"half": ["matmul"]}, ValueError, "half names 'matmul'.*did you mean.*MatMul"),
    pytest.param({"half": [tf.exp]}, TypeError, "half must be a list of names, and has <function exp", id="function"),
    ({"half": ["MatMul", "xyzzy_qq"]}, ValueError, "half names 'xyzzy_qq'.*see dir"),
    ({"half": ["Exp", None]}, TypeError, "half must be a list of names, and has None of type NoneType"),
    ({"half": [["Exp"]]}, TypeError, re.escape("half must be a list of names, and has ['Exp'] of type list")),
    ({"half": ["Cast"]}, ValueError, "half names 'Cast', which returns the type that it is asked for: leave it out"),
    ({"half": ["Exp"], "widest": ["Exp"]}, ValueError, "Exp stands in half and widest: leave it in one of them"),
    ({"half": ["Sum"], "float32": ["Sum"], "widest": ["Sum"]}, ValueError, "Sum stands in half and float32 and widest"),
    ({"half": ["Expp"], "enabled": False}, ValueError, "half names 'Expp'"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), _REFUSED, ids=[str(arguments) for arguments, _, _ in _REFUSED]
)
def test_arguments_that_cannot_be_meant_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = (pywrap_tfe.TFE_Py_FastPathExecute, op_def_library._apply_op_helper)
    with pytest.raises(error, match=message), tfmp.autocast(**arguments):
        pass
    assert (pywrap_tfe.TFE_Py_FastPathExecute, op_def_library._apply_op_helper) == before
    assert (tf.ones([1, 1]) @ tf.ones([1, 1])).dtype == tf.float32


@pytest.mark.parametrize("dtype", ["float32", None, "fp8", tf.int32])
def test_lists_of_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be a half-precision type, float16 or bfloat16, got"):
        tfmp.autocast_lists(dtype)
