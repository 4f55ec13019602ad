"""Fails on a Keras that has one of the private names no longer, or that means something else by it.

They run with every supported Keras, as do those tests of levels, of recomputation and of checks that need the other
names of layers. What optimizers need of them is in the tests of optimizers.
"""

import sys
import types
from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer

from tfmp.any_keras import internals
from tfmp.any_keras.which import keras_of


@for_every_keras()
def test_layers_are_found_in_a_layer_that_is_no_model(keras: ModuleType) -> None:
    cell = keras.layers.LSTMCell(2)
    outer = keras.layers.TimeDistributed(keras.layers.RNN(cell))
    assert list(internals.layer_and_all_within(outer)) == [outer, outer.layer, cell]
    assert internals.layers_directly_in(outer) == [outer.layer]


@for_every_keras("keras2", "tf_keras")
def test_sequential_model_of_keras2_is_a_graph_of_layers_once_its_inputs_are_known(keras: ModuleType) -> None:
    found = [keras.Sequential([*inputs, keras.layers.Dense(2)]) for inputs in ([keras.Input([2])], [])]
    assert [internals.is_graph_of_layers(each) for each in found] == [True, False]


@for_every_keras("keras3")
def test_casts_to_half_precision_are_told_from_other_operations(keras: ModuleType) -> None:
    inputs = keras.Input([2])
    cast = keras.ops.cast(inputs, "float16")
    model = keras.Model(inputs, [cast, keras.ops.cast(cast, "float32"), keras.ops.abs(cast)])
    assert [each.dtype for each in internals.half_casts(keras, model)] == ["float16"]
    assert internals.half_casts(keras, keras.layers.Dense(2)) == []


@for_every_keras("keras2")
def test_layers_of_tf1_are_told_from_others(keras: ModuleType) -> None:
    assert internals.is_layer_of_tf1(tf.compat.v1.layers.Dense(2))
    assert not internals.is_layer_of_tf1(keras.layers.Dense(2))


@for_every_keras("keras3")
def test_constructor_of_models_of_keras3_sets_a_known_attribute_first(keras: ModuleType) -> None:
    class Early(keras.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.early = 1
            super().__init__()
            self.late = 2

    names = list(vars(Early()))
    assert names.index("early") < names.index(internals.SET_BY_CONSTRUCTOR) < names.index("late")


@for_every_keras("keras2", "tf_keras")
def test_what_keras2_tracks_is_in_attributes_of_known_prefixes(keras: ModuleType) -> None:
    layer = keras.layers.Layer()
    before = set(vars(layer))
    layer.held = [keras.layers.Dense(2)]
    added = set(vars(layer)) - before - {"held"}
    assert added
    assert all(name.startswith(internals.TRACKING_PREFIXES) for name in added)


@for_every_keras()
def test_mask_is_where_keras_puts_it(keras: ModuleType) -> None:
    masked = keras.layers.Masking()(tf.constant([[[1.0], [0.0]]]))
    mask = internals.mask_of(masked)
    assert mask is not None
    assert np.asarray(mask).tolist() == [[True, False]]
    other = tf.constant([[[1.0], [2.0]]])
    assert internals.mask_of(other) is None
    internals.set_mask(other, mask)
    # Keras takes the mean over what is not masked.
    assert np.asarray(keras.layers.GlobalAveragePooling1D()(other)).tolist() == [[1.0]]


@for_every_keras()
def test_loss_of_a_function_takes_weights_of_examples(keras: ModuleType) -> None:
    loss = internals.loss_of_function(keras, lambda labels, outputs: tf.reduce_sum(outputs - labels, axis=-1))
    assert isinstance(loss, keras.losses.Loss)
    found = loss(tf.zeros([2, 1]), tf.constant([[1.0], [2.0]]), sample_weight=tf.constant([2.0, 1.0]))
    assert float(found) == 2


@for_every_keras()
def test_what_an_optimizer_set_before_an_error_stays_set_but_not_what_a_view_of_it_was_given(keras: ModuleType) -> None:
    opt = optimizer(keras, clipvalue=1.0)

    def fail() -> None:
        with internals.view_of(opt, clipvalue=None) as view:
            assert view.clipvalue is None
            assert view.iterations is opt.iterations
            vars(view).update(clipvalue=2.0, counted=4)
            raise RuntimeError("of the update")

    with pytest.raises(RuntimeError, match="of the update"):
        fail()
    assert (opt.clipvalue, opt.counted) == (1, 4)


@pytest.mark.parametrize("version", ["", "3.15.1"])
def test_package_that_only_has_the_name_of_keras_has_no_objects(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("keras")
    vars(package)["__version__"] = version
    monkeypatch.setitem(sys.modules, "keras", package)
    monkeypatch.delitem(sys.modules, "tf_keras", raising=False)
    assert keras_of(object(), "layers.Layer") is None
