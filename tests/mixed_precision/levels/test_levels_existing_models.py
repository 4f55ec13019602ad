"""Levels that are set on models of every Keras that exist."""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras
from levelled_models import (
    CASES,
    POLICIES,
    Case,
    gradients,
    outputs,
    policies,
    stored,
    values,
    with_given_weights,
)

import tfmp
from tfmp.any_keras.which import is_keras2

_X, _Y = CASES["sequential"].batch, np.ones([4, 2], np.float32)


def _named(report: tfmp.mixed_precision.PolicyReport) -> dict[str, str]:
    return {layer.name: layer.now for layer in report.layers}


def _computed(model: Any, case: Case) -> list[Any]:
    predicted = tf.nest.flatten(model.predict(case.batch, verbose=0)) if case is CASES["subclassed"] else []
    found = [*outputs(model, case.batch), *((each.dtype.name, each.tolist()) for each in predicted)]
    return [found, values(model), policies(model)]


@pytest.mark.parametrize("level", ["O1", "O2", "O1-bfloat16", "O2-bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@for_every_keras()
def test_model_that_is_set_computes_what_one_made_under_the_level_does_and_o0_gives_it_back(
    keras: ModuleType, case: Case, level: str, global_policy: Callable[[str], None]
) -> None:
    model, made = case.built(keras), case.built(keras, level)
    before, expected = _computed(model, case), _computed(made, case)
    # A level over another is the level alone.
    for each in ("O1-bfloat16", "O2", level):
        tfmp.set_precision(model, each)
    assert _computed(model, case) == expected
    assert (expected[0] != before[0], expected[1] == before[1], stored(model)) == (True, True, {"float32"})
    float32 = {name for name, each, _, _ in expected[2] if each == "float32"}
    assert {each for _, each, _, _ in expected[2]} - {"float32"} == {POLICIES[level]}
    assert float32 <= (set(case.o1) if level.startswith("O1") else set())
    report = tfmp.set_precision(model, level)
    assert [layer.before for layer in report.layers] == [layer.now for layer in report.layers]
    tfmp.set_precision(model, "O0")
    assert _computed(model, case) == before
    # O2 is the mixed policy of Keras, out of which O0 takes a model, too.
    global_policy(POLICIES[level])
    own = case.built(keras)
    global_policy("float32")
    assert level.startswith("O1") or _computed(own, case) == expected
    tfmp.set_precision(own, "O0")
    assert _computed(own, case) == before
    tfmp.set_precision(model, level)
    for each in (model, made):
        assert {grad.dtype for grad in gradients(each, case.batch)} == {tf.float32}


@for_every_keras()
def test_model_that_is_not_built_has_its_level_when_it_is(keras: ModuleType) -> None:
    case = CASES["sequential without an input"]
    for level in ("O1", "O3"):
        model = case.make(keras)
        tfmp.set_precision(model, level)
        model(case.batch)
        assert policies(model) == policies(case.built(keras, level))
        assert stored(model) == stored(case.built(keras, level))


@for_every_keras()
def test_report_tells_each_layer_with_the_reason(keras: ModuleType) -> None:
    layers = [keras.layers.Dense(4, name="body"), keras.layers.Dense(2, "softmax", name="head")]
    inner = keras.Sequential([keras.Input([3]), *layers], name="inner")
    others = [keras.layers.Dense(3, dtype="float64", name="wide"), keras.layers.Layer(dtype="int32", name="count")]
    last = keras.layers.Dense(1, name="last")
    model = keras.Sequential([keras.Input([3]), inner, others[0], last, others[1]], name="net")
    report = tfmp.set_precision(model, "O1-bfloat16", keep_float32=["last"])
    assert isinstance(report, tfmp.mixed_precision.PolicyReport)
    assert report.level == "O1-bfloat16"
    assert [tuple(layer) for layer in report.layers] == [
        ("net", "float32", "mixed_bfloat16", ""),
        ("inner", "float32", "mixed_bfloat16", ""),
        ("inner/body", "float32", "mixed_bfloat16", ""),
        ("inner/head", "float32", "float32", "O1-bfloat16 keeps it in float32"),
        ("wide", "float64", "float64", "computes in float64"),
        ("last", "float32", "float32", "in keep_float32"),
        ("count", "int32", "int32", "computes in int32"),
    ]


def _with_holders(keras: ModuleType) -> Any:
    """Return a model with a layer two floors below, which another model holds, too."""
    shared = keras.layers.Dense(3, name="shared")
    holder = keras.Sequential([keras.Input([3]), shared], name="holder")
    middle = keras.Sequential([keras.Input([3]), holder], name="middle")
    return keras.Sequential([keras.Input([3]), shared, middle, keras.layers.Dense(2, name="head")])


def _with_names(*names: str) -> Callable[[ModuleType], Any]:
    return lambda keras: keras.Sequential([keras.layers.Dense(2, name=each) for each in names])


def _with_slashes(keras: ModuleType) -> Any:
    inner = keras.Sequential([keras.Input([2]), keras.layers.Dense(2, name="encoder/layer_0")], name="net")
    return keras.Sequential([inner, keras.layers.Dense(2, name="head")])


_SUBCLASSED = CASES["subclassed"].built

#: A model, the names of layers or patterns that are to be kept in float32, and the layers that are kept for them.
_KEPT: dict[str, tuple[Callable[[ModuleType], Any], Any, list[str]]] = {
    "name": (_SUBCLASSED, ["head"], ["head"]),
    "path": (_SUBCLASSED, ["block/dense"], ["block/dense"]),
    "patterns": (_SUBCLASSED, [".*norm", "b.*h"], ["block/norm", "block/batch"]),
    "compiled": (_SUBCLASSED, [re.compile("HEAD", re.IGNORECASE)], ["head"]),
    "holder": (_SUBCLASSED, ["block"], ["block"]),
    "all": (_SUBCLASSED, [".*"], ["block", "head"]),
    "attention": (CASES["attention"].built, ["attend"], ["attend"]),
    "recurrent": (CASES["recurrent"].built, ["lstm", "both"], ["lstm", "both"]),
    "cells of a stack": (CASES["recurrent"].built, ["stacked"], ["stacked"]),
    "two floors below, shared": (_with_holders, ["middle"], ["middle", "shared"]),
    "names that are no patterns": (_with_names("head(1)", "a+b", "c"), ["head(1)", "a+b"], ["head(1)", "a+b"]),
    **{
        f"slash, {pattern}": (_with_slashes, [pattern], ["net/encoder/layer_0"])
        for pattern in ("net/encoder/layer_0", "layer_0", r"encoder/layer_\d")
    },
}


@pytest.mark.parametrize("name", _KEPT)
@for_every_keras()
def test_layers_are_kept_by_name_path_or_pattern_with_all_that_they_hold(keras: ModuleType, name: str) -> None:
    if "slash" in name and not is_keras2(keras):
        pytest.skip("Keras 3 refuses such names")
    make, patterns, kept = _KEPT[name]
    model = make(keras)
    found = _named(tfmp.set_precision(model, "O2", keep_float32=iter(patterns)))
    held = {each for each in found for one in kept if each == one or each.startswith(f"{one}/")}
    assert set(kept) <= held
    assert {each for each, now in found.items() if now == "float32"} == held
    assert set(found.values()) <= {"float32", "mixed_float16"}
    assert len(found) == len(policies(model))
    # Keeping a layer is not for ever.
    assert set(_named(tfmp.set_precision(model, "O2")).values()) == {"mixed_float16"}


@for_every_keras()
def test_training_goes_on_with_the_slots_of_the_optimizer(keras: ModuleType) -> None:
    def compiled() -> Any:
        layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = with_given_weights(keras.Sequential([keras.Input([3]), *layers]))
        inner = keras.optimizers.SGD(0.1, momentum=0.5)
        model.compile(tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(2.0**10)), "mse")
        return model

    model, reference = compiled(), compiled()
    optimizer, seen = model.optimizer, []
    call = model.layers[0].call

    def seeing(x: Any, training: bool | None = None) -> Any:
        seen.append(x.dtype.name)
        return call(x)

    model.layers[0].call = seeing
    for level in ("O0", "O2", "O1-bfloat16", "O0"):
        before = [each.numpy().tolist() for each in optimizer.variables]
        tfmp.set_precision(model, level)
        assert [each.numpy().tolist() for each in optimizer.variables] == before
        for each in (model, reference):
            each.fit(_X, _Y, verbose=0)
    assert model.optimizer is optimizer
    assert int(optimizer.applied_steps) == 4
    assert list(dict.fromkeys(seen)) == ["float32", "float16", "bfloat16"]
    for one, other in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05)
        assert one.dtype == np.float32


@pytest.mark.parametrize("form", ["keras", "h5", "weights", "tf"])
@for_every_keras()
def test_loaded_model_is_set(keras: ModuleType, form: str, tmp_path: Path) -> None:
    if form == "tf" and not is_keras2(keras):
        pytest.skip("Keras 3 loads no SavedModel")
    case = CASES[{"tf": "sequential", "weights": "subclassed"}.get(form, "convolutional")]
    model = case.built(keras)
    if form == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        loaded = case.built(keras)
        loaded.load_weights(tmp_path / "model.weights.h5")
    else:
        path = tmp_path / (form if form == "tf" else f"model.{form}")
        with warnings.catch_warnings():
            # Keras 2 advises against HDF5.
            warnings.simplefilter("ignore")
            model.save(path, **({"save_format": "tf"} if form == "tf" else {}))
        loaded = keras.models.load_model(path, compile=False)
    for level in ("O2", "O0"):
        tfmp.set_precision(loaded, level)
        tfmp.set_precision(model, level)
        assert outputs(loaded, case.batch) == outputs(model, case.batch)


@for_every_keras()
def test_function_that_is_traced_afterwards_computes_half(keras: ModuleType) -> None:
    model = CASES["sequential"].built(keras)
    traced = tf.function(model)
    assert traced(_X).dtype == tf.float32
    tfmp.set_precision(model, "O2")
    assert (traced(_X).dtype, tf.function(model.__call__)(_X).dtype) == (tf.float32, tf.float16)


@for_every_keras()
def test_model_at_o3_is_set_to_it_again_with_what_is_in_float32(keras: ModuleType) -> None:
    class Own(keras.layers.Layer):  # type: ignore[name-defined] # of any Keras
        def build(self, input_shape: Any) -> None:
            self.scale = self.add_weight(shape=[], initializer="ones", name="scale", dtype="float32")

        def call(self, x: Any) -> Any:
            return x * tf.cast(self.scale, x.dtype)

    with tfmp.precision("O3"):
        layers = [keras.layers.Dense(4, name="body"), Own()]
        with tfmp.precision("O0"):
            layers.append(keras.layers.Dense(2, name="head"))
        model = keras.Sequential([keras.Input([3]), *layers], name="net")
    model(_X)
    expected = [policies(model), values(model)]
    tfmp.set_precision(model, "O3", keep_float32=["head"])
    assert [policies(model), values(model)] == expected


def _quantized(keras: ModuleType) -> Any:
    model = CASES["sequential"].built(keras)
    model.layers[-1].quantize("int8")
    return model


def _simulating(module: str, keras: ModuleType) -> Any:
    # As TensorFlow Model Optimization has them.
    simulating = type("Simulating", (keras.layers.Wrapper,), {"call": lambda self, x: self.layer(x)})
    simulating.__module__ = f"tensorflow_model_optimization.python.core.{module}"
    layer = type("Own", (simulating,), {})(keras.layers.Dense(2), name="quant_head")
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(3), layer])


_AT_O3 = functools.partial(CASES["sequential"].built, level="O3")
_NO_LAYERS = "the model 'net' has no layers yet: add them, or call it on a batch"
_NO_O3 = "the layer 'net' has weights in float32, and would have them in float16 at O3"
_NO_MATCH = "keep_float32 has 'haed', which matches no layer. The layers are block, block/dense, .*head"
_HOLDS_NONE = "The layers are none: a layer that has no layers is kept by the level O0"

#: A model, the level, what is to be kept, the error and its message.
_WRONG: dict[str, tuple[Callable[[ModuleType], Any], Any, Any, type[Exception], str]] = {
    "unknown level": (_SUBCLASSED, "O5", (), ValueError, "no precision level 'O5': did you mean"),
    "level of another type": (_SUBCLASSED, 2, (), TypeError, "a precision level is a string"),
    "O3 over float32 weights": (_SUBCLASSED, "O3", (), ValueError, _NO_O3),
    **{
        f"{level} over O3": (
            *(_AT_O3, level, (), ValueError),
            rf"has weights in float16, and would have them in .* at {level}\..* `with tfmp\.precision\('{level}'\)`",
        )
        for level in ("O0", "O1", "O2", "O3-bfloat16")
    },
    "kept at O3": (_AT_O3, "O3", ["head"], ValueError, "'head' has weights in float16"),
    "no such layer": (_SUBCLASSED, "O2", ["head", "haed"], ValueError, _NO_MATCH),
    "no pattern": (_SUBCLASSED, "O2", ["*head"], ValueError, r"has '\*head', which is no regular expression"),
    **{
        f"kept {wrong!r}": (_SUBCLASSED, "O2", wrong, TypeError, "keep_float32")
        for wrong in ("head", [b"head"], ["head", 3], None)
    },
    "layer that holds none": (lambda keras: keras.layers.Dense(2), "O2", ["dense"], ValueError, _HOLDS_NONE),
    "model without layers": (lambda keras: keras.Sequential(name="net"), "O2", (), ValueError, _NO_LAYERS),
    "model that makes them later": (
        lambda keras: type("Own", (keras.Model,), {})(name="net"),
        "O2",
        (),
        ValueError,
        _NO_LAYERS,
    ),
    "quantized": (_quantized, "O2", (), ValueError, "the layers head are quantized"),
    "quantized to O0": (_quantized, "O0", (), ValueError, "the layers head are quantized"),
    **{
        module: (functools.partial(_simulating, module), "O2", (), ValueError, "the layers quant_head are quantized")
        for module in ("quantize_wrapper", "quantize_layer", "cluster_wrapper")
    },
}


@pytest.mark.parametrize("name", _WRONG)
@for_every_keras()
def test_wrong_call_is_refused_and_nothing_is_changed(keras: ModuleType, name: str) -> None:
    make, level, kept, error, message = _WRONG[name]
    if is_keras2(keras) if "quantized" in name else not is_keras2(keras) and "quant_head" in message:
        pytest.skip("needs the other Keras")
    model = make(keras)
    # What is not built has no weights yet.
    before = (policies(model), values(model) if model.built else [])
    with pytest.raises(error, match=message):
        tfmp.set_precision(model, level, keep_float32=kept)
    assert (policies(model), values(model) if model.built else []) == before
    if "quant_head" in message:
        with pytest.raises(ValueError, match=r"quant_head\. Pass .* the model before it was quantized"):
            tfmp.check_precision(model, "mse", [(_X, _Y)], progress=False)


@for_every_keras()
def test_what_is_no_layer_is_refused(keras: ModuleType) -> None:
    wrong = [None, "net", tf.Module(), keras.layers.Dense, keras.optimizers.SGD(), [keras.layers.Dense(2)]]
    for each in [*wrong, keras.metrics.Mean()]:
        with pytest.raises(TypeError, match="model must be a model or a layer of Keras, got "):
            tfmp.set_precision(each, "O2")


@for_every_keras("keras3")
def test_map_of_policies_counts_by_its_types(keras: ModuleType) -> None:
    default = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    layer = keras.layers.Dense(2, dtype=keras.dtype_policies.DTypePolicyMap(default_policy=default), name="head")
    layer.build([None, 3])
    report = tfmp.set_precision(layer, "O2")
    assert [tuple(each) for each in report.layers] == [("head", "mixed_bfloat16", "mixed_float16", "")]
    # What is changed is the entry of the layer in its map.
    assert (layer.compute_dtype, layer.variable_dtype) == ("float16", "float32")
