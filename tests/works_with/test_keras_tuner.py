"""keras-tuner searches with models that train in float16, with callbacks, and gives back what it tuned."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfmp

keras_tuner = pytest.importorskip(
    "keras_tuner", reason="needs keras-tuner, which the tox environment works_with_keras3 installs"
)

pytestmark = [
    pytest.mark.works_with("keras-tuner"),
    # keras-tuner, with Python 3.10 and later.
    pytest.mark.filterwarnings("ignore:(currentThread|getName).* is deprecated:DeprecationWarning"),
    # Keras: keras-tuner loads weights before the optimizer is built, so that this starts anew, with and without tfmp.
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning"),
]

_TUNERS: dict[str, dict[str, Any]] = {"RandomSearch": {"max_trials": 2}, "Hyperband": {"max_epochs": 2, "factor": 2}}


def _build(hyperparameters: Any) -> Any:
    units = hyperparameters.Choice("units", [8, 16])
    rate = hyperparameters.Float("rate", 1e-3, 1e-1, sampling="log")
    with tfmp.precision("O2"):
        layers = [keras.layers.Dense(units, "relu"), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1, dtype="float32")])
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.Adam(rate), initial_scale=2.0**10), "mse")
    return model


_X = np.random.default_rng(3).normal(size=[64, 4]).astype(np.float32)
_Y = _X.sum(1, keepdims=True)


def _searched(tuner: str, directory: Path, **settings: Any) -> Any:
    keras.utils.set_random_seed(1)
    place = {"seed": 1, "directory": directory, "project_name": "search"}
    found = getattr(keras_tuner, tuner)(_build, "val_loss", **_TUNERS[tuner], **place)
    settings = {"batch_size": 16, "shuffle": False, "verbose": 0, "validation_data": (_X, _Y), **settings}
    found.search(_X, _Y, epochs=4, **settings)
    return found


@pytest.mark.parametrize("model", _TUNERS)
@pytest.mark.feature("callbacks")
def test_search_takes_the_callback(model: str, tmp_path: Path) -> None:
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=2),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1),
        keras.callbacks.TensorBoard(tmp_path / "logs"),
        tfmp.LossScaleCallback(summary_dir=str(tmp_path / "scale")),
    ]
    found = _searched(model, tmp_path, callbacks=callbacks)
    best = found.oracle.get_best_trials(1)[0]
    assert best.metrics.exists("loss_scale")
    assert best.metrics.get_best_value("loss_scale") == 2.0**10
    assert list((tmp_path / "scale").iterdir())


@pytest.mark.parametrize("model", _TUNERS)
@pytest.mark.feature("resume")
def test_tuned_model_is_saved_and_goes_on(model: str, tmp_path: Path) -> None:
    found = _searched(model, tmp_path)
    [best] = found.get_best_models()
    score = found.oracle.get_best_trials(1)[0].score
    # The file of the best epoch's weights holds them in every bit; the mean of the losses may round otherwise.
    assert best.evaluate(_X, _Y, batch_size=16, verbose=0) == pytest.approx(score, rel=1e-5)
    best.save(tmp_path / "best.keras")
    loaded = keras.saving.load_model(tmp_path / "best.keras")
    assert isinstance(loaded.optimizer, tfmp.LossScaleOptimizer)
    for each in (best, loaded):
        each.fit(_X, _Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    states = ([each.numpy() for each in [*model.variables, *model.optimizer.variables]] for model in (loaded, best))
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("model", _TUNERS)
@pytest.mark.feature("overflow")
def test_search_goes_on_after_an_overflow(model: str, tmp_path: Path) -> None:
    weights = np.ones([64, 1], np.float32)
    weights[20] = np.inf
    found = _searched(model, tmp_path, sample_weight=weights, callbacks=[tfmp.LossScaleCallback()])
    for trial in found.oracle.get_best_trials(2):
        epochs = len(trial.metrics.metrics["loss_scale"].get_history()[0].value)
        assert epochs == 1
        assert np.isfinite(trial.score)
        # One of four steps of each epoch overflows.
        assert trial.metrics.get_best_value("loss_scale") < 2.0**10
