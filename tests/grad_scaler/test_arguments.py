from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfmp.grad_scaler.arguments import validate_kwargs, validated_pairs, validated_steps


def test_variable_with_float8_scales_is_refused() -> None:
    class Scale:
        overwrite_with_gradient = True
        assign = None

    with pytest.raises(
        NotImplementedError, match=r'"gradient" of a variable is its next value.*tfmp.LossScaleOptimizer'
    ):
        validated_pairs(tf.compat.v1.train.GradientDescentOptimizer(1.0), [(tf.constant(1.0), Scale())])


@pytest.mark.parametrize(
    "make", [lambda: tf.constant([[1.0, 2.0]]), lambda: [tf.constant(1.0)], lambda: [[tf.constant(1.0)]]]
)
def test_anything_but_pairs_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(
        TypeError, match=r"must be pairs of a gradient and its variable, .*: pass zip\(grads, variables\)"
    ):
        validated_pairs(tf.compat.v1.train.GradientDescentOptimizer(1.0), make())


def test_pairs_are_listed_from_an_iterator_with_none_among_them() -> None:
    grad, weights = tf.constant(1.0), [tf.Variable(1.0), tf.Variable(1.0)]
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    pairs = validated_pairs(optimizer, zip([None, grad], weights, strict=True))
    assert [(given is grad, weight is weights[1]) for given, weight in pairs] == [(False, False), (True, True)]


def test_steps_are_pairs_of_an_optimizer_and_what_it_steps_with() -> None:
    pairs = [(tf.constant(1.0), tf.Variable(1.0))]
    assert validated_steps(iter([("an optimizer", pairs)])) == [("an optimizer", pairs)]
    with pytest.raises(ValueError, match="there is no optimizer to step: pass pairs of an optimizer"):
        validated_steps([])
    for wrong, shown in [("ab", "'ab' of type str"), (("sgd",), r"\('sgd',\) of type tuple")]:
        with pytest.raises(TypeError, match=rf"it holds {shown}: pass \[\(optimizer, zip\(grads, variables\)\)"):
            validated_steps([wrong])
    with pytest.raises(TypeError, match=r"^steps must be pairs of an optimizer .*, got 3 of type int: pass \[\("):
        validated_steps(3)


def test_arguments_are_passed_to_one_optimizer_of_any_kind_or_to_several_of_tf1() -> None:
    sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    validate_kwargs(["own"], {"rate": 1})
    validate_kwargs([sgd, sgd], {"global_step": None})
    validate_kwargs(["own", "own"], {})
    with pytest.raises(TypeError, match="rate, global_step would be passed to each optimizer, and str is not TF1's"):
        validate_kwargs([sgd, "own"], {"rate": 1, "global_step": None})
