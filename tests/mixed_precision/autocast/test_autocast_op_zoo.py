"""Code of many kinds that names no types: its results have the types that the lists ask for, and float32's values."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Way, each_way, eager, types

import tfmp

_TOLERANCES = {"float16": 4e-3, "bfloat16": 4e-2}
_H, _F = "half", "float32"


class _Input(NamedTuple):
    """An input: an activation, which may be the result of a product, or a weight."""

    shape: tuple[int, ...]
    kind: str


def _x(*shape: int) -> _Input:
    return _Input(shape, "activation")


def _h(*shape: int) -> _Input:
    return _Input(shape, "product")


def _w(*shape: int) -> _Input:
    return _Input(shape, "weight")


class _Case(NamedTuple):
    """What is computed of which inputs.

    Attributes:
        compute: Takes the inputs.
        inputs: Their shapes.
        results: The types of the results, with "half" for the type of autocast.
        in_bfloat16: The types of the results where they are others in bfloat16.
    """

    compute: Callable[..., Any]
    inputs: list[_Input]
    results: list[str]
    in_bfloat16: list[str] | None = None


def _attention(q: Any, k: Any, v: Any) -> Any:
    return tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 0.5) @ v


def _masked_attention(q: Any, k: Any, v: Any) -> Any:
    scores = tf.matmul(q, k, transpose_b=True) / tf.sqrt(2.0)
    return tf.einsum("bij,bjk->bik", tf.nn.softmax(scores + (1.0 - tf.ones([3, 3])) * -1e9), v)


def _lstm(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any) -> Any:
    gates = x @ w + h @ u + b
    i, f, g, o = tf.split(gates, 4, axis=-1)
    c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
    return tf.sigmoid(o) * tf.tanh(c), c, gates


def _lstm_block(x: Any, c: Any, h: Any, w: Any, p: Any, b: Any) -> Any:
    found = tf.raw_ops.LSTMBlockCell(x=x, cs_prev=c, h_prev=h, w=w, wci=p, wcf=p, wco=p, b=b)
    return found.h, found.cs


def _mixed_by_a_gate(x: Any, h: Any, c: Any) -> Any:
    z = tf.sigmoid(x)
    return z * h + (1 - z) * tf.tanh(c)


def _batch_norm(x: Any, scale: Any, offset: Any) -> Any:
    mean, variance = tf.nn.moments(x, [0])
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3), mean, variance


def _fused_batch_norm(x: Any, scale: Any, offset: Any) -> Any:
    return tf.compat.v1.nn.fused_batch_norm(x, scale, offset)


def _layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3) * gamma + beta


def _scanned(x: Any, w: Any) -> Any:
    return tf.scan(lambda state, row: tf.tanh(tf.linalg.matvec(w, state) + row), x, tf.zeros([3]))


def _folded(x: Any, w: Any) -> Any:
    return tf.foldl(lambda state, row: tf.tanh(tf.linalg.matvec(w, state) + row), x, tf.zeros([3]))


def _written_to_an_array(x: Any) -> Any:
    array = tf.TensorArray(x.dtype, size=2)
    for row in range(2):
        array = array.write(row, x[row] * 2.0)
    return array.stack()


def _kronecker_product(x: Any, y: Any, z: Any) -> Any:
    operators = [tf.linalg.LinearOperatorFullMatrix(each) for each in (x, y)]
    return tf.linalg.LinearOperatorKronecker(operators).matmul(z)


def _operators(x: Any, y: Any) -> Any:
    of_half, of_float32 = (tf.linalg.LinearOperatorFullMatrix(each + 4.0 * tf.eye(2)) for each in (x, y))
    diagonal = tf.linalg.LinearOperatorDiag(x[0])
    return (
        (of_half @ of_float32).to_dense(),
        of_float32.solve(x),
        diagonal.add_to_tensor(y),
        tf.linalg.LinearOperatorBlockDiag([of_float32, diagonal]).diag_part(),
    )


_ROW = [0, 2]

#: As code has it that imported the function before the scope was entered.
_DIVIDE = tf.math.divide_no_nan

_CASES: dict[str, _Case] = {
    "matmul": _Case(tf.matmul, [_x(2, 3), _w(3, 2)], [_H]),
    "matmul_of_transposed": _Case(lambda x, w: tf.matmul(x, w, transpose_b=True), [_x(2, 3), _w(2, 3)], [_H]),
    "matmul_of_products": _Case(tf.matmul, [_h(2, 3), _h(3, 2)], [_H]),
    "matmul_of_product_and_weight": _Case(lambda x, w: x @ w, [_h(2, 3), _w(3, 2)], [_H]),
    "matmul_batched": _Case(tf.matmul, [_x(2, 2, 3), _x(2, 3, 2)], [_H]),
    "matmul_batched_with_weight": _Case(lambda x, w: x @ w, [_x(2, 2, 3), _w(3, 2)], [_H]),
    "matmul_with_hint": _Case(lambda x, w: tf.matmul(x, w, a_is_sparse=True), [_x(2, 3), _w(3, 2)], [_F]),
    "matvec": _Case(tf.linalg.matvec, [_w(3, 2), _x(2)], [_H]),
    "tensordot": _Case(lambda x, w: tf.tensordot(x, w, [[1, 2], [0, 1]]), [_x(2, 2, 2), _w(2, 2, 3)], [_H]),
    "einsum": _Case(lambda x, w: tf.einsum("abc,cd->abd", x, w), [_x(2, 2, 3), _w(3, 2)], [_H]),
    "einsum_of_three": _Case(lambda x, w, y: tf.einsum("ab,bc,cd->ad", x, w, y), [_x(2, 3), _w(3, 2), _x(2, 2)], [_H]),
    "dense": _Case(lambda x, w, b: tf.nn.relu(x @ w + b), [_x(2, 3), _w(3, 2), _w(2)], [_H]),
    "dense_with_bias_add": _Case(lambda x, w, b: tf.nn.bias_add(x @ w, b), [_x(2, 3), _w(3, 2), _w(2)], [_H]),
    "conv1d": _Case(lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"), [_x(1, 4, 2), _w(2, 2, 2)], [_H]),
    "conv2d": _Case(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), [_x(1, 3, 3, 1), _w(2, 2, 1, 2)], [_H]),
    "conv2d_dilated": _Case(
        lambda x, w: tf.nn.conv2d(x, w, 1, "SAME", dilations=2), [_x(1, 4, 4, 1), _w(2, 2, 1, 1)], [_H]
    ),
    "conv3d": _Case(lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), [_x(1, 2, 2, 2, 1), _w(2, 2, 2, 1, 1)], [_H]),
    "conv1d_transpose": _Case(
        lambda x, w: tf.nn.conv1d_transpose(x, w, [1, 4, 2], 2), [_x(1, 2, 1), _w(2, 2, 1)], [_H]
    ),
    "conv2d_transpose": _Case(
        lambda x, w: tf.nn.conv2d_transpose(x, w, [1, 4, 4, 1], 2), [_x(1, 2, 2, 2), _w(2, 2, 1, 2)], [_H]
    ),
    "conv3d_transpose": _Case(
        lambda x, w: tf.nn.conv3d_transpose(x, w, [1, 2, 2, 2, 1], 1), [_x(1, 2, 2, 2, 1), _w(2, 2, 2, 1, 1)], [_H]
    ),
    "depthwise_conv2d": _Case(
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), [_x(1, 3, 3, 2), _w(2, 2, 2, 1)], [_H]
    ),
    "separable_conv2d": _Case(
        lambda x, w, p: tf.nn.separable_conv2d(x, w, p, [1] * 4, "SAME"),
        [_x(1, 3, 3, 2), _w(2, 2, 2, 1), _w(1, 1, 2, 2)],
        [_H],
    ),
    "attention": _Case(_attention, [_h(1, 3, 2), _h(1, 3, 2), _h(1, 3, 2)], [_H]),
    "attention_with_mask": _Case(_masked_attention, [_h(1, 3, 2), _h(1, 3, 2), _h(1, 3, 2)], [_H]),
    "attention_over_a_root_of_numpy": _Case(
        lambda q, k: tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.sqrt(2)), [_h(1, 3, 2), _h(1, 3, 2)], [_F]
    ),
    "lstm_cell": _Case(_lstm, [_x(2, 3), _x(2, 2), _x(2, 2), _w(3, 8), _w(2, 8), _w(8)], [_F, _F, _H]),
    "lstm_block_cell": _Case(
        _lstm_block,
        [_x(2, 3), _x(2, 2), _x(2, 2), _w(5, 8), _w(2), _w(8)],
        [_H, _H],
        in_bfloat16=[_F, _F],
    ),
    "batch_norm": _Case(_batch_norm, [_h(4, 3), _w(3), _w(3)], [_H, _F, _F]),
    "batch_norm_of_inputs": _Case(_batch_norm, [_x(4, 3), _w(3), _w(3)], [_F, _F, _F]),
    "fused_batch_norm": _Case(_fused_batch_norm, [_h(1, 2, 2, 3), _w(3), _w(3)], [_H, _F, _F]),
    "layer_norm": _Case(_layer_norm, [_h(2, 4), _w(4), _w(4)], [_F]),
    "softmax": _Case(tf.nn.softmax, [_h(2, 3)], [_F]),
    "log_softmax": _Case(tf.nn.log_softmax, [_h(2, 3)], [_F]),
    "sigmoid": _Case(tf.sigmoid, [_h(2, 3)], [_F]),
    "sigmoid_of_inputs": _Case(lambda x, y: x * tf.sigmoid(y), [_h(2, 3), _x(2, 3)], [_F]),
    "tanh": _Case(tf.tanh, [_h(2, 3)], [_F]),
    "gate": _Case(lambda x, y: x * tf.sigmoid(y), [_h(2, 3), _h(2, 3)], [_H]),
    "gate_of_gates": _Case(lambda x, y: x + tf.sigmoid(tf.tanh(y) * 2.0), [_h(2, 3), _h(2, 3)], [_H]),
    "squeeze_and_excite": _Case(
        lambda x, y: x * tf.reshape(tf.nn.sigmoid(y), [1, 1, 1, 2]), [_h(1, 2, 2, 2), _h(1, 2)], [_H]
    ),
    "weighted_gate": _Case(lambda x, y, w: x + w * tf.tanh(y), [_h(2, 3), _h(2, 3), _w(3)], [_H]),
    "gates_with_numbers": _Case(_mixed_by_a_gate, [_h(2, 3), _h(2, 3), _h(2, 3)], [_H]),
    "gate_with_number": _Case(lambda x: 1 - tf.sigmoid(x), [_h(2, 3)], [_F]),
    "gate_within_limits": _Case(lambda x: tf.clip_by_value(tf.sigmoid(x), 1e-7, 1 - 1e-7), [_h(2, 3)], [_F]),
    "logarithm_of_a_gate": _Case(lambda x, y: y * tf.math.log(1 - tf.sigmoid(x) + 1e-7), [_h(2, 3), _h(2, 3)], [_F]),
    "gelu": _Case(tf.nn.gelu, [_h(2, 3)], [_H]),
    "gelu_approximate": _Case(lambda x: tf.nn.gelu(x, approximate=True), [_h(2, 3)], [_F]),
    "silu": _Case(tf.nn.silu, [_h(2, 3)], [_H]),
    "elu": _Case(tf.nn.elu, [_h(2, 3)], [_H]),
    "selu": _Case(tf.nn.selu, [_h(2, 3)], [_H]),
    "leaky_relu": _Case(tf.nn.leaky_relu, [_h(2, 3)], [_H]),
    "relu6": _Case(tf.nn.relu6, [_h(2, 3)], [_H]),
    "crelu": _Case(tf.nn.crelu, [_h(2, 3)], [_H]),
    "softplus": _Case(tf.nn.softplus, [_h(2, 3)], [_F]),
    "softsign": _Case(tf.nn.softsign, [_h(2, 3)], [_H]),
    "erf": _Case(tf.math.erf, [_h(2, 3)], [_H]),
    "exp": _Case(tf.exp, [_h(2, 3)], [_F]),
    "expm1": _Case(tf.math.expm1, [_h(2, 3)], [_F]),
    "power": _Case(lambda x: x**2, [_h(2, 3)], [_F]),
    "power_of_a_number": _Case(lambda x: 2.0**x, [_h(2, 3)], [_F]),
    "log": _Case(lambda x: tf.math.log(tf.abs(x) + 1.0), [_h(2, 3)], [_F]),
    "log1p": _Case(lambda x: tf.math.log1p(tf.abs(x)), [_h(2, 3)], [_F]),
    "sqrt": _Case(lambda x: tf.sqrt(tf.abs(x) + 1), [_h(2, 3)], [_F]),
    "rsqrt": _Case(lambda x: tf.math.rsqrt(tf.abs(x) + 1), [_h(2, 3)], [_F]),
    "square": _Case(tf.square, [_h(2, 3)], [_F]),
    "squared_difference": _Case(tf.math.squared_difference, [_h(2, 3), _x(2, 3)], [_F]),
    "squared_difference_of_halves": _Case(tf.math.squared_difference, [_h(2, 3), _h(2, 3)], [_F]),
    "sin": _Case(tf.sin, [_h(2, 3)], [_F]),
    "lgamma": _Case(lambda x: tf.math.lgamma(tf.abs(x) + 1.0), [_h(2, 3)], [_F]),
    "clip_by_value": _Case(lambda x: tf.clip_by_value(x, -0.5, 0.5), [_h(2, 3)], [_H]),
    "clip_by_norm": _Case(lambda x: tf.clip_by_norm(x, 0.5), [_h(2, 3)], [_F]),
    "numbers": _Case(lambda x: (1 - x * 2.0 + 1) / 4 - 0.5, [_h(2, 3)], [_H]),
    "number_over": _Case(lambda x: 2.0 / (tf.abs(x) + 1), [_h(2, 3)], [_H]),
    "numbers_of_numpy": _Case(lambda x: np.sqrt(2.0) * x + np.float32(0.5) * x - x / np.sqrt(16), [_h(2, 3)], [_H]),
    "floor_division": _Case(lambda x: (x + 3.0) // 0.25, [_h(2, 3)], [_H]),
    "remainder": _Case(lambda x: x % 0.25, [_h(2, 3)], [_F]),
    "remainder_by_float32": _Case(lambda x, y: (x + 2.0) % (tf.abs(y) + 0.25), [_h(2, 3), _x(2, 3)], [_F]),
    "sum_of_types": _Case(lambda x, y: x + y, [_h(2, 3), _x(2, 3)], [_F]),
    "quotient_of_types": _Case(lambda x, y: x / (y + 4.0), [_h(2, 3), _x(2, 3)], [_F]),
    "quotient_by_half": _Case(lambda x, y: x / (y + 4.0), [_x(2, 3), _h(2, 3)], [_F]),
    "divide_no_nan": _Case(lambda x, y: tf.math.divide_no_nan(x, y + 4.0), [_h(2, 3), _x(2, 3)], [_F]),
    "multiply_no_nan": _Case(tf.math.multiply_no_nan, [_h(2, 3), _x(2, 3)], [_F]),
    "add_n": _Case(lambda x, y: tf.add_n([x, x, y]), [_h(2, 3), _x(2, 3)], [_F]),
    "comparison": _Case(lambda x, y: tf.where(x < y, x, y), [_h(2, 3), _x(2, 3)], [_F]),
    "avg_pool1d": _Case(lambda x: tf.nn.avg_pool1d(x, 2, 2, "VALID"), [_h(1, 4, 2)], [_H]),
    "avg_pool2d": _Case(lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"), [_h(1, 2, 4, 2)], [_H]),
    "max_pool1d": _Case(lambda x: tf.nn.max_pool1d(x, 2, 2, "VALID"), [_h(1, 4, 2)], [_H]),
    "max_pool2d": _Case(lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), [_h(1, 2, 4, 2)], [_H]),
    "max_pool_with_argmax": _Case(lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "VALID")[0], [_h(1, 2, 4, 2)], [_F]),
    "local_response_normalization": _Case(tf.nn.local_response_normalization, [_h(1, 2, 2, 2)], [_F]),
    "space_to_depth": _Case(lambda x: tf.nn.space_to_depth(x, 2), [_h(1, 2, 2, 2)], [_H]),
    "resize": _Case(lambda x: tf.image.resize(x, [4, 4]), [_h(1, 2, 2, 2)], [_F]),
    "resize_nearest": _Case(lambda x: tf.image.resize(x, [4, 4], "nearest"), [_h(1, 2, 2, 2)], [_H]),
    "concat": _Case(lambda x: tf.concat([x, x], 0), [_h(2, 3)], [_H]),
    "concat_of_types": _Case(lambda x, y: tf.concat([x, y], 0), [_h(2, 3), _x(2, 3)], [_F]),
    "concat_with_weight": _Case(lambda w, x: tf.concat([w, x], 0), [_w(1, 3), _h(2, 3)], [_H]),
    "stack": _Case(lambda x, y: tf.stack([x, y, x], 1), [_h(2, 3), _x(2, 3)], [_F]),
    "list_as_tensor": _Case(lambda x, y: tf.convert_to_tensor([x, y]), [_h(2, 3), _x(2, 3)], [_F]),
    "reduced_list": _Case(lambda x, y: tf.reduce_max([x, y], 0), [_h(2, 3), _x(2, 3)], [_F]),
    "where": _Case(lambda x: tf.where(x > 0, x, 0.5), [_h(2, 3)], [_H]),
    "where_of_types": _Case(lambda x, y: tf.where(x > 0, x, y), [_h(2, 3), _x(2, 3)], [_F]),
    "pad": _Case(lambda x: tf.pad(x, [[1, 0], [0, 1]]), [_h(2, 3)], [_H]),
    "pad_with_a_number": _Case(lambda x: tf.pad(x, [[1, 0], [0, 1]], constant_values=2.0), [_h(2, 3)], [_H]),
    "pad_reflecting": _Case(lambda x: tf.pad(x, [[1, 0], [0, 1]], "REFLECT"), [_h(2, 3)], [_H]),
    "gather": _Case(lambda x: tf.gather(x, _ROW, axis=1), [_h(2, 3)], [_H]),
    "gather_nd": _Case(lambda x: tf.gather_nd(x, [[0, 1], [1, 2]]), [_h(2, 3)], [_H]),
    "tensor_scatter": _Case(lambda x, y: tf.tensor_scatter_nd_add(x, [[1]], y), [_h(2, 3), _x(1, 3)], [_F]),
    "segment_sum": _Case(lambda x: tf.math.unsorted_segment_sum(x, [1, 1], 2), [_h(2, 3)], [_F]),
    "reshapes": _Case(
        lambda x: tf.transpose(tf.squeeze(tf.expand_dims(tf.reshape(x, [3, -1]), 0), 0)), [_h(2, 3)], [_H]
    ),
    "slices": _Case(lambda x: tf.split(x[:, ::2], 2, 1) + tf.unstack(tf.reverse(x, [0])), [_h(2, 3)], [_H] * 4),
    "tile": _Case(lambda x: tf.broadcast_to(tf.tile(x, [2, 1]), [2, 4, 3]), [_h(2, 3)], [_H]),
    "roll": _Case(lambda x: tf.roll(x, 1, 0), [_h(2, 3)], [_F]),
    "band_part": _Case(lambda x: tf.linalg.band_part(x, 0, -1), [_h(3, 3)], [_F]),
    "cumsum": _Case(tf.cumsum, [_h(2, 3)], [_F]),
    "top_k": _Case(lambda x: tf.nn.top_k(x, 2)[0], [_h(2, 3)], [_H]),
    "sort": _Case(tf.sort, [_h(2, 3)], [_H]),
    "reduce_sum": _Case(lambda x: tf.reduce_sum(x, 1), [_h(2, 3)], [_F]),
    "reduce_sum_over_axes": _Case(lambda x: tf.reduce_sum(x, [0, 1]), [_h(2, 3)], [_F]),
    "reduce_mean_over_axes": _Case(lambda x: tf.reduce_mean(x, [0, 1]), [_h(2, 3)], [_F]),
    "reduce_mean": _Case(lambda x: tf.reduce_mean(x, 1), [_h(2, 3)], [_F]),
    "reduce_max": _Case(lambda x: tf.reduce_max(x, 1), [_h(2, 3)], [_H]),
    "reduce_min": _Case(lambda x: tf.reduce_min(x, 1), [_h(2, 3)], [_H]),
    "reduce_prod": _Case(lambda x: tf.reduce_prod(x, 1), [_h(2, 3)], [_F]),
    "reduce_logsumexp": _Case(lambda x: tf.reduce_logsumexp(x, 1), [_h(2, 3)], [_F]),
    "reduce_variance": _Case(lambda x: tf.math.reduce_variance(x, 1), [_h(2, 3)], [_F]),
    "reduce_std": _Case(lambda x: tf.math.reduce_std(x, 1), [_h(2, 3)], [_F]),
    "norm": _Case(lambda x: tf.norm(x, axis=1), [_h(2, 3)], [_F]),
    "l2_normalize": _Case(lambda x: tf.nn.l2_normalize(x, 1), [_h(2, 3)], [_F]),
    "moments": _Case(lambda x: tf.nn.moments(x, [0]), [_h(4, 3)], [_F, _F]),
    "weighted_moments": _Case(lambda x: tf.nn.weighted_moments(x, [0], tf.ones([4, 3])), [_h(4, 3)], [_F, _F]),
    "softmax_cross_entropy": _Case(
        lambda x, y: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x),
        [_h(2, 3), _x(2, 3)],
        [_F],
    ),
    "softmax_cross_entropy_with_labels_in_half": _Case(
        lambda x, y: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x), y),
        [_h(2, 3), _x(2, 3)],
        [_F],
    ),
    "sparse_softmax_cross_entropy": _Case(
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(_ROW, x), [_h(2, 3)], [_F]
    ),
    "sigmoid_cross_entropy": _Case(
        lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(tf.abs(y), x),
        [_h(2, 3), _x(2, 3)],
        [_F],
    ),
    "weighted_cross_entropy": _Case(
        lambda x, y: tf.nn.weighted_cross_entropy_with_logits(tf.abs(y), x, 2.0), [_h(2, 3), _x(2, 3)], [_F]
    ),
    "poisson_loss": _Case(lambda x, y: tf.nn.log_poisson_loss(tf.abs(y), x, True), [_h(2, 3), _x(2, 3)], [_F]),
    "l2_loss": _Case(tf.nn.l2_loss, [_h(2, 3)], [_F]),
    "l2_loss_of_weight": _Case(tf.nn.l2_loss, [_w(2, 3)], [_F]),
    "mean_squared_error": _Case(lambda x, y: tf.reduce_mean((x - y) ** 2), [_h(2, 3), _x(2, 3)], [_F]),
    "average_loss": _Case(lambda x: tf.nn.compute_average_loss(x[:, 0], global_batch_size=4), [_h(2, 3)], [_F]),
    "embedding": _Case(lambda w: tf.nn.embedding_lookup(w, [[0, 2], [1, 1]]), [_w(3, 2)], [_F]),
    "embedding_into_product": _Case(lambda w, u: tf.gather(w, [0, 2]) @ u, [_w(3, 2), _w(2, 2)], [_H]),
    "inverse": _Case(lambda x: tf.linalg.inv(x + tf.eye(2) * 4.0), [_h(2, 2)], [_F]),
    "determinant": _Case(lambda x: tf.linalg.det(x + np.eye(2, dtype=np.float32)), [_h(2, 2)], [_F]),
    "exponential": _Case(lambda x: tf.linalg.expm(-x), [_h(2, 2)], [_F]),
    "eigenvalues": _Case(lambda x: tf.math.real(tf.linalg.eigvals(x + tf.transpose(x))), [_h(2, 2)], [_F]),
    "eigenvectors": _Case(lambda x: tf.abs(tf.linalg.eig(x + tf.transpose(x))[1]), [_h(2, 2)], [_F]),
    "pseudo_inverse": _Case(lambda x: tf.linalg.pinv(x + 4.0 * tf.eye(2)), [_h(2, 2)], [_F]),
    "kronecker_product": _Case(_kronecker_product, [_h(2, 2), _x(2, 2), _x(4, 1)], [_H]),
    "operators": _Case(_operators, [_h(2, 2), _x(2, 2)], [_H, _F, _F, _F]),
    "ctc_loss": _Case(lambda x: tf.nn.ctc_loss([[1], [2]], x, [1, 1], [3, 3], blank_index=0), [_h(3, 2, 3)], [_F]),
    "resize_by_lanczos": _Case(lambda x: tf.image.resize(x, [4, 4], "lanczos3"), [_h(1, 2, 2, 2)], [_F]),
    "resize_by_area": _Case(lambda x: tf.image.resize(x, [4, 4], "area"), [_h(1, 2, 2, 2)], [_F]),
    "numbers_for_one_hot": _Case(lambda x, y: tf.one_hot([0, 1], 2, x[0, 0], y[0, 0]), [_h(1, 1), _x(1, 1)], [_F]),
    "accumulated": _Case(lambda x, y: tf.math.accumulate_n([x, y, x]), [_h(2, 3), _x(2, 3)], [_F]),
    "quotient_by_a_function_from_before": _Case(lambda x, y: _DIVIDE(x, y + 4.0), [_x(2, 3), _h(2, 3)], [_F]),
    "cosine_transform": _Case(lambda x: tf.signal.dct(-x), [_h(2, 4)], [_F]),
    "diagonal": _Case(tf.linalg.diag_part, [_h(2, 2)], [_F]),
    "trace": _Case(tf.linalg.trace, [_h(2, 2)], [_F]),
    "spectrum": _Case(lambda x: tf.abs(tf.signal.rfft(x)), [_h(2, 4)], [_F]),
    "complex": _Case(lambda x, y: tf.abs(tf.complex(x, y)), [_h(2, 4), _x(2, 4)], [_F]),
    "min_max_of_fake_quantization": _Case(
        lambda x: tf.quantization.fake_quant_with_min_max_args(x, -4.0, 4.0, 16), [_h(2, 4)], [_F]
    ),
    "adjusted_contrast": _Case(lambda x: tf.image.adjust_contrast(x, 2.0), [_h(1, 2, 2, 3)], [_H]),
    "crop_and_resize": _Case(
        lambda x, y: tf.image.crop_and_resize(x, tf.abs(y), [0], [2, 2]), [_h(1, 3, 3, 1), _h(1, 4)], [_F]
    ),
    "histogram": _Case(lambda x: tf.histogram_fixed_width(x, [0.0, 1.0], 4), [_h(2, 4)], ["int32"]),
    "boxes": _Case(
        lambda x: tf.image.combined_non_max_suppression(
            tf.reshape(x, [1, 1, 1, 4]), tf.reshape(x[:, 0], [1, 1, 1]), 1, 1
        )[0],
        [_h(1, 4)],
        [_F],
    ),
    "written_to_an_array": _Case(_written_to_an_array, [_h(2, 3)], [_H]),
    "mapped": _Case(lambda x, w: tf.map_fn(lambda row: tf.linalg.matvec(w, row), x), [_x(2, 3), _w(2, 3)], [_F]),
    "scanned": _Case(_scanned, [_x(2, 3), _w(3, 3)], [_F]),
    "folded": _Case(_folded, [_x(2, 3), _w(3, 3)], [_F]),
    "vectorized": _Case(
        lambda x, w: tf.vectorized_map(lambda row: tf.linalg.matvec(w, row), x), [_x(2, 3), _w(2, 3)], [_H]
    ),
}

#: Traces take long. In functions, bfloat16 has the cases in which it differs from float16, and a few others.
_OF_BFLOAT16 = (
    "matmul conv2d attention lstm_cell lstm_block_cell exp concat_of_types mapped matmul_of_product_and_weight "
)
_OF_BFLOAT16 += "layer_norm reduce_sum gates_with_numbers exponential pseudo_inverse"
_ROWS = [
    pytest.param(name, dtype, way, id=f"{name}-{dtype}-{id_}")
    for name in _CASES
    for dtype in ("float16", "bfloat16")
    # Without AutoGraph, which none of the cases needs, traces take less time.
    for id_, way in {"eager": eager, "function": lambda each: tf.function(each, autograph=False)}.items()
    if id_ == "eager" or dtype == "float16" or name in _OF_BFLOAT16.split()
]
_EACH_TYPE = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def _values(case: _Case) -> list[Any]:
    """Return inputs that half precision does not round."""
    random = np.random.default_rng(3)
    arrays = [np.float32(random.integers(-7, 8, each.shape) / 8) for each in case.inputs]
    return [
        tf.Variable(array) if each.kind == "weight" else tf.constant(array)
        for array, each in zip(arrays, case.inputs, strict=True)
    ]


def _compute(case: _Case, scope: Any, activations: Sequence[tf.Tensor], values: list[Any]) -> list[tf.Tensor]:
    """Compute a case: weights are those among the values, and some of its inputs products with the identity matrix."""
    left = iter(activations)
    with scope:
        given = [
            value
            if each.kind == "weight"
            else next(left) @ np.eye(each.shape[-1], dtype=np.float32)
            if each.kind == "product"
            else next(left)
            for value, each in zip(values, case.inputs, strict=True)
        ]
        return list(tf.nest.flatten(case.compute(*given)))[: len(case.results)]


def _assert_as_plain(case: _Case, dtype: str, results: list[tf.Tensor], activations: Any, values: list[Any]) -> None:
    expected = case.in_bfloat16 if dtype == "bfloat16" and case.in_bfloat16 else case.results
    assert types(results) == [dtype if each == _H else each for each in expected]
    for result, known in zip(results, _compute(case, contextlib.nullcontext(), activations, values), strict=True):
        scale = max(1.0, float(np.abs(known).max()))
        np.testing.assert_allclose(np.float32(result), known, rtol=_TOLERANCES[dtype], atol=_TOLERANCES[dtype] * scale)


def _activations(values: list[Any]) -> list[tf.Tensor]:
    return [value for value in values if isinstance(value, tf.Tensor)]


@pytest.mark.parametrize(("name", "dtype", "way"), _ROWS)
def test_results_are_those_of_float32(name: str, dtype: str, way: Way) -> None:
    case, values = _CASES[name], _values(_CASES[name])
    results = way(lambda *activations: _compute(case, tfmp.autocast(dtype), activations, values))(*_activations(values))
    _assert_as_plain(case, dtype, results, _activations(values), values)


@_EACH_TYPE
def test_results_within_xla_are_those_of_float32(dtype: str) -> None:
    names = ["dense", "conv2d", "attention", "layer_norm", "batch_norm", "sum_of_types", "softmax_cross_entropy"]
    cases = [(_CASES[name], _values(_CASES[name])) for name in names]

    @tf.function(jit_compile=True)
    def compute(given: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        scope = tfmp.autocast(dtype)
        return [_compute(case, scope, each, values) for each, (case, values) in zip(given, cases, strict=True)]

    for (case, values), results in zip(cases, compute([_activations(values) for _, values in cases]), strict=True):
        _assert_as_plain(case, dtype, results, _activations(values), values)


@_EACH_TYPE
@pytest.mark.parametrize("method", ["bilinear", "nearest"])
def test_images_are_resized_within_xla_with_their_gradients(method: str, dtype: str) -> None:
    @tf.function(jit_compile=True)
    def compute(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tfmp.autocast(dtype):
                resized = tf.image.resize(x @ np.eye(2, dtype=np.float32), [4, 4], method)
        return resized, tape.gradient(resized, x)

    resized, grad = compute(tf.ones([1, 2, 2, 2]))
    assert np.unique(np.float32(resized)).tolist() == [1]
    assert np.unique(grad).tolist() == [4]


def test_gradient_of_each_way_to_resize_is_that_of_float32() -> None:
    x = tf.constant(np.arange(8, dtype=np.float32).reshape([1, 2, 2, 2]))
    for method in ("bilinear", "bicubic", "lanczos3", "lanczos5", "gaussian", "mitchellcubic"):
        found = []
        for enabled in (True, False):
            with tf.GradientTape() as tape:
                tape.watch(x)
                with tfmp.autocast(enabled=enabled):
                    squares = tf.image.resize(x @ np.eye(2, dtype=np.float32), [3, 3], method) ** 2
            found.append(tape.gradient(squares, x))
        np.testing.assert_allclose(*found, rtol=2e-3)


@_EACH_TYPE
def test_batch_normalization_takes_a_scale_that_was_computed(dtype: str) -> None:
    x, scale = tf.constant(np.arange(12, dtype=np.float32).reshape([3, 1, 1, 4])), tf.constant([[1.0, 2.0, 0.5, 1.5]])
    with tf.GradientTape() as tape:
        tape.watch(scale)
        with tfmp.autocast(dtype):
            half = x @ np.eye(4, dtype=np.float32)
            gamma = (scale @ np.eye(4, dtype=np.float32))[0]
            normalized = tf.compat.v1.nn.fused_batch_norm(half, gamma, tf.zeros([4]))[0]
            squares = normalized**2
    assert normalized.dtype == dtype
    # The squares of three normalized values have the sum 3.
    np.testing.assert_allclose(tape.gradient(squares, scale), [[6, 12, 3, 9]], rtol=3e-2)


def test_error_of_a_function_that_float32_does_not_mend_is_its_own() -> None:
    with tfmp.autocast(), pytest.raises(ValueError, match="must be a scalar tensor or a float"):
        tf.nn.dropout(tf.ones([2, 2]) @ tf.ones([2, 2]), rate=7)


def test_functions_of_the_user_are_not_called_again() -> None:
    calls = []

    def fails(x: tf.Tensor) -> tf.Tensor:
        calls.append(x)
        raise TypeError("no such row")

    with tfmp.autocast(), pytest.raises(TypeError, match="no such row"):
        tf.map_fn(fails, tf.ones([2, 2]) @ tf.ones([2, 2]))
    assert len(calls) == 1


@_EACH_TYPE
def test_dropout_keeps_the_type_and_drops_as_many(dtype: str) -> None:
    x = tf.ones([32, 32])
    with tfmp.autocast(dtype):
        dropped = tf.nn.dropout(x @ np.eye(32, dtype=np.float32), 0.5, seed=1)
        stateless = tf.nn.experimental.stateless_dropout(x @ np.eye(32, dtype=np.float32), 0.5, seed=[1, 2])
    for result in (dropped, stateless):
        assert result.dtype == dtype
        assert set(np.unique(np.float32(result))) == {0.0, 2.0}
        assert 0.4 < np.mean(np.float32(result) == 0) < 0.6


@each_way
def test_state_keeps_its_type(way: Way) -> None:
    v, rows = tf.Variable(tf.zeros([2, 2])), tf.Variable(tf.zeros([3, 2]))

    @tfmp.autocast()
    def update(x: tf.Tensor) -> tf.Tensor:
        half = x @ x
        v.assign(half)
        v.assign_add(half * 3.0)
        v.assign_sub(half)
        rows.scatter_update(tf.IndexedSlices(half, tf.constant([0, 2])))
        rows.scatter_nd_add([[0]], half[:1])
        rows[1].assign(half[0])
        return [half, v * tf.reduce_sum(v)]

    assert types(way(update)(tf.ones([2, 2]))) == ["float16", "float32"]
    assert v.numpy().tolist() == [[6, 6], [6, 6]]
    assert rows.numpy().tolist() == [[4, 4], [2, 2], [2, 2]]


def test_random_numbers_are_made_in_the_type_asked_for() -> None:
    with tfmp.autocast():
        assert tf.random.normal([2]).dtype == tf.float32
        assert tf.random.normal([2], dtype=tf.float64).dtype == tf.float64
        assert tf.random.categorical(tf.ones([1, 2]) @ tf.ones([2, 2]), 3).dtype == tf.int64


def test_casts_that_are_named_are_done() -> None:
    with tfmp.autocast():
        half = tf.ones([1, 1]) @ tf.ones([1, 1])
        named = [tf.cast(half, dtype) for dtype in (tf.float32, tf.float64, tf.bfloat16, tf.int32)]
    assert [each.dtype.name for each in named] == ["float32", "float64", "bfloat16", "int32"]


def test_sparse_and_ragged_tensors_are_computed_with() -> None:
    dense = tf.constant([[1.0, 0.0], [0.0, 2.0]])
    with tfmp.autocast():
        half = dense @ dense
        product = tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(dense), half)
        ragged = tf.ragged.constant([[1.0], [2.0, 3.0]]) * 2.0
        total = tf.reduce_sum(ragged)
    assert product.numpy().tolist() == [[1, 0], [0, 8]]
    assert (product.dtype, total.dtype) == (tf.float32, tf.float32)
    assert float(total) == 12
