"""Levels that are set on models of every Keras that exist."""

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
    for_every_case,
    global_policy,
    gradients,
    policies,
    policy,
    stored,
    values,
    with_given_weights,
)

import tfmp
from tfmp.hosts.keras.which import is_keras2

__all__ = ["global_policy"]

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def _outputs(model: Any, x: Any) -> list[Any]:
    """Return the outputs of a model with their types."""
    return [(each.dtype.name, each.numpy().tolist()) for each in tf.nest.flatten(model(x))]


def _predicted(model: Any, x: Any) -> list[Any]:
    """Return what predict returns, with its types."""
    return [(each.dtype.name, each.tolist()) for each in tf.nest.flatten(model.predict(x, verbose=0))]


def _named(report: tfmp.mixed_precision.PolicyReport) -> dict[str, str]:
    return {layer.name: layer.now for layer in report.layers}


@pytest.mark.parametrize("level", ["O1", "O2", "O1-bfloat16"])
@for_every_case
@for_every_keras()
def test_model_gets_the_policies_of_one_that_is_made_under_the_level(keras: ModuleType, case: Case, level: str) -> None:
    model, expected = case.built(keras), case.built(keras, level)
    before = values(model)
    tfmp.set_precision(model, level)
    assert policies(model) == policies(expected)
    assert values(model) == before == values(expected)
    assert stored(model) == {"float32"}
    for one, other in zip(tf.nest.flatten(model(case.batch)), tf.nest.flatten(expected(case.batch)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert {grad.dtype for grad in gradients(model, case.batch)} == {tf.float32}


@for_every_case
@for_every_keras()
@pytest.mark.essential
def test_o0_gives_back_the_float32_model_bit_for_bit(keras: ModuleType, case: Case) -> None:
    model = case.built(keras)
    expected, before, types = _outputs(model, case.batch), values(model), policies(model)
    for level in ("O2", "O1-bfloat16"):
        tfmp.set_precision(model, level)
        if level == "O2":
            assert _outputs(model, case.batch) != expected
        tfmp.set_precision(model, "O0")
        assert _outputs(model, case.batch) == expected
        assert (values(model), policies(model)) == (before, types)


@pytest.mark.parametrize("name", ["sequential without an input", "nested", "subclassed"])
@for_every_keras()
def test_o0_gives_back_the_predictions_bit_for_bit(keras: ModuleType, name: str) -> None:
    model, x = CASES[name].built(keras), CASES[name].batch
    expected = _predicted(model, x)
    tfmp.set_precision(model, "O2")
    assert {dtype for dtype, _ in _predicted(model, x)} == {"float16"}
    tfmp.set_precision(model, "O0")
    assert _predicted(model, x) == expected


@pytest.mark.parametrize("mixed", ["mixed_float16", "mixed_bfloat16"])
@for_every_case
@for_every_keras()
def test_o0_takes_a_model_out_of_the_mixed_policy_that_it_was_made_under(
    keras: ModuleType, case: Case, mixed: str, global_policy: Callable[[str], None]
) -> None:
    plain = case.built(keras)
    global_policy(mixed)
    model = case.built(keras)
    global_policy("float32")
    tfmp.set_precision(model, "O0")
    assert {each for _, each, _, _ in policies(model)} == {"float32"}
    assert _outputs(model, case.batch) == _outputs(plain, case.batch)


@pytest.mark.parametrize("name", ["functional", "subclassed", "attention"])
@for_every_keras()
def test_level_over_another_is_the_level_alone(keras: ModuleType, name: str) -> None:
    case = CASES[name]
    model, expected = case.built(keras), case.built(keras)
    for level in ("O1-bfloat16", "O0", "O1", "O2", "O2"):
        tfmp.set_precision(model, level)
    report = tfmp.set_precision(model, "O2")
    assert [layer.before for layer in report.layers] == [layer.now for layer in report.layers]
    tfmp.set_precision(expected, "O2")
    assert policies(model) == policies(expected)
    assert _outputs(model, case.batch) == _outputs(expected, case.batch)


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
def test_policies_are_those_of_keras(keras: ModuleType) -> None:
    layer = keras.layers.Dense(2)
    for level, name in POLICIES.items():
        tfmp.set_precision(layer, level)
        assert policy(layer) == name
        assert policy(keras.layers.Dense.from_config(layer.get_config())) == name


@for_every_keras()
def test_shared_layer_is_listed_once(keras: ModuleType) -> None:
    model = CASES["shared layer"].built(keras)
    names = [layer.name for layer in tfmp.set_precision(model, "O2").layers]
    assert names.count("shared") == 1
    assert len(names) == len(set(names)) == 3


@for_every_keras()
def test_report_tells_each_layer_and_prints_a_table(keras: ModuleType) -> None:
    layers = [keras.layers.Dense(4, name="body"), keras.layers.Dense(2, "softmax", name="head")]
    inner = keras.Sequential([keras.Input([3]), *layers], name="inner")
    model = keras.Sequential([keras.Input([3]), inner, keras.layers.Dense(1, name="last")], name="net")
    report = tfmp.set_precision(model, "O1-bfloat16", keep_float32=["last"])
    assert isinstance(report, tfmp.mixed_precision.PolicyReport)
    assert report.level == "O1-bfloat16"
    assert [tuple(layer) for layer in report.layers] == [
        ("net", "float32", "mixed_bfloat16", ""),
        ("inner", "float32", "mixed_bfloat16", ""),
        ("inner/body", "float32", "mixed_bfloat16", ""),
        ("inner/head", "float32", "float32", "O1-bfloat16 keeps it in float32"),
        ("last", "float32", "float32", "in keep_float32"),
    ]
    assert str(report).splitlines() == [
        "layer       before   O1-bfloat16",
        "net         float32  mixed_bfloat16",
        "inner       float32  mixed_bfloat16",
        "inner/body  float32  mixed_bfloat16",
        "inner/head  float32  float32         O1-bfloat16 keeps it in float32",
        "last        float32  float32         in keep_float32",
    ]


_INNER = ["block/dense", "block/norm", "block/batch"]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["head"], ["head"]),
        (["block/dense"], ["block/dense"]),
        (["dense"], ["block/dense"]),
        ([".*norm", "b.*h"], ["block/norm", "block/batch"]),
        ([re.compile("HEAD", re.IGNORECASE)], ["head"]),
        (["block/.*"], _INNER),
        (["block"], ["block", *_INNER]),
        (("head", "norm"), ["block/norm", "head"]),
        ({"head": 1}.keys(), ["head"]),
        ([".*"], ["block", *_INNER, "head"]),
        ([], []),
    ],
)
@for_every_keras("keras3", "keras2")
def test_layers_are_kept_by_name_path_or_pattern(keras: ModuleType, patterns: Any, kept: list[str]) -> None:
    model = CASES["subclassed"].built(keras)
    found = _named(tfmp.set_precision(model, "O2", keep_float32=iter(patterns)))
    assert {name for name, now in found.items() if now == "float32"} == set(kept)
    assert set(found) == {"net", "block", *_INNER, "head"}


@for_every_keras()
def test_pattern_must_match_the_whole_name(keras: ModuleType) -> None:
    model = CASES["subclassed"].built(keras)
    with pytest.raises(ValueError, match="keep_float32 has 'hea', which matches no layer"):
        tfmp.set_precision(model, "O2", keep_float32=["hea"])


# Keras 3 refuses such names.
@pytest.mark.parametrize("pattern", ["encoder/layer_0", "net/encoder/layer_0", "layer_0", r"encoder/layer_\d"])
@for_every_keras("keras2", "tf_keras")
def test_layer_whose_name_has_a_slash_is_kept(keras: ModuleType, pattern: str) -> None:
    inner = keras.Sequential([keras.Input([2]), keras.layers.Dense(2, name="encoder/layer_0")], name="net")
    model = keras.Sequential([inner, keras.layers.Dense(2, name="head")])
    found = _named(tfmp.set_precision(model, "O2", keep_float32=[pattern]))
    assert {name for name, now in found.items() if now == "float32"} == {"net/encoder/layer_0"}


@for_every_keras()
def test_layer_name_that_is_no_pattern_is_a_name(keras: ModuleType) -> None:
    model = keras.Sequential([keras.layers.Dense(2, name="head(1)"), keras.layers.Dense(2, name="a+b")])
    found = _named(tfmp.set_precision(model, "O2", keep_float32=["head(1)", "a+b"]))
    assert list(found.values()) == ["mixed_float16", "float32", "float32"]


@for_every_keras()
def test_kept_holder_keeps_all_that_it_holds(keras: ModuleType) -> None:
    model = CASES["attention"].built(keras)
    found = _named(tfmp.set_precision(model, "O2", keep_float32=["attend"]))
    attending = {now for name, now in found.items() if name.startswith("attend")}
    assert (attending, len(found) > 6, found["norm"]) == ({"float32"}, True, "mixed_float16")
    model = CASES["recurrent"].built(keras)
    found = _named(tfmp.set_precision(model, "O2", keep_float32=["lstm", "both"]))
    for name, now in found.items():
        assert now == ("float32" if name.split("/")[0] in ("lstm", "both") else "mixed_float16")
    gradients(model, CASES["recurrent"].batch)


@for_every_keras()
def test_keeping_a_layer_is_not_for_ever(keras: ModuleType) -> None:
    model = CASES["sequential"].built(keras)
    tfmp.set_precision(model, "O2", keep_float32=["head"])
    assert _named(tfmp.set_precision(model, "O2"))["head"] == "mixed_float16"


@pytest.mark.parametrize("name", ["body", "head", "conv", "norm"])
@for_every_keras()
def test_islands_run_in_training(keras: ModuleType, name: str) -> None:
    case = CASES["convolutional" if name in ("conv", "norm") else "sequential"]
    model = case.built(keras)
    found = _named(tfmp.set_precision(model, "O2", keep_float32=[name]))
    assert [each for each, now in found.items() if now == "float32"] == [name]
    assert {grad.dtype for grad in gradients(model, case.batch)} == {tf.float32}


def _compiled(keras: ModuleType, opt: Any, **settings: Any) -> Any:
    layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = with_given_weights(keras.Sequential([keras.Input([3]), *layers]))
    model.compile(opt, "mse", **settings)
    return model


_X, _Y = CASES["sequential"].batch, np.ones([4, 2], np.float32)


@for_every_keras()
def test_training_goes_on_with_the_slots_of_the_optimizer(keras: ModuleType) -> None:
    model = _compiled(keras, keras.optimizers.Adam(0.1))
    model.fit(_X, _Y, verbose=0)
    before = [each.numpy().tolist() for each in model.optimizer.variables]
    optimizer = model.optimizer
    with pytest.warns(UserWarning, match="does not scale the loss") as caught:
        tfmp.set_precision(model, "O2")
    assert [each.filename for each in caught] == [__file__]
    assert model.optimizer is optimizer
    assert [each.numpy().tolist() for each in optimizer.variables] == before
    seen = []
    layer = model.layers[0]
    call = layer.call

    def seeing(x: Any, training: bool | None = None) -> Any:
        seen.append(x.dtype)
        return call(x)

    layer.call = seeing
    model.fit(_X, _Y, verbose=0)
    assert (int(optimizer.iterations), set(seen)) == (2, {tf.float16})
    assert stored(model) == {"float32"}


@for_every_keras()
def test_model_that_scales_its_loss_is_set_in_the_midst_of_training(keras: ModuleType) -> None:
    model = _compiled(
        keras, tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), tfmp.FixedLossScaleManager(2.0**10))
    )
    reference = _compiled(
        keras, tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), tfmp.FixedLossScaleManager(2.0**10))
    )
    for level in ("O2", "O0"):
        tfmp.set_precision(model, level)
        for each in (model, reference):
            each.fit(_X, _Y, verbose=0)
    assert int(model.optimizer.applied_steps) == 2
    for one, other in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.03, atol=0.02)
        assert one.dtype == np.float32


@pytest.mark.parametrize("form", ["keras", "h5", "weights"])
@for_every_keras()
@pytest.mark.home(None)
def test_loaded_model_is_set(keras: ModuleType, form: str, tmp_path: Path) -> None:
    case = CASES["convolutional"]
    model = case.built(keras)
    if form == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        loaded = case.built(keras)
        loaded.load_weights(tmp_path / "model.weights.h5")
    else:
        _saved(model, tmp_path / f"model.{form}")
        loaded = keras.models.load_model(tmp_path / f"model.{form}", compile=False)
    tfmp.set_precision(loaded, "O2")
    tfmp.set_precision(model, "O2")
    assert _outputs(loaded, case.batch) == _outputs(model, case.batch)
    tfmp.set_precision(loaded, "O0")
    tfmp.set_precision(model, "O0")
    assert _outputs(loaded, case.batch) == _outputs(model, case.batch)


def _saved(model: Any, path: Path) -> None:
    with warnings.catch_warnings():
        # Keras 2 advises against HDF5.
        warnings.simplefilter("ignore")
        model.save(path)


@for_every_keras("keras2", "tf_keras")
def test_model_from_a_saved_model_of_keras_2_is_set(keras: ModuleType, tmp_path: Path) -> None:
    case = CASES["sequential"]
    model = case.built(keras)
    model.save(tmp_path / "saved", save_format="tf")
    loaded = keras.models.load_model(tmp_path / "saved", compile=False)
    for level in ("O2", "O0"):
        tfmp.set_precision(loaded, level)
        tfmp.set_precision(model, level)
        assert _outputs(loaded, case.batch) == _outputs(model, case.batch)


@for_every_keras()
def test_integers_and_float64_are_left_alone(keras: ModuleType) -> None:
    layers = [keras.layers.Dense(3, dtype="float64", name="wide"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential([keras.Input([3]), *layers, keras.layers.Layer(dtype="int32", name="count")], name="net")
    report = tfmp.set_precision(model, "O2")
    assert [tuple(layer) for layer in report.layers] == [
        ("net", "float32", "mixed_float16", ""),
        ("wide", "float64", "float64", "computes in float64"),
        ("head", "float32", "mixed_float16", ""),
        ("count", "int32", "int32", "computes in int32"),
    ]
    assert [policy(layer) for layer in model.layers] == ["float64", "mixed_float16", "int32"]


@for_every_keras()
def test_recomputed_layers_are_set(keras: ModuleType) -> None:
    block = keras.Sequential(
        [keras.layers.Dense(3, "relu", name="dense"), keras.layers.BatchNormalization(name="norm")]
    )
    model = keras.Sequential([keras.Input([3]), tfmp.Recompute(block, name="block"), keras.layers.Dense(1)])
    with_given_weights(model)
    expected = _outputs(model, _X)
    tfmp.set_precision(model, "O2", keep_float32=["norm"])
    found = {layer.name: layer.compute_dtype for layer in block.layers}
    assert found == {"dense": "float16", "norm": "float32"}
    assert {grad.dtype for grad in gradients(model, _X)} == {tf.float32}
    tfmp.set_precision(model, "O0")
    # What was trained above: moving statistics.
    assert [each[0] for each in _outputs(model, _X)] == [each[0] for each in expected]


@for_every_keras()
def test_function_that_is_traced_afterwards_computes_half(keras: ModuleType) -> None:
    model = CASES["sequential"].built(keras)
    traced = tf.function(model)
    assert traced(_X).dtype == tf.float32
    tfmp.set_precision(model, "O2")
    assert (traced(_X).dtype, tf.function(model.__call__)(_X).dtype) == (tf.float32, tf.float16)


@for_every_keras()
def test_model_at_o3_goes_to_no_other_level(keras: ModuleType) -> None:
    model = CASES["sequential"].built(keras, "O3")
    before = (policies(model), values(model))
    for level in ("O0", "O1", "O2", "O3-bfloat16"):
        with pytest.raises(ValueError, match=f"has weights in float16, and would have them in .* at {level}") as error:
            tfmp.set_precision(model, level)
        assert f"with tfmp.precision('{level}')" in str(error.value)
    assert (policies(model), values(model)) == before
    tfmp.set_precision(model, "O3")
    assert (policies(model), values(model)) == before


_WRONG: dict[str, tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = {
    "unknown level": (ValueError, "there is no precision level 'O5': did you mean", ("O5",), {}),
    "level of another type": (TypeError, "a precision level is a string", (2,), {}),
    "O3 over float32 weights": (
        ValueError,
        "the layer 'net' has weights in float32, and would have them in float16 at O3",
        ("O3",),
        {},
    ),
    "no such layer": (
        ValueError,
        "keep_float32 has 'haed', which matches no layer. The layers are block, block/dense, .*head",
        ("O2",),
        {"keep_float32": ["head", "haed"]},
    ),
    "compiled pattern of no layer": (
        ValueError,
        r"keep_float32 has 'x\.\*', which matches no layer",
        ("O2",),
        {"keep_float32": [re.compile("x.*")]},
    ),
    "no regular expression": (
        ValueError,
        r"keep_float32 has '\*head', which is no regular expression",
        ("O2",),
        {"keep_float32": ["*head"]},
    ),
    "one string": (TypeError, "keep_float32", ("O2",), {"keep_float32": "head"}),
    "bytes": (TypeError, "keep_float32", ("O2",), {"keep_float32": [b"head"]}),
    "number in the list": (TypeError, "keep_float32", ("O2",), {"keep_float32": ["head", 3]}),
    "None": (TypeError, "keep_float32", ("O2",), {"keep_float32": None}),
    "None in the list": (TypeError, "keep_float32", ("O2",), {"keep_float32": [None]}),
    "empty name": (ValueError, "keep_float32 has '', which matches no layer", ("O2",), {"keep_float32": [""]}),
}


@pytest.mark.parametrize("wrong", _WRONG)
@for_every_keras()
def test_wrong_argument_is_refused_and_nothing_is_changed(keras: ModuleType, wrong: str) -> None:
    error, message, args, settings = _WRONG[wrong]
    model = CASES["subclassed"].built(keras)
    before = (policies(model), values(model), _outputs(model, CASES["subclassed"].batch))
    with pytest.raises(error, match=message):
        tfmp.set_precision(model, *args, **settings)
    assert (policies(model), values(model), _outputs(model, CASES["subclassed"].batch)) == before


@for_every_keras()
def test_what_is_no_layer_is_refused(keras: ModuleType) -> None:
    for wrong in (None, "net", tf.Module(), keras.layers.Dense, keras.optimizers.SGD(), [keras.layers.Dense(2)]):
        with pytest.raises(TypeError, match="model must be a model or a layer of Keras, got "):
            tfmp.set_precision(wrong, "O2")


@for_every_keras()
def test_pattern_for_a_layer_that_holds_none_is_refused(keras: ModuleType) -> None:
    layer = keras.layers.Dense(2, name="head")
    with pytest.raises(ValueError, match="The layers are none: a layer that has no layers is kept by the level O0"):
        tfmp.set_precision(layer, "O2", keep_float32=["head"])
    assert policy(layer) == "float32"


@for_every_keras("keras3")
def test_quantized_layers_are_refused(keras: ModuleType) -> None:
    layers = [keras.layers.Dense(4, name="body"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential([keras.Input([3]), *layers])
    layers[1].quantize("int8")
    before = [policy(layer) for layer in (model, *layers)]
    for level in ("O2", "O0", "O3"):
        with pytest.raises(ValueError, match="the layers head are quantized"):
            tfmp.set_precision(model, level)
    assert [policy(layer) for layer in (model, *layers)] == before


@for_every_keras()
def test_map_of_policies_counts_by_its_types(keras: ModuleType) -> None:
    if is_keras2(keras):
        pytest.skip("needs maps of policies, which Keras 2 does not have")
    default = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    layer = keras.layers.Dense(2, dtype=keras.dtype_policies.DTypePolicyMap(default_policy=default), name="head")
    layer.build([None, 3])
    report = tfmp.set_precision(layer, "O2")
    assert [tuple(each) for each in report.layers] == [("head", "mixed_bfloat16", "mixed_float16", "")]
    # What is changed is the entry of the layer in its map.
    assert (layer.compute_dtype, layer.variable_dtype) == ("float16", "float32")
