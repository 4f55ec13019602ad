"""Layers of every Keras that are made in the scope of a level."""

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras
from levelled_models import (
    CASES,
    POLICIES,
    Case,
    by_class,
    for_every_case,
    global_policy,
    gradients,
    half_ops,
    layer_policies,
    policies,
    policy,
    stored,
    values,
    with_given_weights,
)

import tfmp
from tfmp.hosts.keras.which import is_keras2

__all__ = ["global_policy"]


@pytest.mark.parametrize("level", POLICIES)
@for_every_keras()
def test_layer_and_model_have_the_policy_of_the_level(keras: ModuleType, level: str) -> None:
    with tfmp.precision(level) as scope:
        layers = [keras.layers.Dense(2), keras.layers.Layer(), keras.Sequential([keras.layers.Dense(2)]), keras.Model()]
    assert scope.level == level
    assert [policy(layer) for layer in layers] == [POLICIES[level]] * 4
    assert policy(keras.layers.Dense(2)) == "float32"


@for_every_keras()
def test_suffix_of_float16_may_be_written(keras: ModuleType) -> None:
    with tfmp.precision("O2-float16") as scope:
        assert (policy(keras.layers.Dense(2)), scope.level) == ("mixed_float16", "O2")


@pytest.mark.parametrize("level", ["O1", "O2", "O2-bfloat16"])
@for_every_case
@for_every_keras()
def test_models_of_every_kind_run_with_float32_weights_and_gradients(keras: ModuleType, case: Case, level: str) -> None:
    model = case.built(keras, level)
    found = policies(model)
    float32 = {name for name, each, _, _ in found if each == "float32"}
    assert {each for _, each, _, _ in found} - {"float32"} == {POLICIES[level]}
    assert float32 <= (set(case.o1) if level == "O1" else set())
    assert stored(model) == {"float32"}
    assert {grad.dtype for grad in gradients(model, case.batch)} == {tf.float32}


@pytest.mark.parametrize("name", ["sequential", "nested", "subclassed", "attention", "recurrent"])
@for_every_keras()
def test_models_at_o3_compute_and_store_half(keras: ModuleType, name: str) -> None:
    model = CASES[name].built(keras, "O3")
    assert {each for _, each, _, _ in policies(model)} == {"float16"}
    # Keras 2 stores the weights of batch normalization in float32 under every policy.
    exceptions = {"float32"} if name == "subclassed" and is_keras2(keras) else set()
    assert stored(model) - exceptions == {"float16"}
    found = gradients(model, CASES[name].batch)
    assert {tf.as_dtype(each.dtype) for each in model.trainable_variables} == {grad.dtype for grad in found}


@pytest.mark.parametrize("name", ["functional", "subclassed", "attention", "convolutional"])
@for_every_keras()
def test_o2_computes_what_the_mixed_policy_of_keras_computes(
    keras: ModuleType, name: str, global_policy: Callable[[str], None]
) -> None:
    case = CASES[name]
    model = case.built(keras, "O2")
    global_policy("mixed_float16")
    expected = case.built(keras)
    assert policies(model) == policies(expected)
    assert values(model) == values(expected)
    for one, other in zip(tf.nest.flatten(model(case.batch)), tf.nest.flatten(expected(case.batch)), strict=True):
        assert one.dtype == other.dtype == tf.float16
        np.testing.assert_array_equal(one, other)


@for_every_keras()
def test_o1_keeps_what_normalizes_or_sums_in_float32(keras: ModuleType) -> None:
    names = ["Softmax", "GlobalAveragePooling1D", "GroupNormalization", "UnitNormalization", "ActivityRegularization"]
    with tfmp.precision("O1"):
        layers = [getattr(keras.layers, name)() for name in names] + [keras.layers.Lambda(lambda x: x)]
        half = [keras.layers.BatchNormalization(), keras.layers.LayerNormalization(), keras.layers.AveragePooling1D(2)]
    assert [policy(layer) for layer in layers] == ["float32"] * 6
    assert [policy(layer) for layer in half] == ["mixed_float16"] * 3
    with tfmp.precision("O2"):
        layers = [getattr(keras.layers, name)() for name in names]
    assert [policy(layer) for layer in layers] == ["mixed_float16"] * 5


@for_every_keras()
def test_o1_keeps_subclasses_of_these_in_float32(keras: ModuleType) -> None:
    class Mean(keras.layers.GlobalAveragePooling1D):  # type: ignore[name-defined]
        pass

    with tfmp.precision("O1"):
        assert policy(Mean()) == "float32"


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "exponential"])
@for_every_keras()
def test_o1_keeps_layers_with_exponentials_in_float32_however_these_are_given(keras: ModuleType, name: str) -> None:
    layers, function = keras.layers, getattr(keras.activations, name, None)
    if function is None:
        pytest.skip(f"needs keras.activations.{name}, which Keras {keras.__version__} does not have")
    with tfmp.precision("O1"):
        made = [layers.Dense(2, name), layers.Dense(2, activation=name), layers.Dense(2, activation=function)]
        made += [layers.Dense(2, function), layers.Activation(name), layers.Activation(activation=function)]
        made += [layers.Conv2D(2, 1, activation=name), layers.EinsumDense("ab,bc->ac", 2, activation=name)]
        made += [layers.TimeDistributed(layers.Dense(2, name)).layer]
        other = [layers.Dense(2, "relu"), layers.Dense(2), layers.Activation("tanh"), layers.Dense(2, tf.nn.relu)]
    assert [policy(layer) for layer in made] == ["float32"] * len(made)
    assert [policy(layer) for layer in other] == ["mixed_float16"] * 4
    with tfmp.precision("O2"):
        assert policy(layers.Dense(2, name)) == "mixed_float16"


@for_every_keras()
def test_recurrent_layer_with_exponentials_takes_its_cell_along(keras: ModuleType) -> None:
    with tfmp.precision("O1"):
        lstm = keras.layers.LSTM(3, activation="softmax")
    assert (policy(lstm), policy(lstm.cell)) == ("float32", "float32")


@for_every_keras()
def test_layers_that_keras_makes_itself_follow_their_owner(keras: ModuleType) -> None:
    x = np.ones([2, 3, 4], np.float32)
    with tfmp.precision("O1"):
        attention = keras.layers.MultiHeadAttention(2, 2)
        island = keras.layers.MultiHeadAttention(2, 2, dtype="float32")
        lstm = keras.layers.LSTM(3, dtype="float32")
    attention(x, x)
    island(x, x)
    assert {found for _, found, _, _ in policies(attention)} == {"mixed_float16"}
    assert {found for _, found, _, _ in policies(island)} == {"float32"}
    assert policy(lstm) == "float32"


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@for_every_keras()
def test_dtype_that_a_layer_is_given_wins(keras: ModuleType, level: str) -> None:
    of_keras = keras.mixed_precision.Policy("mixed_bfloat16") if hasattr(keras.mixed_precision, "Policy") else None
    given: list[Any] = ["float32", "float16", "float64", "mixed_float16", of_keras or "mixed_bfloat16"]
    with tfmp.precision(level):
        found = [policy(keras.layers.Dense(2, dtype=dtype)) for dtype in given]
        assert policy(keras.layers.Dense(2, dtype=None)) == POLICIES[level]
        again = keras.layers.Dense.from_config(keras.layers.Dense(2, dtype="float64").get_config())
    assert found == ["float32", "float16", "float64", "mixed_float16", "mixed_bfloat16"]
    assert policy(again) == "float64"


@for_every_keras()
def test_inner_levels_act_and_outer_ones_come_back(keras: ModuleType) -> None:
    found = []
    levels = ["O2", "O0", "O3", "O1-bfloat16", "O0", "O2"]

    def descend(rest: list[str]) -> None:
        if not rest:
            return
        with tfmp.precision(rest[0]):
            found.append(policy(keras.layers.Dense(2)))
            descend(rest[1:])
            found.append(policy(keras.layers.Dense(2)))

    descend(levels)
    expected = [POLICIES[level] for level in levels]
    assert found == [*expected, *reversed(expected)]
    assert policy(keras.layers.Dense(2)) == "float32"


@for_every_keras()
def test_island_in_a_model_computes_float32(keras: ModuleType) -> None:
    with tfmp.precision("O2"):
        body = keras.layers.Dense(4)
        with tfmp.precision("O0"):
            head = keras.layers.Dense(2)
        model = keras.Sequential([keras.Input([3]), body, head])
    assert [policy(layer) for layer in (model, body, head)] == ["mixed_float16", "mixed_float16", "float32"]
    assert model(CASES["sequential"].batch).dtype == tf.float32
    gradients(model, CASES["sequential"].batch)


@for_every_keras()
def test_level_may_be_a_decorator(keras: ModuleType) -> None:
    @tfmp.precision("O2")
    def build(units: int) -> Any:
        """Build."""
        return keras.layers.Dense(units), build(units - 1) if units > 1 else None

    layer, (inner, _) = build(2)
    assert (policy(layer), policy(inner), build.__doc__) == ("mixed_float16", "mixed_float16", "Build.")
    assert policy(keras.layers.Dense(2)) == "float32"


@for_every_keras()
def test_one_object_is_entered_again_within_itself_and_later(keras: ModuleType) -> None:
    scope = tfmp.precision("O2")
    with scope, tfmp.precision("O0"), scope:
        assert policy(keras.layers.Dense(2)) == "mixed_float16"
    assert policy(keras.layers.Dense(2)) == "float32"
    with scope:
        assert policy(keras.layers.Dense(2)) == "mixed_float16"
    assert policy(keras.layers.Dense(2)) == "float32"


@for_every_keras()
def test_error_ends_the_scope(keras: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError), tfmp.precision("O0"), tfmp.precision("O2"):
        _ = 1 / 0
    assert policy(keras.layers.Dense(2)) == "float32"
    with tfmp.precision("O2"), pytest.raises((TypeError, ValueError)):
        keras.layers.Dense(2, no_such_argument=1)
    assert policy(keras.layers.Dense(2)) == "float32"


@for_every_keras()
def test_other_threads_are_left_alone(keras: ModuleType) -> None:
    found: dict[str, list[str]] = {}
    barrier = threading.Barrier(3)

    def make(level: str | None) -> None:
        barrier.wait(timeout=30)
        if level is None:
            found["none"] = [policy(keras.layers.Dense(2)) for _ in range(20)]
            return
        with tfmp.precision(level):
            found[level] = [policy(keras.layers.Dense(2)) for _ in range(20)]

    with tfmp.precision("O2"):
        threads = [threading.Thread(target=make, args=[level]) for level in (None, "O3", "O1-bfloat16")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert policy(keras.layers.Dense(2)) == "mixed_float16"
    assert found == {"none": ["float32"] * 20, "O3": ["float16"] * 20, "O1-bfloat16": ["mixed_bfloat16"] * 20}


@for_every_keras()
def test_one_object_serves_several_threads_at_a_time(keras: ModuleType) -> None:
    scope, found = tfmp.precision("O2"), []
    entered, may_leave = threading.Barrier(2), threading.Barrier(2)

    def make() -> None:
        with scope:
            entered.wait(timeout=30)
            may_leave.wait(timeout=30)
            found.append(policy(keras.layers.Dense(2)))
        found.append(policy(keras.layers.Dense(2)))

    thread = threading.Thread(target=make)
    thread.start()
    # It is entered there first and left here first.
    entered.wait(timeout=30)
    with scope:
        pass
    assert policy(keras.layers.Dense(2)) == "float32"
    may_leave.wait(timeout=30)
    thread.join(timeout=60)
    assert found == ["mixed_float16", "float32"]


@for_every_keras()
def test_thread_that_leaves_first_leaves_the_level_of_the_other(keras: ModuleType) -> None:
    scope, found = tfmp.precision("O2"), []
    with_both, left = threading.Barrier(2), threading.Barrier(2)

    def make() -> None:
        with scope:
            with_both.wait(timeout=30)
            left.wait(timeout=30)
            found.append(policy(keras.layers.Dense(2)))

    thread = threading.Thread(target=make)
    with scope:
        thread.start()
        # It is entered here first and left here first.
        with_both.wait(timeout=30)
    assert policy(keras.layers.Dense(2)) == "float32"
    left.wait(timeout=30)
    thread.join(timeout=60)
    assert found == ["mixed_float16"]


def test_generators_and_coroutines_are_not_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=r"tfmp\.precision decorates functions, got .* would run outside"):
            tfmp.precision("O2")(function)


@for_every_keras()
def test_layer_keeps_no_variables_of_the_function_that_makes_it(keras: ModuleType) -> None:
    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)
    with tfmp.precision("O1"):
        keras.layers.Dense(2)
    del large
    assert gone() is None


@for_every_keras()
def test_clearing_the_session_keeps_the_level(keras: ModuleType) -> None:
    with tfmp.precision("O2"):
        keras.backend.clear_session()
        assert policy(keras.layers.Dense(2)) == "mixed_float16"


@for_every_keras()
def test_global_policy_stays_what_it_is(keras: ModuleType, global_policy: Callable[[str], None]) -> None:
    global_policy("mixed_bfloat16")
    with tfmp.precision("O2"):
        assert policy(keras.layers.Dense(2)) == "mixed_float16"
        with tfmp.precision("O0"):
            assert policy(keras.layers.Dense(2)) == "float32"
        global_policy("float64")
        assert policy(keras.layers.Dense(2)) == "mixed_float16"
    assert policy(keras.layers.Dense(2)) == "float64"


@for_every_keras()
def test_metrics_losses_optimizers_and_variables_are_not_affected(keras: ModuleType) -> None:
    with tfmp.precision("O3"):
        metrics = [keras.metrics.Mean(), keras.metrics.AUC(), keras.metrics.MeanMetricWrapper(lambda y, p: p - y)]
        loss, optimizer = keras.losses.MeanSquaredError(), keras.optimizers.Adam()
        optimizer.build([getattr(keras, "Variable", tf.Variable)(np.zeros(2, np.float32))])
        result = loss(np.zeros([2, 1], np.float32), np.ones([2, 1], np.float32))
    for metric in metrics:
        assert metric.dtype == "float32"
        assert {tf.as_dtype(each.dtype) for each in metric.variables if "iter" not in each.name} <= {tf.float32}
    floats = [each for each in optimizer.variables if tf.as_dtype(each.dtype).is_floating]
    assert {tf.as_dtype(each.dtype) for each in floats} == {tf.float32}
    assert result.dtype == tf.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O2-bfloat16"])
@for_every_keras()
def test_inputs_keep_their_types(keras: ModuleType, level: str) -> None:
    with tfmp.precision(level):
        inputs = [keras.Input([2]), keras.Input([2], dtype="int32"), keras.Input([2], dtype="float16")]
    assert [tf.as_dtype(each.dtype).name for each in inputs] == ["float32", "int32", "float16"]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("axes", [2, 4])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["BatchNormalization", "LayerNormalization"])
@for_every_keras()
def test_normalization_computes_in_float32_and_returns_half(
    keras: ModuleType, name: str, training: bool, axes: int, level: str
) -> None:
    with tfmp.precision(level):
        layer = getattr(keras.layers, name)()
    x = tf.ones([4] * axes, tf.float16)
    layer(x)

    def forward(x: Any) -> Any:
        # Keras 2 and old Keras 3 do not take it in layer normalization.
        return layer(x, training=training) if name == "BatchNormalization" else layer(x)

    assert forward(x).dtype == tf.float16
    # The last of these computes in float32, with float32 parameters, and rounds what it returns.
    allowed = {"Cast", "FusedBatchNormV3"}
    if name == "LayerNormalization" and is_keras2(keras):
        # Keras 2 multiplies what is normalized by gamma, and adds beta, after that rounding.
        allowed |= {"Mul", "AddV2"}
    moving = {"Placeholder", "Identity", "Reshape", "Transpose", "Squeeze", "ExpandDims", "Shape", "NoOp"}
    assert half_ops(forward, x) - moving <= allowed


@for_every_keras()
def test_normalization_of_large_values_does_not_overflow(keras: ModuleType) -> None:
    # Their squares are beyond the largest number of float16.
    x = tf.constant([[3e4, -3e4, 1e4, 0], [0, 1e4, 3e4, -3e4]], tf.float16)
    for level in ("O1", "O2"):
        with tfmp.precision(level):
            layers = [keras.layers.BatchNormalization(), keras.layers.LayerNormalization()]
        for layer in layers:
            assert np.isfinite(layer(x, training=True) if layer is layers[0] else layer(x)).all()


@for_every_keras()
def test_nothing_is_left_on_layers_that_are_made_or_copied(keras: ModuleType) -> None:
    outside = keras.layers.Dense(2)
    with tfmp.precision("O2"):
        inside = keras.layers.Dense(2, "relu")
        models = [case.make(keras) for case in (CASES["functional"], CASES["subclassed"])]
        copied = copy.deepcopy(inside)
    for layer in (outside, inside, *models, copied):
        assert [name for name in vars(layer) if "tfmp" in name] == []
    assert policy(copied) == "mixed_float16"


@for_every_keras()
def test_layer_that_is_made_in_build_under_a_level_has_it(keras: ModuleType) -> None:
    class Late(keras.layers.Layer):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            with tfmp.precision("O1"):
                self.dense, self.soft = keras.layers.Dense(2), keras.layers.Dense(2, "softmax")
            self.dense.build(input_shape)
            self.soft.build([None, 2])
            self.built = True

        def call(self, x: Any) -> Any:
            return self.soft(self.dense(x))

    model = keras.Sequential([Late()])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(CASES["sequential"].batch, np.ones([4, 2]), verbose=0)
    assert [policy(layer) for layer in (model.layers[0].dense, model.layers[0].soft)] == ["mixed_float16", "float32"]


@for_every_keras()
def test_user_class_with_its_own_new_and_settings_is_made(keras: ModuleType) -> None:
    class Own(keras.layers.Layer):  # type: ignore[name-defined]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls, *args, **kwargs)

        def __init__(self, units: int, activation: str = "relu", **settings: Any) -> None:
            super().__init__(**settings)
            self.units, self.chosen = units, activation

    with tfmp.precision("O2"):
        layer = Own(3, "tanh", name="own", trainable=False)
    assert (policy(layer), layer.name, layer.trainable) == ("mixed_float16", "own", False)
    assert (layer.units, layer.chosen) == (3, "tanh")


@for_every_keras()
def test_recomputed_layers_follow_the_level(keras: ModuleType) -> None:
    with tfmp.precision("O2"):
        block = keras.Sequential([keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization()])
        model = keras.Sequential([keras.Input([3]), tfmp.Recompute(block), keras.layers.Dense(1)])
    x = CASES["sequential"].batch
    # The wrapper itself casts nothing.
    expected = dict.fromkeys(("Dense", "BatchNormalization", "Sequential"), "mixed_float16") | {"Recompute": "float32"}
    assert by_class(model) == expected
    assert {grad.dtype for grad in gradients(with_given_weights(model), x)} == {tf.float32}


@pytest.mark.filterwarnings(r"ignore:(?s).*structure of `inputs` doesn't match:UserWarning")  # Keras 3.10
@for_every_keras()
def test_config_round_trip_and_clone_keep_the_policies_of_layers(keras: ModuleType) -> None:
    for name in ("functional", "nested", "attention"):
        model = CASES[name].built(keras, "O1")
        again = [type(model).from_config(model.get_config()), keras.models.clone_model(model)]
        for copied in again:
            copied(CASES[name].batch)
            assert layer_policies(copied) == layer_policies(model)
        # Neither does a level that is open then change what the configuration says.
        with tfmp.precision("O3"):
            copied = keras.models.clone_model(model)
        copied(CASES[name].batch)
        assert layer_policies(copied) == layer_policies(model)


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("O4", "there is no precision level 'O4': did you mean 'O"),
        ("o2", "there is no precision level 'o2': did you mean 'O2'"),
        ("O2-fp16", "there is no precision level 'O2-fp16': did you mean 'O2-float16'"),
        ("O2-bfloat", "did you mean 'O2-bfloat16'.*The levels are O0, O1, O2, O3"),
        ("", "there is no precision level ''"),
        ("o1", "did you mean 'O1'"),
        ("03", "did you mean 'O3'"),
        ("mixed_float16", "there is no precision level 'mixed_float16': did you mean 'O2'"),
        ("mixed_bfloat16", "did you mean 'O2-bfloat16'"),
    ],
)
def test_unknown_level_is_refused_with_the_nearest(level: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfmp.precision(level)


@pytest.mark.parametrize("level", [2, None, b"O2", ["O2"], tf.float16])
def test_level_that_is_no_string_is_refused(level: Any) -> None:
    with pytest.raises(TypeError, match="a precision level is a string such as 'O2', got"):
        tfmp.precision(level)
