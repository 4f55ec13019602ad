"""Pruning by TensorFlow Model Optimization; its quantization and clustering, which no level can be set for."""

import functools
import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import suite

import tfmp

tfmot = suite.library("tensorflow_model_optimization")
_wrapper = suite.library("tensorflow_model_optimization.python.core.sparsity.keras.pruning_wrapper")
keras = suite.keras_of(_wrapper.PruneLowMagnitude)

pytestmark = [pytest.mark.works_with("TensorFlow Model Optimization"), pytest.mark.filterwarnings("default")]

_MODEL = "pruned dense net"


def _dense() -> Any:
    layers = [keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(1, name="head")]
    return keras.Sequential([keras.Input([8]), *layers])


def _pruned() -> Any:
    schedule = tfmot.sparsity.keras.PolynomialDecay(0.0, 0.5, 0, suite.STEPS // 2, frequency=2)
    return tfmot.sparsity.keras.prune_low_magnitude(_dense(), schedule)


def _fit(model: Any, batch: Any, callbacks: Any = (), **settings: Any) -> Any:
    """Train a pruned model for a step, and return its history; without the callback it cannot be called."""
    callbacks = [tfmot.sparsity.keras.UpdatePruningStep(), *callbacks]
    return model.fit(*batch, batch_size=16, verbose=0, callbacks=callbacks, **settings).history


@functools.cache
def _subject_of(_: str) -> suite.Subject:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 8)).astype(np.float32)
    batch = (x, x @ rng.normal(size=(8, 1)).astype(np.float32))
    return suite.Subject(
        keras=keras,
        build=_pruned,
        optimizer=lambda: keras.optimizers.Adam(1e-2),
        batches=[batch] * suite.STEPS,
        loss=lambda model, batch: model.compiled_loss(batch[1], model(batch[0])),
        compile_with={"loss": "mse"},
        step=lambda model, batch: _fit(model, batch)["loss"][0],
        epoch=_fit,
        callbacks=lambda directory: [tfmot.sparsity.keras.PruningSummaries(str(directory))],
        # In a loop of the user's own, nothing updates the step of the pruning.
        lacks=frozenset({"overflow", "check", "recompute", "resume", "two replicas"}),
    )


class TestModelOptimization(suite.Suite):
    models, subject = (_MODEL,), staticmethod(_subject_of)


@pytest.mark.feature("O1, O2", _MODEL)
def test_half_of_the_weights_is_pruned_and_levels_stay_when_the_wrappers_go() -> None:
    subject = _subject_of(_MODEL)
    pruned = subject.at("O2")
    assert suite.computing_in(keras, pruned, "float16") == {"hidden", "head"}
    suite.fit(subject, pruned, suite.scaled(subject.optimizer()))
    kernels = [each.numpy() for each in pruned.trainable_weights if each.shape.rank == 2]
    assert [np.mean(kernel == 0) for kernel in kernels] == [0.5, 0.5]
    stripped = tfmot.sparsity.keras.strip_pruning(pruned)
    assert [layer.compute_dtype for layer in stripped.layers] == ["float16", "float16"]


@pytest.mark.feature("overflow", _MODEL)
def test_overflow_changes_nothing_but_the_scale() -> None:
    """Pruning counts steps itself, and masks weights by their size: both go on in a step that is skipped."""
    subject = _subject_of(_MODEL)
    pruned, opt = subject.at("O2"), suite.scaled(subject.optimizer())
    pruned.compile(opt, "mse")
    for _ in range(4):
        _fit(pruned, subject.batches[0])
    kept = [*pruned.trainable_weights, *opt.inner_optimizer.variables]
    before = [each.numpy() for each in kept]
    # Every second step is masked anew; after the fourth step, the next is not.
    _fit(pruned, subject.batches[0], sample_weight=np.full(16, np.inf))
    suite.assert_equal([each.numpy() for each in kept], before)
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (4, 1, suite.SCALE / 2)


@pytest.mark.feature("check", _MODEL)
def test_model_is_checked_before_it_is_pruned() -> None:
    subject = _subject_of(_MODEL)
    report = tfmp.check_precision(_dense(), "mse", subject.batches[:1], progress=False)
    assert (report.keep_float32, report.far_off, report.float16_error) == ([], [], None)
    opt = tfmp.LossScaleOptimizer(subject.optimizer(), initial_scale=report.suggested_loss_scale)
    assert suite.learns(suite.fit(subject, subject.at("O2"), opt), 1.0)


#: Tries both kinds of models, and prints the errors. It is a process of its own: quantization works only if
#: nothing has used `tf.keras` before.
_REFUSED = """
import json, tf_keras, tfmp
import tensorflow as tf
import tensorflow_model_optimization as tfmot

def dense():
    layers = [tf_keras.layers.Dense(16, name="hidden"), tf_keras.layers.Dense(1, name="head")]
    return tf_keras.Sequential([tf_keras.Input([8]), *layers])

clustering, batch = tfmot.clustering.keras, (tf.ones([4, 8]), tf.ones([4, 1]))
settings = dict(number_of_clusters=4, cluster_centroids_init=clustering.CentroidInitialization.LINEAR)
models = [tfmot.quantization.keras.quantize_model(dense()), clustering.cluster_weights(dense(), **settings)]
found = []
for model in models:
    tries = [lambda level=level: tfmp.set_precision(model, level) for level in ("O1", "O2", "O3")]
    for attempt in [*tries, lambda: tfmp.check_precision(model, "mse", [batch], progress=False)]:
        try:
            found.append(attempt())
        except ValueError as error:
            found.append(str(error))
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
print(json.dumps(found))
"""


@pytest.mark.feature("check", _MODEL)
def test_quantized_and_clustered_models_are_refused_with_the_reason() -> None:
    # transformers sets it for the whole process; with it, quantization mixes both copies of Keras 2.
    environment = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    command = [sys.executable, "-c", _REFUSED]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for prefix, messages in (("quant", found[:4]), ("cluster", found[4:])):
        for message in messages[:3]:
            assert re.search(rf"the layers .*{prefix}_hidden, {prefix}_head are quantized, .*before", message)
        assert re.search(r"_hidden, .*_head\. Pass .*the model before it was quantized", messages[3])
