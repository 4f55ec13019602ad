"""Levels of layers that are frozen, shared, kept, subclassed, or of integers, and of models that are compiled."""

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras
from levelled_models import CASES, gradients, policies, policy

import tfmp

pytestmark = [
    pytest.mark.essential,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]

_X = CASES["sequential"].batch


def _named(report: tfmp.mixed_precision.PolicyReport) -> dict[str, str]:
    return {layer.name: layer.now for layer in report.layers}


@for_every_keras()
def test_kept_holder_keeps_layers_two_floors_below(keras: ModuleType) -> None:
    inner = keras.Sequential([keras.Input([3]), keras.layers.Dense(3, name="dense")], name="inner")
    middle = keras.Sequential([keras.Input([3]), inner], name="middle")
    model = keras.Sequential([keras.Input([3]), middle, keras.layers.Dense(2, name="head")], name="net")
    found = _named(tfmp.set_precision(model, "O2", keep_float32=["middle"]))
    assert found["middle/inner/dense"] == "float32"


@for_every_keras()
def test_kept_layer_keeps_the_cells_of_its_stack(keras: ModuleType) -> None:
    cells = [keras.layers.GRUCell(2, name="one"), keras.layers.LSTMCell(2, name="two")]
    model = keras.Sequential([keras.Input([3, 2]), keras.layers.RNN(cells, name="stacked")])
    found = _named(tfmp.set_precision(model, "O2", keep_float32=["stacked"]))
    assert set(found.values()) == {"float32", "mixed_float16"}
    assert [now for name, now in found.items() if name.startswith("stacked")] == ["float32"] * 4


@for_every_keras()
def test_layer_that_is_shared_with_a_kept_holder_is_kept(keras: ModuleType) -> None:
    shared = keras.layers.Dense(3, name="shared")
    holder = keras.Sequential([keras.Input([3]), shared], name="holder")
    model = keras.Sequential([keras.Input([3]), shared, holder])
    assert _named(tfmp.set_precision(model, "O2", keep_float32=["holder"]))["shared"] == "float32"


@for_every_keras()
def test_o1_keeps_user_layers_with_softmax_in_float32_when_made_as_when_set(keras: ModuleType) -> None:
    class Forwarding(keras.layers.Dense):  # type: ignore[name-defined]
        def __init__(self, units: int, **settings: Any) -> None:
            super().__init__(units, **settings)

    class Fixed(keras.layers.Dense):  # type: ignore[name-defined]
        def __init__(self, units: int) -> None:
            super().__init__(units, activation="softmax")

    with tfmp.precision("O1"):
        made = [Forwarding(2, activation="softmax"), Fixed(2)]
    found = [policy(layer) for layer in made]
    for layer in made:
        tfmp.set_precision(layer, "O1")
    assert found == [policy(layer) for layer in made] == ["float32", "float32"]


@for_every_keras()
def test_frozen_layers_are_set(keras: ModuleType) -> None:
    model = CASES["sequential"].built(keras)
    model.layers[0].trainable = False
    tfmp.set_precision(model, "O2")
    assert model(_X).dtype == tf.float16
    assert {grad.dtype for grad in gradients(model, _X)} == {tf.float32}


@for_every_keras()
def test_layer_with_untrained_weights_and_nested_containers_is_set(keras: ModuleType) -> None:
    class Own(keras.layers.Layer):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            self.constant = self.add_weight(shape=[3], initializer="ones", name="constant", trainable=False)
            self.nested = {"all": [self.add_weight(shape=[3], initializer="ones", name="inner")]}

        def call(self, x: Any) -> Any:
            return x * self.constant + self.nested["all"][0]

    def built() -> Any:
        model = keras.Sequential([keras.Input([3]), Own()])
        model(_X)
        return model

    with tfmp.precision("O2"):
        expected = built()
    model = built()
    tfmp.set_precision(model, "O2")
    assert model(_X).dtype == expected(_X).dtype == tf.float16


@for_every_keras()
def test_user_subclass_of_attention_is_set_as_it_is_made(keras: ModuleType) -> None:
    class Own(keras.layers.MultiHeadAttention):  # type: ignore[name-defined]
        pass

    x = np.ones([2, 3, 4], np.float32)
    with tfmp.precision("O1"):
        made = Own(2, 2)
    made(x, x)
    layer = Own(2, 2)
    layer(x, x)
    tfmp.set_precision(layer, "O1")
    assert [each for _, *each in policies(layer)] == [each for _, *each in policies(made)]


@for_every_keras()
def test_island_in_a_model_at_o3_is_kept(keras: ModuleType) -> None:
    with tfmp.precision("O3"):
        body = keras.layers.Dense(4, name="body")
        with tfmp.precision("O0"):
            head = keras.layers.Dense(2, name="head")
        model = keras.Sequential([keras.Input([3]), body, head], name="net")
    model(_X)
    expected = policies(model)
    tfmp.set_precision(model, "O3", keep_float32=["head"])
    assert policies(model) == expected


@for_every_keras()
def test_keeping_a_layer_with_half_weights_is_refused(keras: ModuleType) -> None:
    model = CASES["sequential"].built(keras, "O3")
    before = policies(model)
    with pytest.raises(ValueError, match="'head' has weights in float16"):
        tfmp.set_precision(model, "O3", keep_float32=["head"])
    assert policies(model) == before


@for_every_keras()
def test_metric_is_refused(keras: ModuleType) -> None:
    with pytest.raises(TypeError, match="model must be a model or a layer of Keras, got"):
        tfmp.set_precision(keras.metrics.Mean(), "O2")


@for_every_keras()
def test_softmax_layer_as_activation_is_set_as_it_is_made(keras: ModuleType) -> None:
    with tfmp.precision("O1"):
        made = keras.layers.Dense(2, activation=keras.layers.Softmax())
    layer = keras.layers.Dense(2, activation=keras.layers.Softmax())
    tfmp.set_precision(layer, "O1")
    assert policies(layer) == policies(made)


@for_every_keras()
def test_warning_names_the_first_layer_of_a_float32_model(keras: ModuleType) -> None:
    with tfmp.precision("O0"):
        layers = [keras.layers.Dense(2, dtype="mixed_float16", name=name) for name in ("body", "head")]
        model = keras.Sequential([keras.Input([3]), *layers], name="net")
    with pytest.warns(UserWarning, match=r"'net' computes in float16 \(body, head\)"):
        model.compile("sgd", "mse")


@for_every_keras("keras3")
def test_model_that_was_compiled_loads_compiled(keras: ModuleType, tmp_path: Path) -> None:
    with tfmp.precision("O0"):
        model = CASES["sequential"].built(keras)
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.compiled


@for_every_keras()
def test_layer_that_computes_integers_keeps_its_policy(keras: ModuleType) -> None:
    layer = keras.layers.IntegerLookup(vocabulary=[1, 2, 3])
    before = policy(layer)
    tfmp.set_precision(layer, "O2")
    assert policy(layer) == before


@for_every_keras()
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_normalization_of_inputs_stays_in_float32(keras: ModuleType, level: str) -> None:
    layer = keras.layers.Normalization(axis=None, mean=1.0, variance=4.0)
    before = layer(_X).numpy()
    tfmp.set_precision(layer, level)
    assert (layer(_X).numpy() == before).all()
    with tfmp.precision(level):
        assert policy(keras.layers.Normalization(axis=None, mean=1.0, variance=4.0)) == "float32"


@for_every_keras()
def test_activation_of_tensorflow_is_known(keras: ModuleType) -> None:
    with tfmp.precision("O1"):
        assert policy(keras.layers.Dense(2, activation=tf.nn.softmax)) == "float32"
        assert policy(keras.layers.Dense(2, activation=tf.nn.relu)) == "mixed_float16"


@for_every_keras("keras2", "tf_keras")
def test_category_encoding_still_runs(keras: ModuleType) -> None:
    layer = keras.layers.CategoryEncoding(8)
    ids = np.array([[1, 2, 3]])
    before = layer(ids).numpy()
    tfmp.set_precision(layer, "O2")
    assert (layer(ids).numpy() == before).all()


@for_every_keras()
def test_weights_in_a_named_tuple_and_in_a_private_list_are_cast(keras: ModuleType) -> None:
    class Weights(NamedTuple):
        kernel: Any
        bias: Any

    class Own(keras.layers.Layer):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            self.pair = Weights(*(self.add_weight(shape=[3], initializer="ones", name=name) for name in ("k", "b")))
            self._scales = [self.add_weight(shape=[3], initializer="ones", name="scale")]

        def call(self, x: Any) -> Any:
            return (x * self.pair.kernel + self.pair.bias) * self._scales[0]

    layer = Own()
    before = layer(_X).numpy()
    tfmp.set_precision(layer, "O2")
    assert layer(_X).dtype == tf.float16
    tfmp.set_precision(layer, "O0")
    assert (layer(_X).numpy() == before).all()


@for_every_keras()
def test_model_without_layers_is_refused(keras: ModuleType) -> None:
    class Lazy(keras.Model):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            self.head = keras.layers.Dense(2)
            self.built = True

        def call(self, x: Any) -> Any:
            return self.head(x)

    for model in (keras.Sequential(name="net"), Lazy(name="net")):
        with pytest.raises(ValueError, match="the model 'net' has no layers yet: add them, or call it on a batch"):
            tfmp.set_precision(model, "O2")
        assert policy(model) == "float32"


@for_every_keras()
def test_weight_of_a_type_of_its_own_is_no_obstacle_at_the_level_it_was_made_at(keras: ModuleType) -> None:
    class Own(keras.layers.Layer):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            self.scale = self.add_weight(shape=[], initializer="ones", name="scale", dtype="float32")

        def call(self, x: Any) -> Any:
            return x * tf.cast(self.scale, x.dtype)

    with tfmp.precision("O3"):
        layer = Own()
    layer(_X)
    tfmp.set_precision(layer, "O3")
    assert policy(layer) == "float16"


def _with_added_losses(keras: ModuleType) -> Any:
    """Return a model with a loss that a layer adds, a regularized result and regularized weights."""

    class _Adding(keras.layers.Layer):  # type: ignore[misc, name-defined] # of any Keras
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(0.25 * tf.reduce_mean(x * x))
            return x

    half = keras.regularizers.L2(0.5)
    ones = {"kernel_initializer": "ones", "use_bias": False}
    body = keras.layers.Dense(2, kernel_regularizer=half, activity_regularizer=half, **ones)
    return keras.Sequential([keras.Input([2]), body, _Adding(), keras.layers.Dense(1, **ones)])


_MADE_UNDER = [(level, True) for level in ("O1", "O2", "O3", "O1-bfloat16", "O2-bfloat16", "O3-bfloat16")]


@pytest.mark.parametrize(("level", "made_under"), [*_MADE_UNDER, ("O1", False), ("O2", False), ("O2-bfloat16", False)])
@for_every_keras()
def test_losses_that_layers_add_are_added_to_the_loss(keras: ModuleType, level: str, made_under: bool) -> None:
    with tfmp.precision(level if made_under else "O0"):
        model = _with_added_losses(keras)
    if not made_under:
        tfmp.set_precision(model, level)
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.SGD(2.0**-4), tfmp.FixedLossScaleManager(64)), "mse")
    # One example: Keras 3.5 adds up the losses of activities over a batch, later versions take their mean.
    history = model.fit(np.float32([[1, 2]]), np.float32([[4]]), verbose=0).history
    # The outputs are 6, and those of the first layer 3: 4 of the squared error, 0.5 * 18 of these, 0.5 * 4 of the
    # weights, and 0.25 * 9 of what the layer adds.
    assert history["loss"] == [4 + 9 + 2 + 2.25]
    kernels = [tf.convert_to_tensor(weight).numpy().tolist() for weight in model.weights]
    # The gradient of the results of the first layer is 4 + 3 + 0.75, that of its weights this times the input, and 1.
    assert kernels == [[[1 - 8.75 / 16] * 2, [1 - 16.5 / 16] * 2], [[1 - 12 / 16]] * 2]
