"""Pruning by TensorFlow Model Optimization; its quantization and clustering, which no level can be set for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras2_suite as suite
import numpy as np
import pytest
import table

import tfmp
from benchmarks.legacy_optimizers import load

pytest.importorskip(
    "tensorflow_model_optimization",
    reason="needs tensorflow-model-optimization, which the tox environment works_with_keras2 installs",
)
tfmot = load("tensorflow_model_optimization")
_wrapper = load("tensorflow_model_optimization.python.core.sparsity.keras.pruning_wrapper")
keras = suite.keras_of(_wrapper.PruneLowMagnitude)

LIBRARY = table.Library(
    name="TensorFlow Model Optimization",
    distribution="tensorflow-model-optimization",
    beside=["keras", "tf_keras", "tensorflow"],
    write='`tfmp.set_precision(pruned, "O2")`, where `pruned` is what `prune_low_magnitude` returned; then `compile` '
    "with `tfmp.LossScaleOptimizer`, and `fit` with the callback `UpdatePruningStep`",
    limits="Pruning only. Models that simulate a quantization or a clustering are refused by `set_precision` and by "
    "`check_precision`: train in float16 before `quantize_model` or `cluster_weights`. Check a model before it is "
    "pruned: a pruned one can be called only under `UpdatePruningStep`.",
)

pytestmark = [pytest.mark.works_with(LIBRARY), pytest.mark.filterwarnings("default")]

_MODEL = "pruned dense net"


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 8)).astype(np.float32)
    return x, x @ rng.normal(size=(8, 1)).astype(np.float32)


def _dense() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(1, name="head")]
    return keras.Sequential([keras.Input([8]), *layers])


def _pruned(level: str, **settings: Any) -> Any:
    schedule = tfmot.sparsity.keras.PolynomialDecay(0.0, 0.5, 0, 20, frequency=2)
    pruned = tfmot.sparsity.keras.prune_low_magnitude(_dense(), schedule)
    tfmp.set_precision(pruned, level, **settings)
    return pruned


def _step(model: Any, weights: np.ndarray | None = None, callbacks: Any = ()) -> Any:
    """Train a pruned model for a step, and return its history; without the callback it cannot be called."""
    x, y = _data()
    callbacks = [tfmot.sparsity.keras.UpdatePruningStep(), *callbacks]
    return model.fit(x, y, sample_weight=weights, batch_size=16, verbose=0, callbacks=callbacks).history


def _fit(model: Any, opt: Any, steps: int) -> np.ndarray:
    """Train a pruned model, and return the losses."""
    model.compile(opt, "mse")
    return np.array([_step(model)["loss"][0] for _ in range(steps)])


def _adam() -> Any:
    return keras.optimizers.Adam(1e-2)


@pytest.mark.feature("float32's curve", _MODEL)
def test_float16_trains_and_prunes_on_the_curve_of_float32() -> None:
    expected, pruned = _fit(_pruned("O0"), _adam(), 30), _pruned("O2")
    assert suite.farthest(_fit(pruned, suite.scaled(_adam()), 30), expected) < 2e-3
    kernels = [each.numpy() for each in pruned.trainable_weights if each.shape.rank == 2]
    assert [np.mean(kernel == 0) for kernel in kernels] == [0.5, 0.5]
    stripped = tfmot.sparsity.keras.strip_pruning(pruned)
    assert [layer.compute_dtype for layer in stripped.layers] == ["float16", "float16"]


@pytest.mark.feature("Keras' wrapper", _MODEL)
def test_losses_are_those_of_keras_own_wrapper() -> None:
    expected = _fit(_pruned("O2"), suite.in_keras_own_wrapper(keras, _adam()), 10)
    assert suite.farthest(_fit(_pruned("O2"), suite.scaled(_adam()), 10), expected) == 0


@pytest.mark.feature("O1, O2", _MODEL)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_levels_reach_the_layers_inside_of_the_wrappers(level: str) -> None:
    pruned = _pruned(level)
    assert suite.computing_in(keras, pruned, "float16") == {"hidden", "head"}
    losses = _fit(pruned, suite.scaled(_adam()), 5)
    assert losses[-1] < losses[0]


@pytest.mark.feature("overflow", _MODEL)
def test_overflow_changes_nothing_but_the_scale() -> None:
    """Pruning counts steps itself, and masks weights by their size: both go on in a step that is skipped."""
    pruned, opt = _pruned("O2"), suite.scaled(_adam())
    _fit(pruned, opt, 4)
    kept = [*pruned.trainable_weights, *opt.inner_optimizer.variables]
    before = [each.numpy() for each in kept]
    # Every second step is masked anew; after the fourth step, the next is not.
    _step(pruned, np.full(16, np.inf))
    suite.assert_equal([each.numpy() for each in kept], before)
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (4, 1, suite.SCALE / 2)


@pytest.mark.feature("check", _MODEL)
def test_model_is_checked_before_it_is_pruned() -> None:
    report = tfmp.check_precision(_dense(), "mse", [_data()], progress=False)
    assert (report.keep_float32, report.far_off, report.float16_error) == ([], [], None)
    opt = tfmp.LossScaleOptimizer(_adam(), initial_scale=report.suggested_loss_scale)
    losses = _fit(_pruned("O2", keep_float32=report.keep_float32), opt, 5)
    assert losses[-1] < losses[0]


@pytest.mark.feature("callbacks", _MODEL)
def test_callback_of_tfmp_goes_with_that_of_the_library(tmp_path: Path) -> None:
    pruned = _pruned("O2")
    pruned.compile(suite.scaled(_adam()), "mse")
    callbacks = [tfmp.LossScaleCallback(), tfmot.sparsity.keras.PruningSummaries(str(tmp_path))]
    assert _step(pruned, callbacks=callbacks)["loss_scale"] == [suite.SCALE]


#: Tries both kinds of models, and prints the errors. It is a process of its own: quantization works only if
#: nothing has used `tf.keras` before.
_REFUSED = """
import functools
import json
import tensorflow_model_optimization as tfmot
import tensorflow as tf
import tf_keras
import tfmp

def dense():
    layers = [tf_keras.layers.Dense(16, name="hidden"), tf_keras.layers.Dense(1, name="head")]
    return tf_keras.Sequential([tf_keras.Input([8]), *layers])

clustering = tfmot.clustering.keras
models = {
    "quantized": tfmot.quantization.keras.quantize_model(dense()),
    "clustered": clustering.cluster_weights(
        dense(), number_of_clusters=4, cluster_centroids_init=clustering.CentroidInitialization.LINEAR
    ),
}
found = {}
for kind, model in models.items():
    tries = {level: functools.partial(tfmp.set_precision, model, level) for level in ("O1", "O2", "O3")}
    batch = (tf.ones([4, 8]), tf.ones([4, 1]))
    tries["check"] = lambda: tfmp.check_precision(model, "mse", [batch], progress=False)
    for what, attempt in tries.items():
        try:
            attempt()
        except ValueError as error:
            found[f"{kind} {what}"] = str(error)
    found[f"{kind} types"] = sorted({layer.compute_dtype for layer in model.layers})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refused() -> Any:
    # transformers sets it for the whole process; with it, quantization mixes both copies of Keras 2.
    environment = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    run = subprocess.run(
        [sys.executable, "-c", _REFUSED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.feature("O1, O2", _MODEL)
@pytest.mark.parametrize(("kind", "prefix"), [("quantized", "quant"), ("clustered", "cluster")])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_quantized_and_clustered_models_are_refused_with_the_reason(
    kind: str, prefix: str, level: str, refused: Any
) -> None:
    assert re.search(
        rf"the layers .*{prefix}_hidden, {prefix}_head are quantized, .*before", refused[f"{kind} {level}"]
    )
    assert refused[f"{kind} types"] == ["float32"]


@pytest.mark.feature("check", _MODEL)
@pytest.mark.parametrize("kind", ["quantized", "clustered"])
def test_quantized_and_clustered_models_are_not_checked(kind: str, refused: Any) -> None:
    assert re.search(r"_hidden, .*_head\. Pass .*the model before it was quantized", refused[f"{kind} check"])
