"""What tfmp.half_state refuses, when it is called and when the optimizer is built."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from half_training import adam
from kerases import kernel_and_bias, optimizer, wrap

import tfmp

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)


def _built() -> Any:
    built = keras.optimizers.SGD(momentum=0.9)
    built.build(kernel_and_bias(keras))
    return built


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: "adam", TypeError, "optimizer must be an optimizer of Keras 3, got 'adam'"),
        (tf.compat.v1.train.AdamOptimizer, TypeError, "of type AdamOptimizer"),
        (lambda: adam(keras), ValueError, "HalfStateAdam has half-precision state already"),
        (lambda: wrap(keras.optimizers.Adam()), ValueError, "call tfmp.half_state with the one"),
        (lambda: optimizer(keras, "MultiOptimizer"), ValueError, "each of the optimizers inside"),
        (_built, ValueError, "the SGD is built already, with slots in float32"),
        (lambda: optimizer(keras, "ScheduleFreeAdamW"), ValueError, "holds weights"),
    ],
)
def test_what_has_no_slots_to_make_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tfmp.half_state(make(), momentum="float16")


_STOCHASTIC = {"rounding": "stochastic"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounding": "nearest"}, "there is nothing to keep in half precision: name the optimizer's slots"),
        ({"momentum": "float16", "rounding": "up"}, 'rounding must be "nearest" or "stochastic", got \'up\'.'),
        ({"momentum": "float32"}, 'momentum must be "float16" or "bfloat16", got \'float32\'.'),
        ({"velocity": "bfloat16"}, r"velocity='bfloat16' needs rounding='stochastic': a step changes"),
        ({"velocity": "float16"}, r"velocity='float16' is not possible: .* pass velocity='bfloat16'"),
        ({"velocity": "float16", **_STOCHASTIC}, r"velocity='float16' is not possible"),
        ({"accumulator": "bfloat16"}, r"accumulator='bfloat16' needs rounding='stochastic'"),
        ({"average": "bfloat16", **_STOCHASTIC}, "average cannot be kept .*: it is the moving average"),
        ({"average_gradient": "bfloat16", **_STOCHASTIC}, "average_gradient cannot be kept .*: RMSprop"),
        ({"gradient_accumulator": "bfloat16", **_STOCHASTIC}, r"or accumulate by tfmp\.LossScaleOptimizer"),
        # Of the RMSprop that the test makes.
        ({"velocity": "bfloat16", **_STOCHASTIC}, "velocity of RMSprop with centered=True is an average from which"),
        *(({"seed": seed}, "seed must be") for seed in (-1, 0.5, "1", None)),
    ],
)
def test_what_is_not_sound_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError if settings.get("seed", 0) in ("1", None) else ValueError, match=message):
        tfmp.half_state(keras.optimizers.RMSprop(centered=True), **settings)


def test_bytes_before_there_are_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="not built and has no slots yet"):
        adam(keras).state_bytes()


def _sgd(momentum: float = 0.9, **options: Any) -> Any:
    return keras.optimizers.SGD(0.5, momentum=momentum, **options)


_MOMENTUM = {"momentum": "bfloat16"}


@pytest.mark.parametrize(
    ("dtype", "make", "settings", "message"),
    [
        ("float32", lambda: _sgd(0.0), _MOMENTUM, "the optimizer made no slot momentum, only none: name those"),
        ("float32", lambda: _sgd(0.0), {}, "made no slot that can be in half precision, only none"),
        ("bfloat16", _sgd, _MOMENTUM, "in bfloat16, and most steps would be lost .* pass rounding='stochastic'"),
        ("bfloat16", lambda: _sgd(use_ema=True), _STOCHASTIC, "for which use_ema=True does not work"),
        ("bfloat16", lambda: _sgd(gradient_accumulation_steps=2), _STOCHASTIC, "gradient_accumulation_steps=2 does"),
        ("bfloat16", lambda: optimizer(keras, "Nadam"), _STOCHASTIC, "keeps .* in the type of the weights itself"),
        ("bfloat16", lambda: optimizer(keras, "Muon"), _STOCHASTIC, "decays in its own"),
    ],
)
def test_what_would_not_train_is_refused_each_time(
    dtype: str, make: Any, settings: dict[str, str], message: str
) -> None:
    opt = tfmp.half_state(make(), **settings)
    weight = keras.Variable(np.ones([4, 4], np.float32), dtype=dtype)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            opt.apply([tf.ones([4, 4], dtype)], [weight])
        assert not opt.built


def test_optimizer_that_was_built_by_the_other_object_is_refused() -> None:
    plain, variables = _sgd(), kernel_and_bias(keras)
    half = tfmp.half_state(plain, momentum="float16")
    plain.build(variables)
    with pytest.raises(ValueError, match=r"slots in float32: the one that was passed to tfmp\.half_state was built"):
        half.apply([tf.ones([2, 2]), tf.ones([2])], variables)
