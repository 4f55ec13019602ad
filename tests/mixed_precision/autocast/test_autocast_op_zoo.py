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


class _Case(NamedTuple):
    """What is computed of which inputs.

    Attributes:
        compute: Takes the inputs.
        inputs: Each is a letter before a shape, whose sizes are digits: "x" for an activation, "h" for an activation
            that is the result of a product, and "w" for a weight.
        results: The types of the results, with H for the type of autocast, and F for float32.
        in_bfloat16: The types of the results where they are others in bfloat16.
    """

    compute: Callable[..., Any]
    inputs: str
    results: str
    in_bfloat16: str | None = None


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
    "matmul": _Case(tf.matmul, "x23 w32", "H"),
    "matmul_of_transposed": _Case(lambda x, w: tf.matmul(x, w, transpose_b=True), "x23 w23", "H"),
    "matmul_of_products": _Case(tf.matmul, "h23 h32", "H"),
    "matmul_of_product_and_weight": _Case(lambda x, w: x @ w, "h23 w32", "H"),
    "matmul_batched": _Case(tf.matmul, "x223 x232", "H"),
    "matmul_batched_with_weight": _Case(lambda x, w: x @ w, "x223 w32", "H"),
    "matmul_with_hint": _Case(lambda x, w: tf.matmul(x, w, a_is_sparse=True), "x23 w32", "F"),
    "matvec": _Case(tf.linalg.matvec, "w32 x2", "H"),
    "tensordot": _Case(lambda x, w: tf.tensordot(x, w, [[1, 2], [0, 1]]), "x222 w223", "H"),
    "einsum": _Case(lambda x, w: tf.einsum("abc,cd->abd", x, w), "x223 w32", "H"),
    "einsum_of_three": _Case(lambda x, w, y: tf.einsum("ab,bc,cd->ad", x, w, y), "x23 w32 x22", "H"),
    "dense": _Case(lambda x, w, b: tf.nn.relu(x @ w + b), "x23 w32 w2", "H"),
    "dense_with_bias_add": _Case(lambda x, w, b: tf.nn.bias_add(x @ w, b), "x23 w32 w2", "H"),
    "conv1d": _Case(lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"), "x142 w222", "H"),
    "conv2d": _Case(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), "x1331 w2212", "H"),
    "conv3d": _Case(lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), "x12221 w22211", "H"),
    "conv1d_transpose": _Case(lambda x, w: tf.nn.conv1d_transpose(x, w, [1, 4, 2], 2), "x121 w221", "H"),
    "conv2d_transpose": _Case(lambda x, w: tf.nn.conv2d_transpose(x, w, [1, 4, 4, 1], 2), "x1222 w2212", "H"),
    "depthwise_conv2d": _Case(lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), "x1332 w2221", "H"),
    "separable_conv2d": _Case(
        lambda x, w, p: tf.nn.separable_conv2d(x, w, p, [1] * 4, "SAME"), "x1332 w2221 w1122", "H"
    ),
    "attention": _Case(_attention, "h132 h132 h132", "H"),
    "attention_with_mask": _Case(_masked_attention, "h132 h132 h132", "H"),
    "attention_over_a_root_of_numpy": _Case(
        lambda q, k: tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.sqrt(2)), "h132 h132", "F"
    ),
    "lstm_cell": _Case(_lstm, "x23 x22 x22 w38 w28 w8", "F F H"),
    "lstm_block_cell": _Case(_lstm_block, "x23 x22 x22 w58 w2 w8", "H H", in_bfloat16="F F"),
    "batch_norm": _Case(_batch_norm, "h43 w3 w3", "H F F"),
    "batch_norm_of_inputs": _Case(_batch_norm, "x43 w3 w3", "F F F"),
    "fused_batch_norm": _Case(_fused_batch_norm, "h1223 w3 w3", "H F F"),
    "layer_norm": _Case(_layer_norm, "h24 w4 w4", "F"),
    **{
        each.__name__: _Case(each, "h23", "F")
        for each in (
            *(tf.nn.softmax, tf.nn.log_softmax, tf.sigmoid, tf.tanh, tf.nn.softplus, tf.exp, tf.math.expm1, tf.square),
            *(tf.sin, tf.cumsum, tf.nn.l2_loss, tf.reduce_sum, tf.reduce_mean),
        )
    },
    **{
        each.__name__: _Case(each, "h23", "H")
        for each in (
            *(tf.nn.gelu, tf.nn.silu, tf.nn.elu, tf.nn.selu, tf.nn.leaky_relu, tf.nn.relu6, tf.nn.crelu),
            *(tf.nn.softsign, tf.math.erf, tf.sort),
        )
    },
    **{
        f"{each.__name__}_of_positive": _Case(lambda x, each=each: each(tf.abs(x) + 1.0), "h23", "F")
        for each in (tf.math.log, tf.math.log1p, tf.sqrt, tf.math.rsqrt, tf.math.lgamma)
    },
    **{
        f"{each.__name__}_over_rows": _Case(lambda x, each=each: each(x, axis=1), "h23", result)
        for result, some in {
            "F": [
                *(tf.reduce_sum, tf.reduce_mean, tf.reduce_prod, tf.reduce_logsumexp, tf.math.reduce_variance),
                *(tf.math.reduce_std, tf.norm, tf.nn.l2_normalize),
            ],
            "H": [tf.reduce_max, tf.reduce_min],
        }.items()
        for each in some
    },
    "sigmoid_of_inputs": _Case(lambda x, y: x * tf.sigmoid(y), "h23 x23", "F"),
    "gate": _Case(lambda x, y: x * tf.sigmoid(y), "h23 h23", "H"),
    "gate_of_gates": _Case(lambda x, y: x + tf.sigmoid(tf.tanh(y) * 2.0), "h23 h23", "H"),
    "squeeze_and_excite": _Case(lambda x, y: x * tf.reshape(tf.nn.sigmoid(y), [1, 1, 1, 2]), "h1222 h12", "H"),
    "weighted_gate": _Case(lambda x, y, w: x + w * tf.tanh(y), "h23 h23 w3", "H"),
    "gates_with_numbers": _Case(_mixed_by_a_gate, "h23 h23 h23", "H"),
    "gate_with_number": _Case(lambda x: 1 - tf.sigmoid(x), "h23", "F"),
    "gate_within_limits": _Case(lambda x: tf.clip_by_value(tf.sigmoid(x), 1e-7, 1 - 1e-7), "h23", "F"),
    "logarithm_of_a_gate": _Case(lambda x, y: y * tf.math.log(1 - tf.sigmoid(x) + 1e-7), "h23 h23", "F"),
    "gelu_approximate": _Case(lambda x: tf.nn.gelu(x, approximate=True), "h23", "F"),
    "power": _Case(lambda x: x**2, "h23", "F"),
    "power_of_a_number": _Case(lambda x: 2.0**x, "h23", "F"),
    "squared_difference": _Case(tf.math.squared_difference, "h23 x23", "F"),
    "squared_difference_of_halves": _Case(tf.math.squared_difference, "h23 h23", "F"),
    "clip_by_value": _Case(lambda x: tf.clip_by_value(x, -0.5, 0.5), "h23", "H"),
    "clip_by_norm": _Case(lambda x: tf.clip_by_norm(x, 0.5), "h23", "F"),
    "numbers": _Case(lambda x: (1 - x * 2.0 + 1) / 4 - 0.5, "h23", "H"),
    "number_over": _Case(lambda x: 2.0 / (tf.abs(x) + 1), "h23", "H"),
    "numbers_of_numpy": _Case(lambda x: np.sqrt(2.0) * x + np.float32(0.5) * x - x / np.sqrt(16), "h23", "H"),
    "floor_division": _Case(lambda x: (x + 3.0) // 0.25, "h23", "H"),
    "remainder": _Case(lambda x: x % 0.25, "h23", "F"),
    "remainder_by_float32": _Case(lambda x, y: (x + 2.0) % (tf.abs(y) + 0.25), "h23 x23", "F"),
    "sum_of_types": _Case(lambda x, y: x + y, "h23 x23", "F"),
    "quotient_of_types": _Case(lambda x, y: x / (y + 4.0), "h23 x23", "F"),
    "quotient_by_half": _Case(lambda x, y: x / (y + 4.0), "x23 h23", "F"),
    "divide_no_nan": _Case(lambda x, y: tf.math.divide_no_nan(x, y + 4.0), "h23 x23", "F"),
    "multiply_no_nan": _Case(tf.math.multiply_no_nan, "h23 x23", "F"),
    "add_n": _Case(lambda x, y: tf.add_n([x, x, y]), "h23 x23", "F"),
    "comparison": _Case(lambda x, y: tf.where(x < y, x, y), "h23 x23", "F"),
    "avg_pool2d": _Case(lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"), "h1242", "H"),
    "max_pool2d": _Case(lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), "h1242", "H"),
    "max_pool_with_argmax": _Case(lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "VALID")[0], "h1242", "F"),
    "local_response_normalization": _Case(tf.nn.local_response_normalization, "h1222", "F"),
    "space_to_depth": _Case(lambda x: tf.nn.space_to_depth(x, 2), "h1222", "H"),
    "resize": _Case(lambda x: tf.image.resize(x, [4, 4]), "h1222", "F"),
    "resize_nearest": _Case(lambda x: tf.image.resize(x, [4, 4], "nearest"), "h1222", "H"),
    "concat": _Case(lambda x: tf.concat([x, x], 0), "h23", "H"),
    "concat_of_types": _Case(lambda x, y: tf.concat([x, y], 0), "h23 x23", "F"),
    "concat_with_weight": _Case(lambda w, x: tf.concat([w, x], 0), "w13 h23", "H"),
    "stack": _Case(lambda x, y: tf.stack([x, y, x], 1), "h23 x23", "F"),
    "list_as_tensor": _Case(lambda x, y: tf.convert_to_tensor([x, y]), "h23 x23", "F"),
    "reduced_list": _Case(lambda x, y: tf.reduce_max([x, y], 0), "h23 x23", "F"),
    "where": _Case(lambda x: tf.where(x > 0, x, 0.5), "h23", "H"),
    "where_of_types": _Case(lambda x, y: tf.where(x > 0, x, y), "h23 x23", "F"),
    "pad": _Case(lambda x: tf.pad(x, [[1, 0], [0, 1]]), "h23", "H"),
    "pad_with_a_number": _Case(lambda x: tf.pad(x, [[1, 0], [0, 1]], constant_values=2.0), "h23", "H"),
    "gather": _Case(lambda x: tf.gather(x, _ROW, axis=1), "h23", "H"),
    "tensor_scatter": _Case(lambda x, y: tf.tensor_scatter_nd_add(x, [[1]], y), "h23 x13", "F"),
    "segment_sum": _Case(lambda x: tf.math.unsorted_segment_sum(x, [1, 1], 2), "h23", "F"),
    "reshapes": _Case(lambda x: tf.transpose(tf.squeeze(tf.expand_dims(tf.reshape(x, [3, -1]), 0), 0)), "h23", "H"),
    "slices": _Case(lambda x: tf.split(x[:, ::2], 2, 1) + tf.unstack(tf.reverse(x, [0])), "h23", "H H H H"),
    "tile": _Case(lambda x: tf.broadcast_to(tf.tile(x, [2, 1]), [2, 4, 3]), "h23", "H"),
    "roll": _Case(lambda x: tf.roll(x, 1, 0), "h23", "F"),
    "band_part": _Case(lambda x: tf.linalg.band_part(x, 0, -1), "h33", "F"),
    "top_k": _Case(lambda x: tf.nn.top_k(x, 2)[0], "h23", "H"),
    "moments": _Case(lambda x: tf.nn.moments(x, [0]), "h43", "F F"),
    "weighted_moments": _Case(lambda x: tf.nn.weighted_moments(x, [0], tf.ones([4, 3])), "h43", "F F"),
    "softmax_cross_entropy": _Case(
        lambda x, y: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x), "h23 x23", "F"
    ),
    "softmax_cross_entropy_with_labels_in_half": _Case(
        lambda x, y: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x), y), "h23 x23", "F"
    ),
    "sparse_softmax_cross_entropy": _Case(
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(_ROW, x), "h23", "F"
    ),
    "sigmoid_cross_entropy": _Case(lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(tf.abs(y), x), "h23 x23", "F"),
    "weighted_cross_entropy": _Case(
        lambda x, y: tf.nn.weighted_cross_entropy_with_logits(tf.abs(y), x, 2.0), "h23 x23", "F"
    ),
    "poisson_loss": _Case(lambda x, y: tf.nn.log_poisson_loss(tf.abs(y), x, True), "h23 x23", "F"),
    "l2_loss_of_weight": _Case(tf.nn.l2_loss, "w23", "F"),
    "mean_squared_error": _Case(lambda x, y: tf.reduce_mean((x - y) ** 2), "h23 x23", "F"),
    "average_loss": _Case(lambda x: tf.nn.compute_average_loss(x[:, 0], global_batch_size=4), "h23", "F"),
    "embedding": _Case(lambda w: tf.nn.embedding_lookup(w, [[0, 2], [1, 1]]), "w32", "F"),
    "embedding_into_product": _Case(lambda w, u: tf.gather(w, [0, 2]) @ u, "w32 w22", "H"),
    "inverse": _Case(lambda x: tf.linalg.inv(x + tf.eye(2) * 4.0), "h22", "F"),
    "determinant": _Case(lambda x: tf.linalg.det(x + np.eye(2, dtype=np.float32)), "h22", "F"),
    "exponential": _Case(lambda x: tf.linalg.expm(-x), "h22", "F"),
    "eigenvalues": _Case(lambda x: tf.math.real(tf.linalg.eigvals(x + tf.transpose(x))), "h22", "F"),
    "eigenvectors": _Case(lambda x: tf.abs(tf.linalg.eig(x + tf.transpose(x))[1]), "h22", "F"),
    "pseudo_inverse": _Case(lambda x: tf.linalg.pinv(x + 4.0 * tf.eye(2)), "h22", "F"),
    "kronecker_product": _Case(_kronecker_product, "h22 x22 x41", "H"),
    "operators": _Case(_operators, "h22 x22", "H F F F"),
    "ctc_loss": _Case(lambda x: tf.nn.ctc_loss([[1], [2]], x, [1, 1], [3, 3], blank_index=0), "h323", "F"),
    "resize_by_lanczos": _Case(lambda x: tf.image.resize(x, [4, 4], "lanczos3"), "h1222", "F"),
    "numbers_for_one_hot": _Case(lambda x, y: tf.one_hot([0, 1], 2, x[0, 0], y[0, 0]), "h11 x11", "F"),
    "accumulated": _Case(lambda x, y: tf.math.accumulate_n([x, y, x]), "h23 x23", "F"),
    "quotient_by_a_function_from_before": _Case(lambda x, y: _DIVIDE(x, y + 4.0), "x23 h23", "F"),
    "cosine_transform": _Case(lambda x: tf.signal.dct(-x), "h24", "F"),
    "diagonal": _Case(tf.linalg.diag_part, "h22", "F"),
    "trace": _Case(tf.linalg.trace, "h22", "F"),
    "spectrum": _Case(lambda x: tf.abs(tf.signal.rfft(x)), "h24", "F"),
    "complex": _Case(lambda x, y: tf.abs(tf.complex(x, y)), "h24 x24", "F"),
    "min_max_of_fake_quantization": _Case(
        lambda x: tf.quantization.fake_quant_with_min_max_args(x, -4.0, 4.0, 16), "h24", "F"
    ),
    "adjusted_contrast": _Case(lambda x: tf.image.adjust_contrast(x, 2.0), "h1223", "H"),
    "crop_and_resize": _Case(lambda x, y: tf.image.crop_and_resize(x, tf.abs(y), [0], [2, 2]), "h1331 h14", "F"),
    "histogram": _Case(lambda x: tf.histogram_fixed_width(x, [0.0, 1.0], 4), "h24", "int32"),
    "boxes": _Case(
        lambda x: tf.image.combined_non_max_suppression(
            tf.reshape(x, [1, 1, 1, 4]), tf.reshape(x[:, 0], [1, 1, 1]), 1, 1
        )[0],
        "h14",
        "F",
    ),
    "vectorized": _Case(lambda x, w: tf.vectorized_map(lambda row: tf.linalg.matvec(w, row), x), "x23 w23", "H"),
}

#: Traces take long. In functions, bfloat16 has the cases in which it differs from float16, and a few others.
_OF_BFLOAT16 = "matmul conv2d attention lstm_cell lstm_block_cell exp concat_of_types matmul_of_product_and_weight "
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
    found = []
    for kind, *shape in case.inputs.split():
        array = np.float32(random.integers(-7, 8, [*map(int, shape)]) / 8)
        found.append(tf.Variable(array) if kind == "w" else tf.constant(array))
    return found


def _compute(case: _Case, scope: Any, activations: Sequence[tf.Tensor], values: list[Any]) -> list[tf.Tensor]:
    """Compute a case: weights are those among the values, and some of its inputs products with the identity matrix."""
    given, left = [], iter(activations)
    with scope:
        for value, kind in zip(values, case.inputs.split(), strict=True):
            x = value if kind[0] == "w" else next(left)
            given.append(x @ np.eye(x.shape[-1], dtype=np.float32) if kind[0] == "h" else x)
        return list(tf.nest.flatten(case.compute(*given)))[: len(case.results.split())]


def _assert_as_plain(case: _Case, dtype: str, results: list[tf.Tensor], activations: Any, values: list[Any]) -> None:
    expected = case.in_bfloat16 if dtype == "bfloat16" and case.in_bfloat16 else case.results
    assert types(results) == [{"H": dtype, "F": "float32"}.get(each, each) for each in expected.split()]
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
