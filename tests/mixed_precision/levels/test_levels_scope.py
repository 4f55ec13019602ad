"""Layers of every Keras that are made in the scope of a level: where it acts, what models compute, and their files."""

import copy
import json
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, installed
from levelled_models import (
    CASES,
    POLICIES,
    gradients,
    layer_policies,
    outputs,
    policies,
    policy,
    with_given_weights,
)

import tfmp
from tfmp.any_keras.which import is_keras2

# Keras 3.10 says so of models that it has loaded.
pytestmark = pytest.mark.filterwarnings(r"ignore:(?s).*structure of `inputs` doesn't match:UserWarning")

_X = CASES["sequential"].batch


def _made(keras: ModuleType) -> str:
    """Return the policy of a layer that is made now."""
    return policy(keras.layers.Dense(2))


@pytest.mark.parametrize("level", [*POLICIES, "O2-float16"])
@for_every_keras()
def test_layer_and_model_have_the_policy_of_the_level(keras: ModuleType, level: str) -> None:
    with tfmp.precision(level) as scope:
        layers = [keras.layers.Dense(2), keras.layers.Layer(), keras.Sequential([keras.layers.Dense(2)]), keras.Model()]
    name = level.removesuffix("-float16")
    assert scope.level == name
    assert [policy(layer) for layer in layers] == [POLICIES[name]] * 4
    assert policy(keras.layers.Dense.from_config(layers[0].get_config())) == POLICIES[name]
    with scope, pytest.raises((TypeError, ValueError)):
        keras.layers.Dense(2, no_such_argument=1)
    assert _made(keras) == "float32"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@for_every_keras()
def test_dtype_that_a_layer_is_given_wins(keras: ModuleType, level: str) -> None:
    of_keras = keras.mixed_precision.Policy("mixed_bfloat16") if hasattr(keras.mixed_precision, "Policy") else None
    given: list[Any] = ["float32", "float16", "float64", "mixed_float16", of_keras or "mixed_bfloat16"]
    with tfmp.precision(level):
        found = [policy(keras.layers.Dense(2, dtype=dtype)) for dtype in given]
        assert policy(keras.layers.Dense(2, dtype=None)) == POLICIES[level]
        again = keras.layers.Dense.from_config(keras.layers.Dense(2, dtype="float64").get_config())
        inputs = [keras.Input([2]), keras.Input([2], dtype="int32"), keras.Input([2], dtype="float16")]
    assert [tf.as_dtype(each.dtype).name for each in inputs] == ["float32", "int32", "float16"]
    assert found == ["float32", "float16", "float64", "mixed_float16", "mixed_bfloat16"]
    assert policy(again) == "float64"


@for_every_keras()
def test_global_policy_stays_what_it_is_and_the_level_is_kept_when_the_session_is_cleared(
    keras: ModuleType, global_policy: Callable[[str], None]
) -> None:
    global_policy("mixed_bfloat16")
    with tfmp.precision("O2"):
        assert _made(keras) == "mixed_float16"
        with tfmp.precision("O0"):
            assert _made(keras) == "float32"
        global_policy("float64")
        assert _made(keras) == "mixed_float16"
    assert _made(keras) == "float64"
    with tfmp.precision("O2"):
        keras.backend.clear_session()
        assert _made(keras) == "mixed_float16"


@for_every_keras()
def test_metrics_losses_and_optimizers_are_not_affected(keras: ModuleType) -> None:
    with tfmp.precision("O3"):
        metric, loss, optimizer = keras.metrics.AUC(), keras.losses.MeanSquaredError(), keras.optimizers.Adam()
        optimizer.build([getattr(keras, "Variable", tf.Variable)(np.zeros(2, np.float32))])
        result = loss(np.zeros([2, 1], np.float32), np.ones([2, 1], np.float32))
    variables = [*metric.variables, *optimizer.variables]
    floats = {tf.as_dtype(each.dtype) for each in variables if tf.as_dtype(each.dtype).is_floating}
    assert (metric.dtype, floats, result.dtype) == ("float32", {tf.float32}, tf.float32)


@for_every_keras()
def test_nothing_is_left_on_layers_or_of_the_function_that_makes_them(keras: ModuleType) -> None:
    class Large:
        pass

    large, outside = Large(), keras.layers.Dense(2)
    gone = weakref.ref(large)
    with tfmp.precision("O2"):
        inside = keras.layers.Dense(2, "relu")
        models = [case.make(keras) for case in (CASES["functional"], CASES["subclassed"])]
        copied = copy.deepcopy(inside)
    del large
    assert gone() is None
    for layer in (outside, inside, *models, copied):
        assert [name for name in vars(layer) if "tfmp" in name] == []
    assert policy(copied) == "mixed_float16"


@for_every_keras()
def test_recomputed_layers_follow_the_level_and_are_set(keras: ModuleType) -> None:
    def made() -> Any:
        block = keras.Sequential([keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization()])
        return keras.Sequential([keras.Input([3]), tfmp.Recompute(block), keras.layers.Dense(1)])

    with tfmp.precision("O2"):
        model = made()
    # The wrapper itself casts nothing.
    names = ("Dense", "BatchNormalization", "Sequential")
    assert {name: found for name, found, _, _ in policies(model)} == dict.fromkeys(names, "mixed_float16") | {
        "Recompute": "float32"
    }
    given = made()
    tfmp.set_precision(given, "O2")
    assert {name: found for name, found, _, _ in policies(given)} == dict.fromkeys(
        [*names, "Recompute"], "mixed_float16"
    )
    for each in (model, given):
        assert {grad.dtype for grad in gradients(with_given_weights(each), _X)} == {tf.float32}


_NO_LEVEL = "there is no precision level"
_WRONG: list[tuple[Any, type[Exception], str]] = [
    ("O4", ValueError, f"{_NO_LEVEL} 'O4': did you mean 'O"),
    ("o2", ValueError, f"{_NO_LEVEL} 'o2': did you mean 'O2'"),
    ("O2-fp16", ValueError, f"{_NO_LEVEL} 'O2-fp16': did you mean 'O2-float16'"),
    ("O2-bfloat", ValueError, "did you mean 'O2-bfloat16'.*The levels are O0, O1, O2, O3"),
    ("03", ValueError, "did you mean 'O3'"),
    ("mixed_float16", ValueError, f"{_NO_LEVEL} 'mixed_float16': did you mean 'O2'"),
    *((wrong, TypeError, "a precision level is a string such as 'O2', got") for wrong in (2, None, b"O2", ["O2"])),
]


@pytest.mark.parametrize(("level", "error", "message"), _WRONG, ids=[repr(each[0]) for each in _WRONG])
def test_what_is_no_level_is_refused_with_the_nearest(level: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tfmp.precision(level)


_PACKAGES = sorted({keras.__name__ for keras in installed().values()})

_LOADING = """
import importlib, json, sys
import numpy as np
found = {}
for package, path in zip(sys.argv[1::2], sys.argv[2::2]):
    keras = importlib.import_module(package)
    model = keras.models.load_model(path, compile=False)
    model(np.array([[1, 2, 3], [4, 5, 6]], "float32"))
    layers = {id(layer): layer for layer in model._flatten_layers()}.values()
    found[path] = [[type(layer).__name__, layer.dtype_policy.name] for layer in layers]
assert "tfmp" not in sys.modules
print("FOUND" + json.dumps(found))

import tfmp

kerases = [importlib.import_module(name) for name in sorted(set(sys.argv[1::2]))]

def functions():
    return [(each.layers.Layer.__init__, each.Model.compile) for each in kerases]

before = functions()
for keras in kerases:
    tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    keras.layers.Dense(2)
assert functions() == before
with tfmp.precision("O2"):
    once = functions()
with tfmp.precision("O3"):
    keras.layers.Dense(2)
assert functions() == once
print("CHANGED" + json.dumps([one != other for one, other in zip(once, before)]))
"""


def _said(script: str, *args: str) -> str:
    """Return what a script prints in a fresh process."""
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


_SAVED = [(name, level) for name in ("nested", "attention") for level in ("O0", "O1", "O2-bfloat16", "O3")]


def _saved(keras: ModuleType, folder: Path) -> Iterator[tuple[Path, Any, np.ndarray]]:
    """Save models of several levels, and yield their files with the models and batches for them."""
    folder.mkdir()
    kept = CASES["nested"].built(keras)
    tfmp.set_precision(kept, "O2", keep_float32=["head"])
    models = {f"{name}_{level}.keras": (CASES[name].built(keras, level), CASES[name].batch) for name, level in _SAVED}
    for name, (model, batch) in (models | dict.fromkeys(("set.keras", "set.h5"), (kept, _X))).items():
        with warnings.catch_warnings():
            # Keras advises against HDF5.
            warnings.simplefilter("ignore")
            if "O0" in name:
                model.compile("sgd", "mse")
            model.save(folder / name)
        yield folder / name, model, batch


def test_saved_and_copied_models_keep_their_levels_without_tfmp_too_and_the_first_level_changes_keras(
    tmp_path: Path,
) -> None:
    expected, args = {}, []
    for id_, keras in installed().items():
        for path, model, batch in _saved(keras, tmp_path / id_):
            args += [keras.__name__, str(path)]
            expected[str(path)] = sorted([name, found] for name, found, _, _ in layer_policies(model))
            copies = [type(model).from_config(model.get_config()), keras.models.clone_model(model)]
            # A level that is open when a model is made from its configuration changes nothing.
            with tfmp.precision("O3"):
                loaded = keras.models.load_model(path, compile="O0" in path.name)
                copies.append(keras.models.clone_model(model))
            for copied in copies:
                copied(batch)
                assert layer_policies(copied) == layer_policies(model)
            assert layer_policies(loaded) == layer_policies(model)
            assert outputs(loaded, batch) == outputs(model, batch)
            assert "O0" not in path.name or is_keras2(keras) or loaded.compiled
    # The policies of sequential and functional models themselves are not in their configurations.
    left_out = ("InputLayer", "Functional", "Sequential", "TFOpLambda", "SlicingOpLambda")
    printed, _, changed = _said(_LOADING, *args).partition("CHANGED")
    assert json.loads(changed) == [True] * len(_PACKAGES)
    found = json.loads(printed.partition("FOUND")[2])
    assert {path: sorted(row for row in rows if row[0] not in left_out) for path, rows in found.items()} == expected


_LATE = """
import importlib, sys
import tensorflow
import tfmp
# Some TensorFlows import a Keras themselves.
before = {"keras", "tf_keras"} & set(sys.modules)
with tfmp.precision("O2") as scope:
    assert {"keras", "tf_keras"} & set(sys.modules) == before
    # On TensorFlow 2.15 this imports Keras, too.
    print("FOUND", "tf.keras", tensorflow.keras.layers.Dense(2).dtype_policy.name)
    for name in sys.argv[1].split(","):
        keras = importlib.import_module(name)
        print("FOUND", name, keras.layers.Dense(2).dtype_policy.name)
print("FOUND", "after", keras.layers.Dense(2).dtype_policy.name)
"""


def test_keras_that_is_first_imported_in_a_scope_makes_its_layers_at_the_level() -> None:
    found = [line.split()[1:] for line in _said(_LATE, ",".join(_PACKAGES)).splitlines() if line.startswith("FOUND")]
    assert found == [*([name, "mixed_float16"] for name in ("tf.keras", *_PACKAGES)), ["after", "float32"]]
