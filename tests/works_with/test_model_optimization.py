"""Pruning by TensorFlow Model Optimization; its quantization and clustering, which no level can be set for."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import keras2_trainings as trainings
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
keras = trainings.keras_of(_wrapper.PruneLowMagnitude)

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
pruned_model = pytest.mark.parametrize("model", [_MODEL])


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 8)).astype(np.float32)
    return x, x @ rng.normal(size=(8, 1)).astype(np.float32)


def _dense() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(1, name="head")]
    return keras.Sequential([keras.Input([8]), *layers])


def _pruned() -> Any:
    schedule = tfmot.sparsity.keras.PolynomialDecay(0.0, 0.5, 0, 20, frequency=2)
    return tfmot.sparsity.keras.prune_low_magnitude(_dense(), schedule)


def _fit(model: Any, opt: Any, weights: Sequence[np.ndarray | None] = (None,) * 30, callbacks: Any = ()) -> np.ndarray:
    """Train a pruned model for a step with each of these weights of examples, and return the losses."""
    model.compile(opt, "mse")
    x, y = _data()
    step = tfmot.sparsity.keras.UpdatePruningStep()
    return np.array(
        [
            loss
            for each in weights
            for loss in model.fit(
                x, y, sample_weight=each, batch_size=16, verbose=0, callbacks=[step, *callbacks]
            ).history["loss"]
        ]
    )


def _adam() -> Any:
    return keras.optimizers.Adam(1e-2)


@pytest.mark.feature("float32's curve")
@pruned_model
def test_float16_trains_and_prunes_on_the_curve_of_float32(model: str) -> None:
    expected = _fit(_pruned(), _adam())
    pruned = _pruned()
    tfmp.set_precision(pruned, "O2")
    found = _fit(pruned, trainings.scaled(_adam()))
    assert trainings.farthest(found, expected) < 2e-3
    kernels = [each.numpy() for each in pruned.trainable_weights if each.shape.rank == 2]
    assert [np.mean(kernel == 0) for kernel in kernels] == [0.5, 0.5]
    stripped = tfmot.sparsity.keras.strip_pruning(pruned)
    assert [layer.compute_dtype for layer in stripped.layers] == ["float16", "float16"]


@pytest.mark.feature("Keras' wrapper")
@pruned_model
def test_losses_are_those_of_keras_own_wrapper(model: str) -> None:
    ends = []
    for wrap in (trainings.scaled, lambda opt: trainings.in_keras_own_wrapper(keras, opt)):
        pruned = _pruned()
        tfmp.set_precision(pruned, "O2")
        ends.append(_fit(pruned, wrap(_adam()), weights=(None,) * 10))
    assert trainings.farthest(*ends) == 0


@pytest.mark.feature("O1, O2")
@pruned_model
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_levels_reach_the_layers_inside_of_the_wrappers(model: str, level: str) -> None:
    pruned = _pruned()
    tfmp.set_precision(pruned, level)
    assert trainings.computing_in(keras, pruned, "float16") == {"hidden", "head"}
    losses = _fit(pruned, trainings.scaled(_adam()), weights=(None,) * 5)
    assert losses[-1] < losses[0]


@pytest.mark.feature("overflow")
@pruned_model
def test_overflow_changes_nothing_but_the_scale(model: str) -> None:
    """Pruning counts steps itself, and masks weights by their size: both go on in a step that is skipped."""
    pruned = _pruned()
    tfmp.set_precision(pruned, "O2")
    opt = trainings.scaled(_adam())
    _fit(pruned, opt, weights=(None,) * 4)
    kept = [*pruned.trainable_weights, *opt.inner_optimizer.variables]
    before = [each.numpy() for each in kept]
    x, y = _data()
    # A batch in which every second step is masked anew; after the fourth step, the next is not.
    pruned.fit(
        x,
        y,
        sample_weight=np.full(16, np.inf),
        batch_size=16,
        verbose=0,
        callbacks=[tfmot.sparsity.keras.UpdatePruningStep()],
    )
    trainings.assert_equal([each.numpy() for each in kept], before)
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (4, 1, trainings.SCALE / 2)


@pytest.mark.feature("check")
@pruned_model
def test_model_is_checked_before_it_is_pruned(model: str) -> None:
    report = tfmp.check_precision(_dense(), "mse", [_data()], progress=False)
    assert (report.keep_float32, report.far_off, report.float16_error) == ([], [], None)
    pruned = _pruned()
    tfmp.set_precision(pruned, "O2", keep_float32=report.keep_float32)
    manager = tfmp.ExponentialUpdateLossScaleManager(report.suggested_loss_scale, 2000)
    losses = _fit(pruned, tfmp.LossScaleOptimizer(_adam(), manager), weights=(None,) * 5)
    assert losses[-1] < losses[0]


@pytest.mark.feature("callbacks")
@pruned_model
def test_callback_of_tfmp_goes_with_that_of_the_library(model: str, tmp_path: Any) -> None:
    pruned = _pruned()
    tfmp.set_precision(pruned, "O2")
    scale = tfmp.LossScaleCallback()
    _fit(
        pruned,
        trainings.scaled(_adam()),
        weights=(None,),
        callbacks=[scale, tfmot.sparsity.keras.PruningSummaries(str(tmp_path))],
    )
    assert pruned.history.history["loss_scale"] == [trainings.SCALE]


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
