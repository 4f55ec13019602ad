"""Layers of every Keras that are made in the scope of a level: where the scope acts, and what models then compute."""

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
    by_class,
    global_policy,
    gradients,
    layer_policies,
    outputs,
    policies,
    policy,
    stored,
    values,
    with_given_weights,
)

import tfmp
from tfmp.hosts.keras.which import is_keras2

__all__ = ["global_policy"]

_X = CASES["sequential"].batch


def _made(keras: ModuleType) -> str:
    """Return the policy of a layer that is made now."""
    return policy(keras.layers.Dense(2))


@pytest.mark.parametrize("level", [*POLICIES, "O2-float16"])
@for_every_keras()
def test_layer_and_model_have_the_policy_of_the_level(keras: ModuleType, level: str) -> None:
    with tfmp.precision(level) as scope:
        layers = [keras.layers.Dense(2), keras.layers.Layer(), keras.Sequential([keras.layers.Dense(2)]), keras.Model()]
    name = level.removesuffix("-float16")
    assert scope.level == name
    assert [policy(layer) for layer in layers] == [POLICIES[name]] * 4
    assert policy(keras.layers.Dense.from_config(layers[0].get_config())) == POLICIES[name]
    assert _made(keras) == "float32"


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
    assert outputs(model, case.batch) == outputs(expected, case.batch)


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
def test_innermost_level_acts_until_it_is_left_also_by_an_error(keras: ModuleType) -> None:
    # An object can be entered again within itself, and later.
    scope = tfmp.precision("O2")
    levels = [scope, *map(tfmp.precision, ("O0", "O3", "O1-bfloat16", "O0")), scope]
    expected = [POLICIES[each.level] for each in levels]

    def descend(rest: list[Any]) -> list[str]:
        if not rest:
            return []
        with rest[0]:
            with pytest.raises(ZeroDivisionError), tfmp.precision("O3"):
                _ = 1 / 0
            return [_made(keras), *descend(rest[1:]), _made(keras)]

    for _ in range(2):
        assert descend(levels) == [*expected, *reversed(expected)]
        assert _made(keras) == "float32"
    with scope, pytest.raises((TypeError, ValueError)):
        keras.layers.Dense(2, no_such_argument=1)
    assert _made(keras) == "float32"


@for_every_keras()
def test_level_may_be_a_decorator(keras: ModuleType) -> None:
    @tfmp.precision("O2")
    def build(units: int) -> Any:
        """Build."""
        return keras.layers.Dense(units), build(units - 1) if units > 1 else None

    layer, (inner, _) = build(2)
    assert (policy(layer), policy(inner), build.__doc__) == ("mixed_float16", "mixed_float16", "Build.")
    assert _made(keras) == "float32"


@for_every_keras()
def test_other_threads_are_left_alone(keras: ModuleType) -> None:
    found: dict[str, list[str]] = {}
    barrier = threading.Barrier(3)

    def make(level: str | None) -> None:
        barrier.wait(timeout=30)
        if level is None:
            found["none"] = [_made(keras) for _ in range(20)]
            return
        with tfmp.precision(level):
            found[level] = [_made(keras) for _ in range(20)]

    with tfmp.precision("O2"):
        threads = [threading.Thread(target=make, args=[level]) for level in (None, "O3", "O1-bfloat16")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert _made(keras) == "mixed_float16"
    assert found == {"none": ["float32"] * 20, "O3": ["float16"] * 20, "O1-bfloat16": ["mixed_bfloat16"] * 20}


@pytest.mark.parametrize("thread_leaves_first", [True, False])
@for_every_keras()
def test_one_object_serves_two_threads_whichever_leaves_first(keras: ModuleType, thread_leaves_first: bool) -> None:
    scope, found = tfmp.precision("O2"), []
    entered, may_leave = threading.Barrier(2), threading.Barrier(2)

    def make() -> None:
        with scope:
            entered.wait(timeout=30)
            may_leave.wait(timeout=30)
            found.append(_made(keras))
        found.append(_made(keras))

    thread = threading.Thread(target=make)
    with scope:
        thread.start()
        entered.wait(timeout=30)
        if thread_leaves_first:
            may_leave.wait(timeout=30)
            thread.join(timeout=60)
            assert _made(keras) == "mixed_float16"
    assert _made(keras) == "float32"
    if not thread_leaves_first:
        may_leave.wait(timeout=30)
        thread.join(timeout=60)
    assert found == ["mixed_float16", "float32"]


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
def test_global_policy_stays_what_it_is_and_the_level_is_kept_when_the_session_is_cleared(
    keras: ModuleType, global_policy: Callable[[str], None]
) -> None:
    global_policy("mixed_bfloat16")
    with tfmp.precision("O2"):
        assert _made(keras) == "mixed_float16"
        with tfmp.precision("O0"):
            assert _made(keras) == "float32"
        global_policy("float64")
        assert _made(keras) == "mixed_float16"
    assert _made(keras) == "float64"
    with tfmp.precision("O2"):
        keras.backend.clear_session()
        assert _made(keras) == "mixed_float16"


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


@for_every_keras()
def test_normalization_of_large_values_does_not_overflow(keras: ModuleType) -> None:
    # Their squares are beyond the largest number of float16.
    x = tf.constant([[3e4, -3e4, 1e4, 0], [0, 1e4, 3e4, -3e4]], tf.float16)
    for level in ("O1", "O2"):
        with tfmp.precision(level):
            layers = [keras.layers.BatchNormalization(), keras.layers.LayerNormalization()]
        for found in (layers[0](x, training=True), layers[1](x)):
            assert found.dtype == tf.float16
            assert np.isfinite(found).all()


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
    model.fit(_X, np.ones([4, 2]), verbose=0)
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
def test_recomputed_layers_follow_the_level_and_are_set(keras: ModuleType) -> None:
    def made() -> Any:
        block = keras.Sequential([keras.layers.Dense(3, "relu"), keras.layers.BatchNormalization()])
        return keras.Sequential([keras.Input([3]), tfmp.Recompute(block), keras.layers.Dense(1)])

    with tfmp.precision("O2"):
        model = made()
    # The wrapper itself casts nothing.
    names = ("Dense", "BatchNormalization", "Sequential")
    assert by_class(model) == dict.fromkeys(names, "mixed_float16") | {"Recompute": "float32"}
    given = made()
    tfmp.set_precision(given, "O2")
    assert by_class(given) == dict.fromkeys([*names, "Recompute"], "mixed_float16")
    for each in (model, given):
        assert {grad.dtype for grad in gradients(with_given_weights(each), _X)} == {tf.float32}


@pytest.mark.filterwarnings(r"ignore:(?s).*structure of `inputs` doesn't match:UserWarning")  # Keras 3.10
@for_every_keras()
def test_config_round_trip_and_clone_keep_the_policies_of_layers(keras: ModuleType) -> None:
    for name in ("functional", "nested", "attention"):
        model = CASES[name].built(keras, None if name == "functional" else "O1")
        tfmp.set_precision(model, "O1")
        again = [type(model).from_config(model.get_config()), keras.models.clone_model(model)]
        for copied in again:
            copied(CASES[name].batch)
            assert layer_policies(copied) == layer_policies(model)
        # Neither does a level that is open then change what the configuration says.
        with tfmp.precision("O3"):
            copied = keras.models.clone_model(model)
        copied(CASES[name].batch)
        assert layer_policies(copied) == layer_policies(model)


def test_generators_and_coroutines_are_not_decorated() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=r"tfmp\.precision decorates functions, got .* would run outside"):
            tfmp.precision("O2")(function)


_NO_LEVEL = "there is no precision level"
_WRONG: list[tuple[Any, type[Exception], str]] = [
    ("O4", ValueError, f"{_NO_LEVEL} 'O4': did you mean 'O"),
    ("o2", ValueError, f"{_NO_LEVEL} 'o2': did you mean 'O2'"),
    ("O2-fp16", ValueError, f"{_NO_LEVEL} 'O2-fp16': did you mean 'O2-float16'"),
    ("O2-bfloat", ValueError, "did you mean 'O2-bfloat16'.*The levels are O0, O1, O2, O3"),
    ("", ValueError, f"{_NO_LEVEL} ''"),
    ("o1", ValueError, "did you mean 'O1'"),
    ("03", ValueError, "did you mean 'O3'"),
    ("mixed_float16", ValueError, f"{_NO_LEVEL} 'mixed_float16': did you mean 'O2'"),
    ("mixed_bfloat16", ValueError, "did you mean 'O2-bfloat16'"),
    *(
        (wrong, TypeError, "a precision level is a string such as 'O2', got")
        for wrong in (2, None, b"O2", ["O2"], tf.float16)
    ),
]


@pytest.mark.parametrize(("level", "error", "message"), _WRONG, ids=[repr(each[0]) for each in _WRONG])
def test_what_is_no_level_is_refused_with_the_nearest(level: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tfmp.precision(level)
