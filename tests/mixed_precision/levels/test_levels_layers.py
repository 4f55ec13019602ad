"""Every class of layers of every Keras runs at every level as it runs under the policies of Keras itself."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import installed
from levelled_models import global_policy, policy

import tfmp
from tfmp.hosts.keras.which import is_keras2

__all__ = ["global_policy"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    # What Keras itself warns of, under some versions of Python and NumPy.
    pytest.mark.filterwarnings("ignore::UserWarning:keras"),
]


def _floats(*shape: int) -> np.ndarray:
    return (np.cos(np.arange(np.prod(shape))) / 2 + 0.5).reshape(shape).astype(np.float32)


_VECTOR, _SEQUENCE, _IMAGE, _VOLUME = _floats(2, 4), _floats(2, 4, 3), _floats(2, 6, 6, 3), _floats(2, 4, 4, 4, 2)
_FRAMES = {1: _floats(2, 2, 4, 2), 2: _floats(2, 2, 4, 4, 2), 3: _floats(2, 2, 4, 4, 4, 2)}
_BY_RANK = {1: _SEQUENCE, 2: _IMAGE, 3: _VOLUME}
_IDS = np.array([[1, 2, 3], [4, 5, 6]])

_Make = Callable[[Any], Any]


def _rows() -> dict[str, tuple[_Make, tuple[Any, ...]]]:
    """Return by the names of classes what makes a layer, with the layers of a Keras, and the inputs of its call."""
    rows: dict[str, tuple[_Make, tuple[Any, ...]]] = {}

    def add(inputs: tuple[Any, ...], **settings: dict[str, Any]) -> None:
        for name, given in settings.items():
            rows[name] = (lambda layers, name=name, given=given: getattr(layers, name)(**given), inputs)

    plain: dict[str, Any] = {}
    add((_VECTOR,), Activation={"activation": "gelu"}, ActivityRegularization={"l2": 0.1}, AlphaDropout={"rate": 0.5})
    add((_VECTOR,), Dense={"units": 2, "activation": "relu"}, Dropout={"rate": 0.5}, ELU=plain, Flatten=plain)
    add((_VECTOR,), GaussianDropout={"rate": 0.5}, GaussianNoise={"stddev": 0.5}, Identity=plain, LeakyReLU=plain)
    add(
        (_VECTOR,), Layer=plain, PReLU=plain, ReLU=plain, RepeatVector={"n": 2}, Rescaling={"scale": 2.0, "offset": 1.0}
    )
    add((_VECTOR,), Softmax=plain, ThresholdedReLU=plain, UnitNormalization=plain, BatchNormalization=plain)
    add((_VECTOR,), LayerNormalization=plain, RMSNormalization=plain, Reshape={"target_shape": [2, 2]})
    add((_VECTOR,), EinsumDense={"equation": "ab,bc->ac", "output_shape": 2}, Discretization={"bin_boundaries": [0.5]})
    add((_VECTOR,), Normalization={"mean": 1.0, "variance": 4.0}, GroupNormalization={"groups": 2})
    add((_SEQUENCE,), Permute={"dims": [2, 1]}, Masking=plain, SpatialDropout1D={"rate": 0.5})
    recurrent = {"units": 2, "return_sequences": True}
    add((_SEQUENCE,), GRU=recurrent, LSTM=recurrent, SimpleRNN=recurrent)
    add((_SEQUENCE,), LocallyConnected1D={"filters": 2, "kernel_size": 2})
    add((_IMAGE,), LocallyConnected2D={"filters": 2, "kernel_size": 2})
    add((_IMAGE,), CenterCrop={"height": 4, "width": 4}, Resizing={"height": 4, "width": 4})
    for rank, batch in _BY_RANK.items():
        size: dict[str, Any] = {"filters": 2, "kernel_size": 2}
        add((batch,), **{f"Conv{rank}D": size, f"Conv{rank}DTranspose": size, f"SeparableConv{rank}D": size})
        add((batch,), **{f"DepthwiseConv{rank}D": {"kernel_size": 2}, f"Cropping{rank}D": plain})
        add((batch,), **{f"UpSampling{rank}D": plain, f"ZeroPadding{rank}D": plain})
        add((batch,), **{f"SpatialDropout{rank}D": {"rate": 0.5}})
        for kind in ("Average", "Max"):
            pool = {"pool_size": 2}
            add((batch,), **{f"{kind}Pooling{rank}D": pool, f"Global{kind}Pooling{rank}D": plain})
            add((batch,), **{f"Adaptive{kind}Pooling{rank}D": {"output_size": 2}})
        add((_FRAMES[rank],), **{f"ConvLSTM{rank}D": size})
    for name in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"):
        add(([_SEQUENCE, 2 * _SEQUENCE],), **{name: plain})
    add(([_VECTOR, _VECTOR],), Dot={"axes": 1})
    add(([_SEQUENCE, _SEQUENCE],), Attention=plain, AdditiveAttention=plain)
    add((_SEQUENCE, _SEQUENCE), MultiHeadAttention={"num_heads": 2, "key_dim": 2, "dropout": 0.5})
    add((_SEQUENCE, _SEQUENCE), GroupQueryAttention={"head_dim": 2, "num_query_heads": 2, "num_key_value_heads": 1})
    embedding = {"input_dim": 8, "output_dim": 2}
    add((_IDS,), Embedding=embedding, ReversibleEmbedding=embedding, CategoryEncoding={"num_tokens": 8})
    add((_IDS,), Hashing={"num_bins": 3}, IntegerLookup={"vocabulary": [1, 2, 3]})
    add((_floats(2, 64, 1),), STFTSpectrogram={"frame_length": 16, "frame_step": 8, "fft_length": 16})
    add((_floats(2, 64),), MelSpectrogram={"fft_length": 16, "sequence_stride": 8, "num_mel_bins": 4})
    for name in ("Brightness", "Contrast", "Height", "Rotation", "Width"):
        add((_IMAGE,), **{f"Random{name}": {"factor": 0.2}})
    add((_IMAGE,), RandomZoom={"height_factor": 0.2}, RandomFlip=plain, RandomCrop={"height": 4, "width": 4})
    add((_IMAGE,), RandomTranslation={"height_factor": 0.2, "width_factor": 0.2})
    made: dict[str, tuple[_Make, tuple[Any, ...]]] = {
        "Bidirectional": (lambda layers: layers.Bidirectional(layers.LSTM(2)), (_SEQUENCE,)),
        "Lambda": (lambda layers: layers.Lambda(tf.tanh), (_VECTOR,)),
        "RNN": (lambda layers: layers.RNN(layers.GRUCell(2)), (_SEQUENCE,)),
        "SpectralNormalization": (lambda layers: layers.SpectralNormalization(layers.Conv2D(2, 2)), (_IMAGE,)),
        "StackedRNNCells": (lambda layers: layers.RNN([layers.LSTMCell(2), layers.SimpleRNNCell(2)]), (_SEQUENCE,)),
        "TimeDistributed": (lambda layers: layers.TimeDistributed(layers.Dense(2)), (_SEQUENCE,)),
    }
    return rows | made


_ROWS = _rows()
_ALL = [
    pytest.param(keras, name, id=f"{id_}-{name}")
    for id_, keras in installed().items()
    for name in _ROWS
    if hasattr(keras.layers, name)
]
#: Classes that hold constants of a type, or compute in another type than that of their policy.
_NOT_SET = ("CategoryEncoding", "IntegerLookup", "Normalization")
#: One of each kind. The others differ in what Keras does, and not in what a level does: O2 is enough for them.
_AT_EVERY_LEVEL = "Activation BatchNormalization Bidirectional Conv2D Dense Embedding GlobalAveragePooling2D LSTM "
_AT_EVERY_LEVEL += "MultiHeadAttention Normalization Resizing SpectralNormalization"


def _trained(keras: ModuleType, name: str) -> tuple[Any, list[Any]]:
    """Return a layer, and the types of its gradients, after it ran forward and backward."""
    make, inputs = _ROWS[name]
    layer = make(keras.layers)
    given = tf.nest.map_structure(tf.convert_to_tensor, inputs)
    layer(*given)
    weights = [each if isinstance(each, tf.Variable) else each.value for each in layer.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch([each for each in tf.nest.flatten(given) if each.dtype.is_floating])
        outputs = [each for each in tf.nest.flatten(layer(*given)) if each.dtype.is_floating]
        loss = tf.add_n([tf.reduce_mean(tf.cast(each, tf.float32) ** 2) for each in outputs] or [tf.constant(0.0)])
    found = tape.gradient(loss, weights) if weights else []
    return layer, [None if each is None else each.dtype for each in found]


def _made(keras: ModuleType, name: str, level: str, global_policy: Callable[[str], None]) -> Any:
    """Return a layer that was made under a level and trained; skip the test if Keras itself cannot do that."""
    try:
        with tfmp.precision(level):
            layer, grads = _trained(keras, name)
    except Exception as error:
        global_policy("float16" if level == "O3" else "mixed_float16")
        with pytest.raises(type(error)):
            _trained(keras, name)
        pytest.skip(f"Keras {keras.__version__} itself cannot run {name} in float16: {type(error).__name__}")
    stored = "float16" if level == "O3" and layer.compute_dtype == "float16" else "float32"
    if is_keras2(keras) and name == "BatchNormalization":
        # Keras 2 stores its weights in float32 under every policy.
        stored = "float32"
    assert {tf.as_dtype(each.dtype).name for each in layer.trainable_variables} <= {stored}
    assert {tf.as_dtype(each) for each in grads if each is not None} <= {tf.as_dtype(stored)}
    return layer


@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize(("keras", "name"), [each for each in _ALL if each.values[1] in _AT_EVERY_LEVEL.split()])
def test_layer_runs_forward_and_backward(
    keras: ModuleType, name: str, level: str, global_policy: Callable[[str], None]
) -> None:
    _made(keras, name, level, global_policy)


@pytest.mark.parametrize(("keras", "name"), _ALL)
def test_layer_runs_at_o2_and_is_set_to_it_and_back(
    keras: ModuleType, name: str, global_policy: Callable[[str], None]
) -> None:
    made = _made(keras, name, "O2", global_policy)
    if name in _NOT_SET:
        return
    make, inputs = _ROWS[name]
    layer = make(keras.layers)
    given = tf.nest.map_structure(tf.convert_to_tensor, inputs)

    def called(layer: Any) -> list[tf.Tensor]:
        return list(tf.nest.flatten(layer(*given)))

    first, second = ([each.numpy().tolist() for each in called(layer)] for _ in range(2))
    before = policy(layer)
    tfmp.set_precision(layer, "O2")
    assert policy(layer) == policy(made)
    assert {each.dtype for each in called(layer)} == {each.dtype for each in called(made)}
    tfmp.set_precision(layer, "O0")
    assert policy(layer) == before
    if first == second and not name.startswith("Random"):
        # Others draw random numbers, or count.
        assert [each.numpy().tolist() for each in called(layer)] == first
