"""Layers of every Keras that are made in the scope of a level: where the scope acts, and what models then compute."""

import copy
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras
from levelled_models import (
    CASES,
    POLICIES,
    global_policy,
    gradients,
    policies,
    policy,
    stored,
    with_given_weights,
)

import tfmp
from tfmp.any_keras.which import is_keras2

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
    with scope, pytest.raises((TypeError, ValueError)):
        keras.layers.Dense(2, no_such_argument=1)
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


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@for_every_keras()
def test_dtype_that_a_layer_is_given_wins(keras: ModuleType, level: str) -> None:
    of_keras = keras.mixed_precision.Policy("mixed_bfloat16") if hasattr(keras.mixed_precision, "Policy") else None
    given: list[Any] = ["float32", "float16", "float64", "mixed_float16", of_keras or "mixed_bfloat16"]
    with tfmp.precision(level):
        found = [policy(keras.layers.Dense(2, dtype=dtype)) for dtype in given]
        assert policy(keras.layers.Dense(2, dtype=None)) == POLICIES[level]
        again = keras.layers.Dense.from_config(keras.layers.Dense(2, dtype="float64").get_config())
        inputs = [keras.Input([2]), keras.Input([2], dtype="int32"), keras.Input([2], dtype="float16")]
    assert [tf.as_dtype(each.dtype).name for each in inputs] == ["float32", "int32", "float16"]
    assert found == ["float32", "float16", "float64", "mixed_float16", "mixed_bfloat16"]
    assert policy(again) == "float64"


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
def test_metrics_losses_and_optimizers_are_not_affected(keras: ModuleType) -> None:
    with tfmp.precision("O3"):
        metric, loss, optimizer = keras.metrics.AUC(), keras.losses.MeanSquaredError(), keras.optimizers.Adam()
        optimizer.build([getattr(keras, "Variable", tf.Variable)(np.zeros(2, np.float32))])
        result = loss(np.zeros([2, 1], np.float32), np.ones([2, 1], np.float32))
    variables = [*metric.variables, *optimizer.variables]
    floats = {tf.as_dtype(each.dtype) for each in variables if tf.as_dtype(each.dtype).is_floating}
    assert (metric.dtype, floats, result.dtype) == ("float32", {tf.float32}, tf.float32)


@for_every_keras()
def test_nothing_is_left_on_layers_or_of_the_function_that_makes_them(keras: ModuleType) -> None:
    class Large:
        pass

    large, outside = Large(), keras.layers.Dense(2)
    gone = weakref.ref(large)
    with tfmp.precision("O2"):
        inside = keras.layers.Dense(2, "relu")
        models = [case.make(keras) for case in (CASES["functional"], CASES["subclassed"])]
        copied = copy.deepcopy(inside)
    del large
    assert gone() is None
    for layer in (outside, inside, *models, copied):
        assert [name for name in vars(layer) if "tfmp" in name] == []
    assert policy(copied) == "mixed_float16"


@for_every_keras()
def test_layer_that_is_made_in_build_under_a_level_has_it(keras: ModuleType) -> None:
    class Late(keras.layers.Layer):  # type: ignore[name-defined]
        def build(self, input_shape: Any) -> None:
            with tfmp.precision("O1"):
                self.inner = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(2, "softmax")])
            self.inner.build(input_shape)
            self.built = True

        def call(self, x: Any) -> Any:
            return self.inner(x)

    model = keras.Sequential([Late()])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(_X, np.ones([4, 2]), verbose=0)
    assert [policy(layer) for layer in model.layers[0].inner.layers] == ["mixed_float16", "float32"]


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
    assert {name: found for name, found, _, _ in policies(model)} == dict.fromkeys(names, "mixed_float16") | {
        "Recompute": "float32"
    }
    given = made()
    tfmp.set_precision(given, "O2")
    assert {name: found for name, found, _, _ in policies(given)} == dict.fromkeys(
        [*names, "Recompute"], "mixed_float16"
    )
    for each in (model, given):
        assert {grad.dtype for grad in gradients(with_given_weights(each), _X)} == {tf.float32}


_NO_LEVEL = "there is no precision level"
_WRONG: list[tuple[Any, type[Exception], str]] = [
    ("O4", ValueError, f"{_NO_LEVEL} 'O4': did you mean 'O"),
    ("o2", ValueError, f"{_NO_LEVEL} 'o2': did you mean 'O2'"),
    ("O2-fp16", ValueError, f"{_NO_LEVEL} 'O2-fp16': did you mean 'O2-float16'"),
    ("O2-bfloat", ValueError, "did you mean 'O2-bfloat16'.*The levels are O0, O1, O2, O3"),
    ("03", ValueError, "did you mean 'O3'"),
    ("mixed_float16", ValueError, f"{_NO_LEVEL} 'mixed_float16': did you mean 'O2'"),
    *((wrong, TypeError, "a precision level is a string such as 'O2', got") for wrong in (2, None, b"O2", ["O2"])),
]


@pytest.mark.parametrize(("level", "error", "message"), _WRONG, ids=[repr(each[0]) for each in _WRONG])
def test_what_is_no_level_is_refused_with_the_nearest(level: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tfmp.precision(level)
