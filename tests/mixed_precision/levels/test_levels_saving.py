"""Levels of models that are saved, and loaded where tfmp is not imported; and Kerases that are imported late."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kerases import for_every_keras, installed
from levelled_models import CASES, layer_policies, outputs

import tfmp
from tfmp.any_keras.which import is_keras2

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    # Keras 3.10 says so of models that it has loaded.
    pytest.mark.filterwarnings(r"ignore:(?s).*structure of `inputs` doesn't match:UserWarning"),
]

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


_SAVED = [(name, level) for name in ("nested", "attention") for level in ("O1", "O2-bfloat16", "O3")]


def _saved(keras: ModuleType, folder: Path) -> Iterator[tuple[Path, Any]]:
    """Save models of several levels, and yield their files with the models."""
    folder.mkdir()
    kept = CASES["nested"].built(keras)
    tfmp.set_precision(kept, "O2", keep_float32=["head"])
    models = {f"{name}_{level}.keras": CASES[name].built(keras, level) for name, level in _SAVED}
    for name, model in (models | dict.fromkeys(("set.keras", "set.h5"), kept)).items():
        with warnings.catch_warnings():
            # Keras advises against HDF5.
            warnings.simplefilter("ignore")
            model.save(folder / name)
        yield folder / name, model


def test_saved_models_load_with_their_levels_without_tfmp_and_the_first_level_changes_keras(tmp_path: Path) -> None:
    expected, args = {}, []
    for id_, keras in installed().items():
        for path, model in _saved(keras, tmp_path / id_):
            args += [keras.__name__, str(path)]
            expected[str(path)] = sorted([name, found] for name, found, _, _ in layer_policies(model))
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


@pytest.mark.parametrize("name", ["nested", "attention", "convolutional"])
@for_every_keras()
def test_loaded_and_copied_models_keep_the_policies_of_their_layers(
    keras: ModuleType, name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    for level in ("O1", "O2", "O0"):
        model = case.built(keras, level)
        if level == "O0":
            model.compile("sgd", "mse")
        model.save(tmp_path / "model.keras")
        copies = [type(model).from_config(model.get_config()), keras.models.clone_model(model)]
        # A level that is open when a model is made from its configuration changes nothing.
        with tfmp.precision("O3"):
            loaded = keras.models.load_model(tmp_path / "model.keras", compile=level == "O0")
            copies.append(keras.models.clone_model(model))
        for copied in copies:
            copied(case.batch)
            assert layer_policies(copied) == layer_policies(model)
        assert layer_policies(loaded) == layer_policies(model)
        # Keras 2 reads the types of functions from the file, too.
        assert outputs(loaded, case.batch) == outputs(model, case.batch)
        assert level != "O0" or is_keras2(keras) or loaded.compiled
