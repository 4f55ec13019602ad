"""The rule of the widest type, and what counts for it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Way, assert_as_plain, each_way, matrix
from kerases import for_every_keras

import tfmp

_EYE = np.eye(2, dtype=np.float32)


class _Given:
    """What an expression may use; all that is half precision is the result of a product in the scope."""

    def __init__(self) -> None:
        self.x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
        self.x64 = tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64)
        self.w = tf.Variable([[0.5, 1.0], [2.0, 4.0]])
        self.b = tf.Variable([0.5, 1.0])
        self.scalar_weight = tf.Variable(0.5)
        self.half_weight = tf.Variable(tf.ones([2, 2], tf.float16))
        self.scalar = tf.constant(0.5)
        self.fixed = tf.Variable([0.5, 1.0], trainable=False)

    @property
    def half(self) -> tf.Tensor:
        return self.x @ _EYE

    @property
    def bfloat16(self) -> tf.Tensor:
        return tf.cast(self.x, tf.bfloat16)

    @property
    def half_scalar(self) -> tf.Tensor:
        return tf.reduce_max(self.half)


#: The types of expressions, with "half" for the type of the scope.
_EXPRESSIONS: dict[str, dict[str, Callable[[_Given], Any]]] = {
    # Weights and scalars do not make an op wider, and neither does what only moves or reads a weight.
    "half": {
        "weight": lambda given: given.half + given.b,
        "weight first": lambda given: given.b * given.half,
        "weight under": lambda given: given.half / given.w,
        "over weight": lambda given: given.w / given.half,
        "weight that does not train": lambda given: given.half - given.fixed,
        "two weights": lambda given: tf.add_n([given.w, given.half, given.w]),
        "scalar weight": lambda given: given.half * given.scalar_weight,
        "value of a weight": lambda given: given.half + given.w.value(),
        "weight that was read": lambda given: given.half + given.w.read_value(),
        "identity of a weight": lambda given: given.half + tf.identity(given.w),
        "weight as tensor": lambda given: given.half + tf.convert_to_tensor(given.w),
        "maximum of a weight": lambda given: tf.maximum(given.b, given.half),
        "weight or half": lambda given: tf.where(given.half > 1, given.half, given.w),
        "stacked with weight": lambda given: tf.stack([given.w, given.half]),
        "number": lambda given: 2.0 * given.half + 1,
        "number of numpy": lambda given: given.half * np.float32(2) + np.float64(1),
        "scalar array": lambda given: given.half * np.array(2.0, np.float32),
        "scalar tensor": lambda given: given.half * given.scalar,
        "scalar tensor first": lambda given: given.scalar - given.half,
        "scalar that was computed": lambda given: given.half / tf.reduce_sum(given.x),
        "norm": lambda given: given.half / tf.norm(given.half),
        "float64 scalar": lambda given: given.half * tf.constant(2.0, tf.float64),
        "float64 number": lambda given: tf.multiply(given.half, np.float64(2.0)),
        "weight and scalar": lambda given: tf.add_n([given.half * given.scalar, given.w]),
        "two scalars of half": lambda given: given.half_scalar * given.half_scalar,
        "list of halves": lambda given: tf.raw_ops.Elu(features=[given.half, given.half]),
        "half within a list of lists": lambda given: tf.raw_ops.Elu(features=[[given.half_scalar, 1.0]]),
        "product of an array": lambda given: tf.matmul(_EYE, given.w),
        "product with float64 array": lambda given: tf.matmul(given.x, np.eye(2)),
        "reshaped weight": lambda given: given.half + tf.reshape(given.b, [1, 2]),
        "part of a weight": lambda given: given.half + given.w[:1],
        "transposed weight": lambda given: given.half + tf.transpose(given.w),
        "read twice": lambda given: given.half + tf.identity(given.w.read_value()),
        "stopped weight": lambda given: given.half + tf.stop_gradient(given.w),
        "sum with an array": lambda given: given.half + _EYE,
        "array with a sum": lambda given: _EYE + given.half,
        "divided by an array": lambda given: given.half / (_EYE + 1),
    },
    # A weight in half precision is taken as it is.
    "float16": {
        "half weight": lambda given: given.half_weight * given.half,
        "product of half weights": lambda given: given.half_weight @ given.half_weight,
    },
    "float32": {
        "activation": lambda given: given.half + given.x,
        "activation first": lambda given: given.x * given.half,
        "activation and weight": lambda given: tf.add_n([given.half, given.w, given.x]),
        "computed from a weight": lambda given: given.half + given.w * 2.0,
        "weight only": lambda given: given.w + given.w,
        "weight and half weight": lambda given: given.w * given.half_weight,
        "activation with half scalar": lambda given: given.x * given.half_scalar,
        "bfloat16": lambda given: given.half + given.bfloat16,
        "scalars": lambda given: given.half_scalar + given.scalar,
        "mean of half": lambda given: tf.reduce_mean(given.half),
        "unlisted": lambda given: tf.cumsum(given.half),
        "unlisted with weight": lambda given: tf.raw_ops.FloorMod(x=given.half, y=given.w),
        "unlisted of bfloat16": lambda given: tf.cumsum(given.bfloat16),
        "list of halves": lambda given: tf.exp([given.half, given.half]),
        "list of types": lambda given: tf.raw_ops.Elu(features=[given.half, given.x]),
        "no half kernel": lambda given: tf.math.real(tf.signal.rfft(given.half)),
        "scalar weight and half scalar": lambda given: given.half_scalar * given.scalar_weight,
        "rows of a weight": lambda given: given.half + tf.gather(given.w, [1, 0]),
        "exponential of a weight": lambda given: given.half + tf.exp(given.w),
    },
    "float64": {
        "product": lambda given: given.x64 @ given.x64,
        "product with half": lambda given: given.half @ given.x64,
        "denied": lambda given: tf.exp(given.x64),
        "unlisted": lambda given: tf.cumsum(given.x64),
        "sum with half": lambda given: given.half + given.x64,
        "sum with half first": lambda given: tf.add(given.x64, given.half),
        "mean": lambda given: tf.reduce_mean(given.x64),
        "number": lambda given: given.x64 * 2.0,
        "moments": lambda given: tf.nn.moments(given.x64, [0])[0],
    },
    # Unlisted ops with state, or with other results, take what they are given.
    "as given": {
        "shuffled": lambda given: tf.random.shuffle(given.half),
        "gamma": lambda given: tf.raw_ops.RandomGamma(shape=[1], alpha=tf.cast(given.half, tf.float16)),
    },
    "int32": {
        "bits": lambda given: tf.cast(tf.bitcast(given.half, tf.uint16), tf.int32) // 2**20,
        "shape": lambda given: tf.shape(given.half),
    },
    "int64": {"index": lambda given: tf.argmax(given.half)},
}


@each_way
@pytest.mark.parametrize(
    ("expected", "name"), [(expected, name) for expected, rows in _EXPRESSIONS.items() for name in rows]
)
def test_op_computes_in_the_widest_type_of_activations(expected: str, name: str, way: Way) -> None:
    for dtype in ("float16", "bfloat16") if expected == "half" else ("float16",):
        given = _Given()

        @way
        @tfmp.autocast(dtype)
        def compute(given: _Given = given) -> tf.Tensor:
            return _EXPRESSIONS[expected][name](given)

        result = compute()
        assert result.dtype == {"half": dtype, "as given": dtype}.get(expected, expected)
        assert np.isfinite(np.float32(result)).all()


_ARRAYS_AND_NUMBERS: dict[str, Callable[[tf.Tensor], Any]] = {
    "multiplied by float64 array": lambda x: tf.multiply(x, np.ones([2])),
    "multiplied by float64 number": lambda x: tf.multiply(x, np.float64(0.5)),
    "multiplied by integers": lambda x: tf.multiply(x, np.arange(2)),
    "multiplied by an integer": lambda x: tf.multiply(x, np.int64(3)),
    "powered": lambda x: tf.pow(x, np.int64(2)),
    "powered by integers": lambda x: x ** np.array([1, 2]),
    "maximum with array": lambda x: tf.maximum(x, np.array([1.5, 2.5])),
    "where array": lambda x: tf.where(x > 1, x, np.zeros([2])),
    "concat with array": lambda x: tf.concat([x, np.ones([1, 2])], np.int64(0)),
    "stacked with array": lambda x: tf.stack([x, np.ones([2, 2])]),
    "list with numbers": lambda x: tf.maximum(x, [np.float64(1.5), 2.5]),
    "reshaped by numbers of numpy": lambda x: tf.reshape(x, [np.int32(1), np.int64(4)]),
    "reshaped by a product": lambda x: tf.reshape(x, [-1, np.prod(x.shape[1:])]),
    "tiled by an array": lambda x: tf.tile(x, np.array([1, 2])),
    "reduced over numbers of numpy": lambda x: tf.reduce_max(x, [np.int64(0)]),
    "indexed": lambda x: x[np.int64(0), : np.int32(1)],
    "gathered": lambda x: tf.gather(x, np.array([1, 0])),
    "clipped": lambda x: tf.clip_by_value(x, np.float64(0), np.array(2.5)),
    "shifted by arrays": lambda x: (x - np.array([1.0, 2.0])) / np.array([0.5, 0.25]),
    "array minus tensor": lambda x: np.array([1.0, 2.0]) - x,
    "list subtracted": lambda x: x - [1.0, 2.0],
    "added to integers": lambda x: tf.add(x, [1, 2]),
    "squared difference to array": lambda x: tf.math.squared_difference(x, np.ones([2])),
    "atan2": lambda x: tf.math.atan2(x, np.float64(1.0)),
}


@each_way
@pytest.mark.parametrize("name", _ARRAYS_AND_NUMBERS)
def test_arrays_and_numbers_take_the_type_of_the_tensor_as_without_autocast(name: str, way: Way) -> None:
    compute = _ARRAYS_AND_NUMBERS[name]
    scope = tfmp.autocast()
    expected = way(compute)(matrix())
    assert_as_plain(way(scope(compute))(matrix()), expected, ["float32"])
    # With a product, which is half precision, only the values are those.
    of_product = way(scope(lambda x: compute(x @ _EYE)))(matrix())
    np.testing.assert_allclose(np.float32(of_product), expected, rtol=1e-3)


def test_static_shapes_are_those_of_none() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2, 3])])
    @tfmp.autocast()
    def compute(x: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(x, [-1, np.prod(x.shape[1:])])
        assert flat.shape.as_list() == [None, 6]
        tiled = tf.tile(flat, [1, np.int32(2)])
        assert tiled.shape.as_list() == [None, 12]
        return tf.reshape(tiled, [np.int32(-1), np.int64(3), 4])

    assert compute.get_concrete_function().structured_outputs.shape.as_list() == [None, 3, 4]


_WITH_KERAS: dict[str, Callable[..., Any]] = {
    "product": lambda half, layer: tf.matmul(half, layer.kernel),
    "sum": lambda half, layer: half + layer.bias,
    "raw sum": lambda half, layer: tf.add_n([half, layer.kernel]),
    "bias": lambda half, layer: tf.nn.bias_add(half, layer.bias),
    "maximum": lambda half, layer: tf.maximum(layer.bias, half),
    "added": lambda half, layer: tf.add(layer.bias, half),
    "converted": lambda half, layer: half + tf.convert_to_tensor(layer.bias),
}


@for_every_keras()
@each_way
@pytest.mark.parametrize("name", _WITH_KERAS)
def test_variable_of_keras_is_a_weight(keras: ModuleType, way: Way, name: str) -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    layer.bias.assign([0.5, 0.25])
    result = way(tfmp.autocast()(lambda x: _WITH_KERAS[name](x @ _EYE, layer)))(tf.ones([2, 2]))
    assert_as_plain(result, _WITH_KERAS[name](tf.ones([2, 2]), layer), ["float16"], 2e-3)


def test_half_precision_takes_place_and_not_only_its_type() -> None:
    x = tf.constant([[1.0 + 2**-12]])
    one = tf.ones([1, 1])
    with tfmp.autocast():
        assert (x @ one).numpy().item() == 1
        assert (x + one).numpy().item() == 2 + 2**-12
        assert (tf.exp(x @ one) == tf.exp(one)).numpy().item()
        assert float(tf.reduce_sum(tf.fill([8], 40000.0) * (one @ one)[0])) == 320000
        # What float16 cannot hold is infinite, and refused nowhere.
        assert np.isinf((300.0 * one @ (300.0 * one)).numpy()).all()
        assert (300.0 * one * 300.0).numpy().item() == 90000
    with tfmp.autocast("bfloat16"):
        assert ((1 + 2**-9) * one @ one).numpy().item() == 1
        # On CPUs without AVX-512, TensorFlow's product rounds toward zero: to 89600, not to the nearest 90112.
        assert (300.0 * one @ (300.0 * one)).numpy().item() in (89600, 90112)


def test_quotient_by_a_large_number_does_not_overflow_on_its_way() -> None:
    large = tf.constant([1e6, 2e6])
    with tfmp.autocast():
        half = tf.ones([1, 1]) @ tf.ones([1, 2])
        quotients = [half / large, tf.math.divide(half, large), tf.math.divide_no_nan(half, large), half * (1 / large)]
        remainders = [large % half[0], tf.math.floormod(half, large)]
    for quotient in quotients:
        np.testing.assert_allclose(quotient, [[1e-6, 5e-7]], rtol=1e-6)
    np.testing.assert_allclose(remainders[0], [0, 0])
    np.testing.assert_allclose(remainders[1], [[1, 1]])
