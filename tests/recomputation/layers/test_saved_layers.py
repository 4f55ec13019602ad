"""Models with recomputed layers in files and checkpoints, which fit those without recomputation."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from keras_models import assert_close, data, dense, fitted, is_keras3, plain, stateful_block, values
from kerases import for_every_keras

import tfmp

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning"),
    # Keras 3 passes its variables to h5py, which requests a copy from NumPy.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


def _net(keras: ModuleType, wrap: Any) -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input([8])
    # Keras saves no seeds.
    net = keras.Model(inputs, dense(keras, 1)(wrap(stateful_block(keras, rate=0))(inputs)), name="net")
    net.compile(keras.optimizers.Adam(0.01), "mse")
    net.optimizer.build(net.trainable_variables)
    return net


@pytest.mark.parametrize("form", ["checkpoint", "weights.h5"])
@pytest.mark.parametrize("wraps", [(plain, tfmp.Recompute), (tfmp.Recompute, plain)], ids=["to", "from"])
@for_every_keras()
def test_weights_fit_the_model_with_recomputation_and_without(
    keras: ModuleType, wraps: Any, form: str, tmp_path: Path
) -> None:
    if form == "weights.h5" and is_keras3(keras):
        pytest.skip("Keras 3 writes such files by the layers' own places in the model")
    saved, restored = (_net(keras, wrap) for wrap in wraps)
    fitted(saved, saved.optimizer)
    if form == "checkpoint":
        path = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer).save(tmp_path / "saved")
        tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(path).assert_consumed()
        assert_close(map(tf.convert_to_tensor, restored.optimizer.variables), saved.optimizer.variables, 0)
    else:
        saved.save_weights(tmp_path / "weights.h5")
        restored.load_weights(tmp_path / "weights.h5")
    assert_close(restored.get_weights(), saved.get_weights(), 0)


@pytest.mark.parametrize("file", ["model.keras", "model.h5", "saved_model"])
@for_every_keras()
def test_saved_model_goes_on(keras: ModuleType, file: str, tmp_path: Path) -> None:
    if is_keras3(keras) and file != "model.keras":
        pytest.skip("Keras 3 saves models in its own files")
    net = _net(keras, tfmp.Recompute)
    fitted(net, net.optimizer)
    net.save(tmp_path / file)
    loaded = keras.models.load_model(tmp_path / file)
    assert isinstance(loaded.layers[1], tfmp.Recompute)
    x = data()[0]
    assert_close([*values(loaded), loaded.predict(x, verbose=0)], [*values(net), net.predict(x, verbose=0)], 0)
    # Keras 2 restores no Adam from a SavedModel, with recomputation or without.
    if file != "saved_model":
        assert fitted(loaded, loaded.optimizer) == pytest.approx(fitted(net, net.optimizer), rel=1e-6)


@for_every_keras()
def test_saved_model_loads_in_a_new_process_that_imports_only_tfmp(keras: ModuleType, tmp_path: Path) -> None:
    net = keras.Sequential([keras.Input([4]), tfmp.Recompute(dense(keras, 4, name="block"))])
    net.save(tmp_path / "model.keras")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(tfmp.__file__).parent.parent)!r})\n"
        f"import tfmp, {keras.__name__} as keras\n"
        f"model = keras.models.load_model({str(tmp_path / 'model.keras')!r})\n"
        "print(type(model.layers[-1]).__name__, float(abs(model.get_weights()[0]).sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["Recompute", str(float(abs(net.get_weights()[0]).sum()))], done.stderr
