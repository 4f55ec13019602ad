"""The rule of the widest type, and what counts for it."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras

import tfmp

_EYE = np.eye(2, dtype=np.float32)

_EACH_WAY = pytest.mark.parametrize("way", [lambda function: function, tf.function], ids=["eager", "function"])


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


def _type_of(expression: Callable[[_Given], Any], way: Callable[..., Any], dtype: str = "float16") -> str:
    given = _Given()

    @way
    def compute() -> tf.Tensor:
        with tfmp.autocast(dtype):
            return expression(given)

    result = compute()
    assert np.isfinite(np.float32(result)).all()
    return result.dtype.name


_STAY_HALF: dict[str, Callable[[_Given], Any]] = {
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
    "half weight": lambda given: given.half_weight * given.half,
    "two scalars of half": lambda given: given.half_scalar * given.half_scalar,
    "list of halves": lambda given: tf.raw_ops.Elu(features=[given.half, given.half]),
    "half within a list of lists": lambda given: tf.raw_ops.Elu(features=[[given.half_scalar, 1.0]]),
    "product of an array": lambda given: tf.matmul(_EYE, given.w),
    "product with float64 array": lambda given: tf.matmul(given.x, np.eye(2)),
}

_WIDEN: dict[str, Callable[[_Given], Any]] = {
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
}

_STAY_FLOAT64: dict[str, Callable[[_Given], Any]] = {
    "product": lambda given: given.x64 @ given.x64,
    "product with half": lambda given: given.half @ given.x64,
    "denied": lambda given: tf.exp(given.x64),
    "unlisted": lambda given: tf.cumsum(given.x64),
    "sum with half": lambda given: given.half + given.x64,
    "sum with half first": lambda given: tf.add(given.x64, given.half),
    "mean": lambda given: tf.reduce_mean(given.x64),
    "number": lambda given: given.x64 * 2.0,
    "moments": lambda given: tf.nn.moments(given.x64, [0])[0],
}

_AS_GIVEN: dict[str, Callable[[_Given], Any]] = {
    "shuffled": lambda given: tf.random.shuffle(given.half),
    "gamma": lambda given: tf.raw_ops.RandomGamma(shape=[1], alpha=given.half),
    "bits": lambda given: tf.cast(tf.bitcast(given.half, tf.uint16), tf.int32) // 2**20,
    "shape": lambda given: tf.shape(given.half),
    "index": lambda given: tf.argmax(given.half),
}


@_EACH_WAY
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in _STAY_HALF if name != "half weight"])
def test_weights_and_scalars_do_not_make_an_op_wider(name: str, dtype: str, way: Callable[..., Any]) -> None:
    assert _type_of(_STAY_HALF[name], way, dtype) == dtype


@_EACH_WAY
def test_weight_in_half_precision_is_taken_as_it_is(way: Callable[..., Any]) -> None:
    assert _type_of(_STAY_HALF["half weight"], way) == "float16"
    assert _type_of(lambda given: given.half_weight @ given.half_weight, way) == "float16"
    assert _type_of(lambda given: given.half_weight @ given.half_weight, way, "bfloat16") == "bfloat16"


@_EACH_WAY
@pytest.mark.parametrize("name", list(_WIDEN))
def test_op_computes_in_the_widest_type_of_activations(name: str, way: Callable[..., Any]) -> None:
    assert _type_of(_WIDEN[name], way) == "float32"


@_EACH_WAY
@pytest.mark.parametrize("name", list(_STAY_FLOAT64))
def test_float64_is_kept(name: str, way: Callable[..., Any]) -> None:
    assert _type_of(_STAY_FLOAT64[name], way) == "float64"


@_EACH_WAY
@pytest.mark.parametrize(
    ("name", "dtype"),
    list(zip(_AS_GIVEN, ["float16", "float16", "int32", "int32", "int64"], strict=True)),
)
def test_unlisted_op_with_state_or_other_results_takes_what_it_is_given(
    name: str, dtype: str, way: Callable[..., Any]
) -> None:
    assert _type_of(_AS_GIVEN[name], way) == dtype


_OF_FLOAT32: dict[str, Callable[[tf.Tensor], Any]] = {
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


@_EACH_WAY
@pytest.mark.parametrize("name", list(_OF_FLOAT32))
def test_arrays_and_numbers_take_the_type_of_the_tensor_as_without_autocast(name: str, way: Callable[..., Any]) -> None:
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    compute = _OF_FLOAT32[name]

    @way
    def in_scope(x: tf.Tensor) -> tf.Tensor:
        with tfmp.autocast():
            return compute(x)

    expected, result = way(compute)(x), in_scope(x)
    assert result.dtype == expected.dtype == tf.float32
    assert result.numpy().tolist() == expected.numpy().tolist()


@_EACH_WAY
@pytest.mark.parametrize("name", [name for name in _OF_FLOAT32 if name != "squared difference to array"])
def test_arrays_and_numbers_run_with_a_product(name: str, way: Callable[..., Any]) -> None:
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    compute = _OF_FLOAT32[name]

    @way
    def in_scope(x: tf.Tensor) -> tf.Tensor:
        with tfmp.autocast():
            return compute(x @ _EYE)

    result = in_scope(x)
    assert result.dtype in (tf.float16, tf.float32)
    np.testing.assert_allclose(result, way(compute)(x), rtol=1e-3)


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


_COMPARED: dict[str, Callable[[_Given], Any]] = {
    **_STAY_HALF,
    **_WIDEN,
    "reshaped weight": lambda given: given.half + tf.reshape(given.b, [1, 2]),
    "part of a weight": lambda given: given.half + given.w[:1],
    "transposed weight": lambda given: given.half + tf.transpose(given.w),
    "scalar weight and half scalar": lambda given: given.half_scalar * given.scalar_weight,
    "read twice": lambda given: given.half + tf.identity(given.w.read_value()),
    "stopped weight": lambda given: given.half + tf.stop_gradient(given.w),
    "rows of a weight": lambda given: given.half + tf.gather(given.w, [1, 0]),
    "sum with an array": lambda given: given.half + _EYE,
    "array with a sum": lambda given: _EYE + given.half,
    "divided by an array": lambda given: given.half / (_EYE + 1),
}


@pytest.mark.parametrize("name", list(_COMPARED))
def test_eager_code_and_functions_compute_in_the_same_type(name: str) -> None:
    assert _type_of(_COMPARED[name], lambda function: function) == _type_of(_COMPARED[name], tf.function)


def test_result_of_a_weight_is_no_weight() -> None:
    w = tf.Variable([1.0, 2.0])
    with tfmp.autocast():
        half = tf.ones([2, 2]) @ _EYE
        w + 1.0
        assert (half + w * 1.0).dtype == tf.float32
        assert (half + tf.exp(w)).dtype == tf.float32
        assert (half + w).dtype == tf.float16


_WITH_KERAS: dict[str, Callable[..., Any]] = {
    "product": lambda half, layer: tf.matmul(half, layer.kernel),
    "sum": lambda half, layer: half + layer.bias,
    "raw sum": lambda half, layer: tf.add_n([half, layer.kernel]),
    "bias": lambda half, layer: tf.nn.bias_add(half, layer.bias),
    "maximum": lambda half, layer: tf.maximum(layer.bias, half),
}


@for_every_keras()
@_EACH_WAY
@pytest.mark.parametrize("name", list(_WITH_KERAS))
def test_variable_of_keras_is_a_weight(keras: ModuleType, way: Callable[..., Any], name: str) -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    layer.bias.assign([0.5, 0.25])

    @way
    def compute(x: tf.Tensor) -> tf.Tensor:
        with tfmp.autocast():
            return _WITH_KERAS[name](x @ _EYE, layer)

    result = compute(tf.ones([2, 2]))
    assert result.dtype == tf.float16
    np.testing.assert_allclose(result, _WITH_KERAS[name](tf.ones([2, 2]), layer), rtol=2e-3, atol=2e-3)


def test_gradient_of_a_mixed_sum_has_the_types_of_its_inputs() -> None:
    x, w = tf.constant([[1.0, 2.0]]), tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tfmp.autocast():
            half = x @ w
            loss = tf.reduce_sum(half + x + w)
    grads = tape.gradient(loss, [x, w, half])
    assert [grad.dtype.name for grad in grads] == ["float32", "float32", "float16"]
    assert grads[0].numpy().tolist() == [[8, 16]]
    assert grads[1].numpy().tolist() == [[3, 3], [5, 5]]


def test_half_precision_takes_place_and_not_only_its_type() -> None:
    x = tf.constant([[1.0 + 2**-12]])
    one = tf.ones([1, 1])
    with tfmp.autocast():
        assert (x @ one).numpy().item() == 1
        assert (x + one).numpy().item() == 2 + 2**-12
        assert (tf.exp(x @ one) == tf.exp(one)).numpy().item()
        assert float(tf.reduce_sum(tf.fill([8], 40000.0) * (one @ one)[0])) == 320000
    with tfmp.autocast("bfloat16"):
        assert ((1 + 2**-9) * one @ one).numpy().item() == 1


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


def test_products_that_float16_cannot_hold_are_refused_nowhere_and_are_infinite() -> None:
    x = tf.constant([[300.0]])
    with tfmp.autocast():
        assert np.isinf((x @ x).numpy()).all()
        assert (x * x).numpy().item() == 90000
    with tfmp.autocast("bfloat16"):
        # On CPUs without AVX-512, TensorFlow's product rounds toward zero: to 89600, not to the nearest 90112.
        assert (x @ x).numpy().item() in (89600, 90112)
