"""Code of many kinds that names no types: its results have the types that the lists ask for, and float32's values."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Case, activations, assert_case, compute_case, values_of

import tfmp

_EYE = np.eye(2, dtype=np.float32)


def _attention(q: Any, k: Any, v: Any) -> Any:
    scores = tf.matmul(q, k, transpose_b=True) / tf.sqrt(2.0)
    return tf.einsum(
        "bij,bjk->bik", tf.nn.softmax(scores + (1.0 - tf.linalg.band_part(tf.ones([3, 3]), -1, 0)) * -1e9), v
    )


def _lstm(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any) -> Any:
    gates = x @ w + h @ u + b
    i, f, g, o = tf.split(gates, 4, axis=-1)
    c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
    return tf.sigmoid(o) * tf.tanh(c), c, gates


def _lstm_block(x: Any, c: Any, h: Any, w: Any, p: Any, b: Any) -> Any:
    found = tf.raw_ops.LSTMBlockCell(x=x, cs_prev=c, h_prev=h, w=w, wci=p, wcf=p, wco=p, b=b)
    # TensorFlow has no gradient of this op.
    return tf.stop_gradient(found.h), tf.stop_gradient(found.cs)


def _batch_norm(x: Any, scale: Any, offset: Any) -> Any:
    mean, variance = tf.nn.moments(x, [0])
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3), mean, variance


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


def _boxes(x: Any) -> Any:
    boxes, scores = tf.reshape(x, [1, 1, 1, 4]), tf.reshape(x[:, 0], [1, 1, 1])
    return tf.stop_gradient(tf.image.combined_non_max_suppression(boxes, scores, 1, 1)[0])


#: As code has it that imported the function before the scope was entered.
_DIVIDE = tf.math.divide_no_nan

#: Weights and scalars do not make an op wider, and neither does what only moves or reads a weight.
_HALF: dict[str, Case] = {
    "weight": Case(lambda h, w: h + w, "h22 w2", "H"),
    "weight that does not train": Case(lambda h, w: h - w, "h22 u2", "H"),
    "scalar weight": Case(lambda h, w: h * w, "h22 w", "H"),
    "weight that was read": Case(lambda h, w: h + tf.identity(w.read_value()), "h22 w22", "H"),
    "weight as tensor": Case(lambda h, w: h + tf.convert_to_tensor(w), "h22 w22", "H"),
    "reshaped weight": Case(lambda h, w: h + tf.reshape(w, [1, 2]), "h22 w2", "H"),
    "part of a transposed weight": Case(lambda h, w: h + tf.transpose(w[:1]), "h22 w22", "H"),
    "stopped weight": Case(lambda h, w: h + tf.stop_gradient(w), "h22 w22", "H"),
    "weight or half": Case(lambda h, w: tf.where(h > 0, h, w), "h22 w22", "H"),
    "concat with weight": Case(lambda w, h: tf.concat([w, h], 0), "w13 h23", "H"),
    "numbers": Case(lambda h: (1 - h * 2.0 + 1) / 4 - 0.5 + h * np.float32(2) - np.float64(1), "h22", "H"),
    "scalar tensor": Case(lambda h, x: x - h * x, "h22 x", "H"),
    "scalar that was computed": Case(lambda h, x: h / tf.reduce_sum(tf.abs(x)), "h22 x22", "H"),
    "float64 scalar": Case(lambda h, d: h * d, "h22 d", "H"),
    "weight and scalar": Case(lambda h, w, x: tf.add_n([h * x, w]), "h22 w22 x", "H"),
    "list of halves": Case(lambda h: tf.raw_ops.Elu(features=[h, h]), "h22", "H"),
    "half within a list of lists": Case(lambda h: tf.raw_ops.Elu(features=[[tf.reduce_max(h), 1.0]]), "h22", "H"),
    "product of an array": Case(lambda w: tf.matmul(_EYE, w), "w22", "H"),
    "product with float64 array": Case(lambda x: tf.matmul(x, np.eye(2)), "x22", "H"),
    "sum with an array": Case(lambda h: _EYE + (h + _EYE) / (_EYE + 1), "h22", "H"),
    # A weight in half precision is taken as it is.
    "half weight": Case(lambda v, h: v * h, "v22 h22", "H"),
    "product of half weights": Case(lambda v: v @ v, "v22", "H"),
    # Unlisted ops with state, or with other results, take what they are given.
    "shuffled": Case(tf.random.shuffle, "h12", "H"),
    "gamma": Case(
        lambda h: tf.zeros_like(tf.raw_ops.RandomGamma(shape=[1], alpha=tf.cast(h, tf.float16))), "h12", "float16"
    ),
    "bits": Case(lambda h: tf.cast(tf.bitcast(tf.cast(h, tf.float16), tf.uint16), tf.int32), "h22", "int32"),
    "shape": Case(tf.shape, "h22", "int32"),
    "index": Case(tf.argmax, "h22", "int64"),
}

_WIDE: dict[str, Case] = {
    "activation": Case(lambda h, x: x * (h + x), "h22 x22", "F"),
    "activation and weight": Case(lambda h, w, x: tf.add_n([h, w, x]), "h22 w22 x22", "F"),
    "computed from a weight": Case(lambda h, w: h + w * 2.0, "h22 w22", "F"),
    "rows of a weight": Case(lambda h, w: h + tf.gather(w, [1, 0]), "h22 w22", "F"),
    "exponential of a weight": Case(lambda h, w: h + tf.exp(w), "h22 w22", "F"),
    "weight and half weight": Case(lambda w, v: w * v, "w22 v22", "F"),
    "activation with half scalar": Case(lambda h, x: x * tf.reduce_max(h), "h22 x22", "F"),
    "scalars": Case(lambda h, x: tf.reduce_max(h) + x, "h22 x", "F"),
    "scalar weight and half scalar": Case(lambda h, w: tf.reduce_max(h) * w, "h22 w", "F"),
    "bfloat16": Case(lambda h, b: h + b, "h22 b22", "F", in_bfloat16="bfloat16"),
    "unlisted of bfloat16": Case(tf.cumsum, "b22", "F"),
    "unlisted with weight": Case(lambda h, w: tf.raw_ops.FloorMod(x=h, y=w), "h22 w22", "F"),
    "denied list": Case(lambda h: tf.exp([h, h]), "h22", "F"),
    "list of types": Case(lambda h, x: tf.raw_ops.Elu(features=[h, x]), "h22 x22", "F"),
    "float64": Case(lambda d: tf.cumsum(tf.exp(d @ d * 0.5)), "d22", "float64"),
    "float64 with half": Case(lambda h, d: tf.add(d, h @ d) + h, "h22 d22", "float64"),
    "moments of float64": Case(lambda d: tf.nn.moments(d * 2.0, [0])[0] + tf.reduce_mean(d), "d22", "float64"),
    "quotient": Case(lambda h, x: h / (x + 4.0), "h23 x23", "F"),
    "quotient by half": Case(lambda x, h: x / (h + 4.0), "x23 h23", "F"),
    "divide_no_nan": Case(lambda h, x: tf.math.divide_no_nan(h, x + 4.0), "h23 x23", "F"),
    "quotient by a function from before": Case(lambda x, h: _DIVIDE(x, h + 4.0), "x23 h23", "F"),
    "multiply_no_nan": Case(tf.math.multiply_no_nan, "h23 x23", "F"),
    "remainder by float32": Case(lambda h, x: (h + 2.0) % (tf.abs(x) + 0.25), "h23 x23", "F"),
    "concat of types": Case(lambda h, x: tf.concat([h, x], 0), "h23 x23", "F"),
    "stack": Case(lambda h, x: tf.stack([h, x, h], 1), "h23 x23", "F"),
    "list as tensor": Case(lambda h, x: tf.convert_to_tensor([h, x]), "h23 x23", "F"),
    "accumulated": Case(lambda h, x: tf.math.accumulate_n([h, x, h]), "h23 x23", "F"),
    "tensor scatter": Case(lambda h, x: tf.tensor_scatter_nd_add(h, [[1]], x), "h23 x13", "F"),
    "numbers for one_hot": Case(lambda h, x: tf.one_hot([0, 1], 2, h[0, 0], x[0, 0]), "h11 x11", "F"),
    "complex": Case(lambda h, x: tf.abs(tf.complex(h, x)), "h24 x24", "F"),
}

_OF_TENSORFLOW: dict[str, Case] = {
    "matmul": Case(lambda x, w: x @ w, "x23 w32", "H"),
    "matmul batched": Case(lambda x, w: tf.matmul(x, x @ w), "x233 w33", "H"),
    "matmul with hint": Case(lambda x, w: tf.matmul(x, w, a_is_sparse=True), "x23 w32", "F"),
    "matvec": Case(tf.linalg.matvec, "w32 x2", "H"),
    "einsum": Case(lambda x, w, y: tf.einsum("ab,bc,cd->ad", x, w, y), "x23 w32 x22", "H"),
    "dense": Case(lambda x, w, b: tf.nn.relu(x @ w + b), "x23 w32 w2", "H"),
    "conv2d": Case(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), "x1331 w2212", "H"),
    "conv2d_transpose": Case(lambda x, w: tf.nn.conv2d_transpose(x, w, [1, 4, 4, 1], 2), "x1222 w2212", "H"),
    "attention": Case(_attention, "h132 h132 h132", "H"),
    "attention over a root of NumPy": Case(
        lambda q, k: tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.sqrt(2)), "h132 h132", "F"
    ),
    "lstm": Case(_lstm, "x23 x22 x22 w38 w28 w8", "F F H"),
    "lstm block": Case(_lstm_block, "x23 x22 x22 w58 w2 w8", "H H", in_bfloat16="F F"),
    "batch norm": Case(_batch_norm, "h43 w3 w3", "H F F"),
    "batch norm of inputs": Case(_batch_norm, "x43 w3 w3", "F F F"),
    "fused batch norm": Case(tf.compat.v1.nn.fused_batch_norm, "h1223 w3 w3", "H F F"),
    "fused batch norm with a computed scale": Case(
        lambda h, x, w: tf.compat.v1.nn.fused_batch_norm(h, (x @ np.eye(4, dtype=np.float32))[0], w),
        "h3114 x14 w4",
        "H F F",
    ),
    "layer norm": Case(_layer_norm, "h24 w4 w4", "F"),
    **{
        each.__name__: Case(each, "h23", "F")
        for each in (
            *(tf.nn.softmax, tf.nn.log_softmax, tf.sigmoid, tf.tanh, tf.nn.softplus, tf.exp, tf.math.expm1, tf.square),
            *(tf.sin, tf.cumsum, tf.nn.l2_loss, tf.reduce_sum, tf.reduce_mean),
        )
    },
    **{
        each.__name__: Case(each, "h23", "H")
        for each in (
            *(tf.nn.gelu, tf.nn.silu, tf.nn.elu, tf.nn.selu, tf.nn.leaky_relu, tf.nn.relu6, tf.nn.crelu),
            *(tf.nn.softsign, tf.math.erf, tf.sort),
        )
    },
    **{
        f"{each.__name__} of positive": Case(lambda h, each=each: each(tf.abs(h) + 1.0), "h23", "F")
        for each in (tf.math.log, tf.math.log1p, tf.sqrt, tf.math.rsqrt, tf.math.lgamma)
    },
    **{
        f"{each.__name__} over rows": Case(lambda h, each=each: each(h, axis=1), "h23", result)
        for result, some in {
            "F": [
                *(tf.reduce_sum, tf.reduce_mean, tf.reduce_prod, tf.reduce_logsumexp, tf.math.reduce_variance),
                *(tf.math.reduce_std, tf.norm, tf.nn.l2_normalize),
            ],
            "H": [tf.reduce_max, tf.reduce_min],
        }.items()
        for each in some
    },
    "gate of inputs": Case(lambda h, x: h * tf.sigmoid(x), "h23 x23", "F"),
    "squeeze and excite": Case(lambda x, y: x * tf.reshape(tf.nn.sigmoid(y), [1, 1, 1, 2]), "h1222 h12", "H"),
    "weighted gate": Case(lambda x, y, w: x + w * tf.tanh(y), "h23 h23 w3", "H"),
    "gates with numbers": Case(
        lambda x, h, c: tf.sigmoid(x) * h + (1 - tf.sigmoid(x)) * tf.tanh(c), "h23 h23 h23", "H"
    ),
    "gate with a number": Case(lambda h: 1 - tf.sigmoid(h), "h23", "F"),
    "logarithm of a gate": Case(lambda x, y: y * tf.math.log(1 - tf.sigmoid(x) + 1e-7), "h23 h23", "F"),
    "approximate gelu": Case(lambda h: tf.nn.gelu(h, approximate=True), "h23", "F"),
    "clip_by_value": Case(lambda h: tf.clip_by_value(h, -0.45, 0.45), "h23", "H"),
    "clip_by_norm": Case(lambda h: tf.clip_by_norm(h, 0.5), "h23", "F"),
    "floor division": Case(lambda h: (h + 3.0) // 0.25, "h23", "H"),
    "max_pool2d": Case(lambda h: tf.nn.max_pool2d(h, 2, 2, "VALID"), "h1242", "H"),
    "max_pool_with_argmax": Case(lambda h: tf.nn.max_pool_with_argmax(h, 2, 2, "VALID")[0], "h1242", "F"),
    **{
        f"resize, {method}": Case(lambda h, method=method: tf.image.resize(h, [4, 4], method), "h1222", result)
        for method, result in {
            "nearest": "H",
            "bilinear": "F",
            "bicubic": "F",
            "lanczos3": "F",
            "gaussian": "F",
        }.items()
    },
    "reshapes": Case(lambda h: tf.transpose(tf.squeeze(tf.expand_dims(tf.reshape(h, [3, -1]), 0), 0)), "h23", "H"),
    "slices": Case(lambda h: tf.split(h[:, ::2], 2, 1) + tf.unstack(tf.reverse(h, [0])), "h23", "H H H H"),
    "moments": Case(lambda h: tf.nn.moments(h, [0]), "h43", "F F"),
    "weighted moments": Case(lambda h: tf.nn.weighted_moments(h, [0], tf.ones([4, 3])), "h43", "F F"),
    "softmax cross entropy": Case(
        lambda h, x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x), h), "h23 x23", "F"
    ),
    "softmax cross entropy with labels in half": Case(
        lambda h, x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(h), x), "h23 x23", "F"
    ),
    "sparse softmax cross entropy": Case(
        lambda h: tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1], h), "h23", "F"
    ),
    "embedding": Case(lambda w: tf.nn.embedding_lookup(w, [[0, 2], [1, 1]]), "w32", "F"),
    "inverse": Case(lambda h: tf.linalg.inv(h + tf.eye(2) * 4.0), "h22", "F"),
    "matrix exponential": Case(lambda h: tf.linalg.expm(-h), "h22", "F"),
    "eigenvalues": Case(lambda h: tf.math.real(tf.linalg.eigvals(h + tf.transpose(h))), "h22", "F"),
    "eigenvectors": Case(lambda h: tf.abs(tf.linalg.eig(h + tf.transpose(h))[1]), "h22", "F"),
    "pseudo inverse": Case(lambda h: tf.linalg.pinv(h + 4.0 * tf.eye(2)), "h22", "F"),
    "kronecker product": Case(_kronecker_product, "h22 x22 x41", "H"),
    "operators": Case(_operators, "h22 x22", "H F F F"),
    "cosine transform": Case(lambda h: tf.signal.dct(-h), "h24", "F"),
    "diagonal and trace": Case(lambda h: tf.linalg.diag_part(h) + tf.linalg.trace(h), "h22", "F"),
    "spectrum": Case(lambda h: tf.abs(tf.signal.rfft(h)), "h24", "F"),
    "fake quantization": Case(lambda h: tf.quantization.fake_quant_with_min_max_args(h, -4.0, 4.0, 16), "h24", "F"),
    "crop_and_resize": Case(lambda x, y: tf.image.crop_and_resize(x, tf.abs(y), [0], [2, 2]), "h1331 h14", "F"),
    "boxes": Case(_boxes, "h14", "F"),
}
_CASES = _HALF | _WIDE | _OF_TENSORFLOW

#: Traces take long. In functions, bfloat16 has the cases in which it differs from float16, and a few others.
_TRACED_IN_BFLOAT16 = (
    *("matmul", "conv2d", "attention", "lstm", "lstm block", "exp", "concat of types", "weight", "layer norm"),
    *("reduce_sum", "gates with numbers", "matrix exponential", "pseudo inverse", "half weight", "bfloat16"),
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", _CASES)
def test_results_and_gradients_are_those_of_float32(name: str, dtype: str) -> None:
    case, values = _CASES[name], values_of(_CASES[name])
    results, grads = compute_case(case, tfmp.autocast(dtype), values, *activations(values))
    assert_case(case, dtype, results, grads)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in _CASES), *((name, "bfloat16") for name in _TRACED_IN_BFLOAT16)]
)
def test_results_in_a_function_are_those_of_float32(name: str, dtype: str) -> None:
    case, values = _CASES[name], values_of(_CASES[name])
    # Without AutoGraph, which none of the cases needs, traces take less time.
    compute = tf.function(lambda *each: compute_case(case, tfmp.autocast(dtype), values, *each)[0], autograph=False)
    assert_case(case, dtype, compute(*activations(values)), [])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "xla"])
def test_gradients_within_a_program_are_those_of_float32(jit_compile: bool, dtype: str) -> None:
    names = ["dense", "conv2d", "attention", "layer norm", "batch norm", "activation", "softmax cross entropy"]
    names += ["resize, bilinear", "resize, nearest"]
    cases = [(_CASES[name], values_of(_CASES[name])) for name in names]

    @tf.function(jit_compile=jit_compile)
    def compute(given: list[list[tf.Tensor]]) -> Any:
        scope = tfmp.autocast(dtype)
        return [compute_case(case, scope, values, *each) for each, (case, values) in zip(given, cases, strict=True)]

    for (case, _), found in zip(cases, compute([activations(values) for _, values in cases]), strict=True):
        assert_case(case, dtype, *found)
