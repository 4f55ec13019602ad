"""Fails on a Keras that has one of the private names no longer, or that means something else by it.

They run with every supported Keras. What optimizers need of them is in the tests of optimizers.
"""

import contextlib
import sys
import types
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer

from tfmp.any_keras import internals
from tfmp.any_keras.which import keras_of


def _functional(keras: ModuleType, **kwargs: Any) -> Any:
    inputs = keras.Input([2], name="inputs")
    return keras.Model(inputs, keras.layers.Dense(3, name="dense")(inputs), **kwargs)


def _sequential(keras: ModuleType) -> Any:
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(3, name="dense")])


@for_every_keras()
def test_layers_are_found_in_a_layer_that_is_no_model(keras: ModuleType) -> None:
    cell = keras.layers.LSTMCell(2)
    outer = keras.layers.TimeDistributed(keras.layers.RNN(cell))
    assert list(internals.layer_and_all_within(outer)) == [outer, outer.layer, cell]
    assert internals.layers_directly_in(outer) == [outer.layer]


@for_every_keras()
def test_models_are_told_apart_and_what_they_consist_of_is_known(keras: ModuleType) -> None:
    functional, sequential, not_built = (
        _functional(keras),
        _sequential(keras),
        keras.Sequential([keras.layers.Dense(2)]),
    )
    assert type(functional) is internals.functional_class(keras)
    assert internals.functional_of(keras, functional) is functional
    if keras.__version__.startswith("3."):
        layers = [None, keras.layers.Dense(2), not_built]
        assert isinstance(internals.functional_of(keras, sequential), internals.functional_class(keras))
    else:
        # A sequential model is a functional one.
        layers = [None, keras.layers.Dense(2)]
        nodes = internals.nodes_by_depth(functional)
        assert {depth: [node.layer.name for node in at] for depth, at in nodes.items()} == {0: ["dense"], 1: ["inputs"]}
        assert [internals.is_graph_of_layers(each) for each in (sequential, not_built)] == [True, False]
    assert [internals.functional_of(keras, each) for each in layers] == [None] * len(layers)


@for_every_keras()
def test_inputs_of_models_are_known_and_can_be_widened(keras: ModuleType) -> None:
    inputs = keras.Input([2], dtype="float16")
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    assert internals.symbolic_inputs(keras, keras.layers.Dense(2)) == []
    (found,) = internals.symbolic_inputs(keras, model)
    with contextlib.ExitStack() as undo:
        internals.widen_symbolic(keras, found, undo)
        assert tf.as_dtype(found.dtype) == tf.float32
        assert tf.as_dtype(model.inputs[0].dtype) == tf.float32
    assert tf.as_dtype(found.dtype) == tf.float16


@for_every_keras("keras3")
def test_casts_to_half_precision_are_told_from_other_operations(keras: ModuleType) -> None:
    inputs = keras.Input([2])
    cast = keras.ops.cast(inputs, "float16")
    model = keras.Model(inputs, [cast, keras.ops.cast(cast, "float32"), keras.ops.abs(cast)])
    assert [each.dtype for each in internals.half_casts(keras, model)] == ["float16"]
    assert internals.half_casts(keras, keras.layers.Dense(2)) == []


@for_every_keras("keras2", "tf_keras")
def test_functions_of_tensorflow_in_models_of_keras2_are_told_from_layers(keras: ModuleType) -> None:
    inputs = keras.Input([2])
    model = keras.Model(inputs, keras.layers.Dense(2)(tf.abs(inputs)))
    is_function = {type(each).__name__: internals.is_function_of_tensorflow(keras, each) for each in model.layers}
    assert is_function == {"InputLayer": False, "TFOpLambda": True, "Dense": False}


@for_every_keras("keras2", "tf_keras")
def test_layers_in_graphs_and_those_of_tf1_are_told_from_others(keras: ModuleType) -> None:
    with tf.Graph().as_default():
        layer = keras.layers.Dense(2)
    assert isinstance(layer, internals.layer_class_of_graphs(keras))
    assert not isinstance(keras.layers.Dense(2), internals.layer_class_of_graphs(keras))
    if keras.__name__ == "keras":
        assert internals.is_layer_of_tf1(tf.compat.v1.layers.Dense(2))
        assert not internals.is_layer_of_tf1(keras.layers.Dense(2))


@for_every_keras()
def test_compiled_models_are_known_with_their_arguments(keras: ModuleType) -> None:
    model = _functional(keras)
    assert not internals.is_compiled(keras, model)
    assert internals.compiled_with(model) is None

    def loss(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.abs(labels - outputs)

    model.compile("sgd", loss)
    assert internals.is_compiled(keras, model)
    compiled = internals.compiled_with(model)
    assert compiled is not None
    assert compiled["loss"] is loss
    assert not internals.is_compiled(keras, keras.layers.Dense(2))


@for_every_keras()
def test_own_weights_random_numbers_and_freezing_are_of_a_layer_without_those_in_it(keras: ModuleType) -> None:
    norm, model = keras.layers.BatchNormalization(), _functional(keras)
    norm.build([None, 2])
    assert {id(each) for each in internals.own_weights(keras, norm)} == {id(each) for each in norm.weights}
    assert internals.own_weights(keras, model) == []
    internals.set_trainable_of_itself(model, False)
    assert [model.trainable, model.get_layer("dense").trainable] == [False, True]
    candidates = (keras.layers.Dropout(0.5), keras.layers.Dense(2), object())
    assert [internals.has_random_generator(keras, each) for each in candidates] == [True, False, False]


@for_every_keras("keras2", "tf_keras")
def test_losses_that_a_layer_of_keras2_added_can_be_taken(keras: ModuleType) -> None:
    layer = keras.layers.ActivityRegularization(l2=1.0)
    layer(tf.ones([1, 2]))
    assert [float(each) for each in internals.added_losses(layer)] == [2.0]
    internals.added_losses(layer).clear()
    assert layer.losses == []


@for_every_keras("keras3")
def test_constructor_of_models_of_keras3_sets_a_known_attribute_first(keras: ModuleType) -> None:
    class Early(keras.Model):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.early = 1
            super().__init__()
            self.late = 2

    names = list(vars(Early()))
    assert names.index("early") < names.index(internals.SET_BY_CONSTRUCTOR) < names.index("late")


@for_every_keras()
def test_policy_is_put_into_a_layer_and_in_keras3_may_have_variables_of_another_type(keras: ModuleType) -> None:
    is_keras2 = keras.__version__.startswith("2.")
    layer = keras.layers.Dense(2)
    policies = keras.mixed_precision if is_keras2 else keras.dtype_policies
    policy = getattr(policies, "Policy" if is_keras2 else "DTypePolicy")("mixed_float16")
    before = internals.dtype_policy(layer)
    for put, dtype in ((policy, "float16"), (before, "float32")):
        internals.put_dtype_policy(keras, layer, put)
        assert internals.dtype_policy(layer) is put
        assert layer.compute_dtype == dtype
    if not is_keras2:
        policy = internals.policy_with_variables_in(keras, "float32", "float16")
        assert (policy.compute_dtype, policy.variable_dtype) == ("float32", "float16")
        assert keras.DTypePolicy("float32").variable_dtype == "float32"


@for_every_keras("keras2", "tf_keras")
def test_variable_is_cast_where_a_layer_of_keras2_reads_it(keras: ModuleType) -> None:
    layer = keras.layers.Dense(2, dtype="float32")
    layer.build([None, 2])
    cast = internals.cast_where_read(keras, layer.kernel)
    assert internals.cast_where_read(keras, cast) is cast
    seen = []

    class Reads(keras.layers.Layer):  # type: ignore[name-defined, misc]
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            seen.append((inputs @ cast).dtype)
            return inputs

    Reads(dtype="mixed_float16")(tf.ones([1, 2]))
    assert seen == [tf.float16]


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
