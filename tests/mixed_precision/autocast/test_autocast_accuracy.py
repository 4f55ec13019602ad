"""A transformer block, and losses that are written by hand, have the gradients of float32 and train as it does.

The code names no types. At the ends of nets, nothing overflows for ever.
"""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from autocast_ways import Way, eager
from kerases import for_every_keras

import tfmp

_PLAIN = contextlib.nullcontext()
_WAYS: dict[str, Way] = {
    "eager": eager,
    "function": tf.function,
    "xla": lambda function: tf.function(function, jit_compile=True),
}

_WIDTH, _HEADS, _LENGTH, _WORDS, _SENTENCES = 8, 2, 4, 6, 2

#: Of a gradient's norm. bfloat16 has three bits less than float16.
_TOLERANCES = {"float16": 3e-3, "bfloat16": 2.4e-2}


class _Transformer(tf.Module):
    """One block between an embedding and logits, in raw TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)

        def weight(*shape: int) -> tf.Variable:
            return tf.Variable(random.normal(size=shape, scale=shape[0] ** -0.5), dtype=tf.float32)

        self.table = weight(_WORDS, _WIDTH)
        self.positions = weight(_LENGTH, _WIDTH)
        self.projections = weight(_WIDTH, 3 * _WIDTH)
        self.projections_bias = weight(3 * _WIDTH)
        self.output = weight(_WIDTH, _WIDTH)
        self.inner = weight(_WIDTH, 2 * _WIDTH)
        self.inner_bias = weight(2 * _WIDTH)
        self.outer = weight(2 * _WIDTH, _WIDTH)
        self.norms = [(tf.Variable(tf.ones([_WIDTH])), tf.Variable(tf.zeros([_WIDTH]))) for _ in range(2)]
        self.logits = weight(_WIDTH, _WORDS)

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        x = tf.gather(self.table, ids) + self.positions
        x = _normalized(x + self._attention(x), *self.norms[0])
        x = _normalized(x + tf.nn.gelu(x @ self.inner + self.inner_bias) @ self.outer, *self.norms[1])
        return x @ self.logits

    def loss(self, ids: tf.Tensor) -> tf.Tensor:
        labels = tf.roll(ids, -1, axis=1)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self(ids)))

    def _attention(self, x: tf.Tensor) -> tf.Tensor:
        heads = tf.reshape(x @ self.projections + self.projections_bias, [_SENTENCES, _LENGTH, 3, _HEADS, -1])
        q, k, v = tf.unstack(tf.transpose(heads, [2, 0, 3, 1, 4]))
        scores = tf.matmul(q, k, transpose_b=True) / (_WIDTH // _HEADS) ** 0.5
        mask = tf.linalg.band_part(tf.ones([_LENGTH, _LENGTH]), -1, 0)
        mixed = tf.einsum("bhij,bhjd->bihd", tf.nn.softmax(scores - 1e4 * (1 - mask)), v)
        return tf.reshape(mixed, [_SENTENCES, _LENGTH, _WIDTH]) @ self.output


def _normalized(x: tf.Tensor, scale: tf.Variable, offset: tf.Variable) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-5)


def _ids() -> tf.Tensor:
    return tf.constant([[0, 1, 2, 3], [5, 4, 3, 2]])


def _step_of_transformer(model: _Transformer, scope: Any, within: Any = _PLAIN) -> Any:
    """Return the loss and its gradients, as dense tensors."""
    with within, tf.GradientTape() as tape:
        with scope:
            loss = model.loss(_ids())
        return loss, [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, model.trainable_variables)]


def _relative_error(grads: list[Any], expected: list[Any]) -> float:
    flat, known = (np.concatenate([np.ravel(grad) for grad in each]) for each in (grads, expected))
    return float(np.linalg.norm(flat - known) / np.linalg.norm(known))


@pytest.mark.parametrize("dtype", list(_TOLERANCES))
@pytest.mark.parametrize("way", list(_WAYS))
def test_gradients_of_a_transformer_are_those_of_float32(way: str, dtype: str) -> None:
    model = _Transformer()
    expected_loss, expected = _step_of_transformer(model, _PLAIN)
    loss, grads = _WAYS[way](lambda: _step_of_transformer(model, tfmp.autocast(dtype)))()
    assert {grad.dtype for grad in grads} == {loss.dtype} == {tf.float32}
    assert float(loss) == pytest.approx(float(expected_loss), rel=_TOLERANCES[dtype])
    assert 0 < _relative_error(grads, expected) < _TOLERANCES[dtype]
    for grad, known in zip(grads, expected, strict=True):
        # The gradient of the bias of keys is zero but for rounding: it is compared with the others, above.
        assert np.linalg.norm(known) < 1e-4 or _relative_error([grad], [known]) < 1.5 * _TOLERANCES[dtype]
    if way == "eager":
        _, within = _step_of_transformer(model, tfmp.autocast(dtype), within=tfmp.autocast("bfloat16"))
        assert _relative_error(within, grads) == 0


@pytest.mark.parametrize("way", ["eager", "function"])
def test_recipe_of_torch_trains_a_transformer_as_float32_does(way: str) -> None:
    def trained(way: Way, scope: Any, scaler: tfmp.GradScaler) -> tuple[list[Any], list[float]]:
        model, optimizer = _Transformer(), tf.compat.v1.train.GradientDescentOptimizer(0.2)
        variables = list(model.trainable_variables)

        @way
        def step(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with scope:
                    loss = model.loss(ids)
                scaled = scaler.scale(loss)
            grads = scaler.unscale(optimizer, tape.gradient(scaled, variables))
            grads, _ = tfmp.clip_by_global_norm(grads, 5.0)
            scaler.step(optimizer, list(zip(grads, variables, strict=True)))
            scaler.update()
            return loss

        return variables, [float(step(_ids())) for _ in range(10)]

    scaler = tfmp.GradScaler(init_scale=2.0**10)
    variables, losses = trained(_WAYS[way], tfmp.autocast(), scaler)
    known, expected = trained(tf.function, _PLAIN, tfmp.GradScaler(enabled=False))
    assert losses[-1] == pytest.approx(expected[-1], rel=2e-2)
    assert losses[-1] < 1.5 < losses[0]
    assert float(scaler.loss_scale) == 2**10
    assert {variable.dtype for variable in variables} == {tf.float32}
    assert 0 < _relative_error(variables, known) < 1e-2


_BATCH, _CLASSES, _STEPS = 16, 4, 25
_EPSILON = 1e-7

_Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def _log(p: Any) -> tf.Tensor:
    return tf.math.log(p + _EPSILON)


def _clipped(p: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(p, _EPSILON, 1 - _EPSILON)


def _softmax_by_hand(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    shifted = tf.exp(z - tf.reduce_max(z, 1, keepdims=True))
    p = shifted / tf.reduce_sum(shifted, 1, keepdims=True)
    return -_log(tf.reduce_sum(p * y, 1))


def _binary_focal(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    p = tf.sigmoid(z)
    p_true = y * p + (1 - y) * (1 - p)
    return -((1 - p_true) ** 2) * tf.math.log(tf.maximum(p_true, _EPSILON))


def _contrastive(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    unit = tf.nn.l2_normalize(z, 1)
    similarity = tf.matmul(unit, unit, transpose_b=True) / 0.05
    positive = tf.reduce_logsumexp(similarity + _log(tf.matmul(y, y, transpose_b=True)), 1)
    return tf.reduce_logsumexp(similarity, 1) - positive


def _gaussian(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    deviation = tf.nn.softplus(z[:, 2:] / 8) + 0.3
    return tf.math.log(deviation) + 0.5 * tf.square((y[:, :2] - z[:, :2] / 8) / deviation)


def _ctc(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    frames = tf.reshape(z, [4, _BATCH // 4, _CLASSES])
    labels = tf.reshape(tf.argmax(y[: _BATCH // 2, 1:], 1, tf.int32) + 1, [4, 2])
    return tf.nn.ctc_loss(labels, frames, [1] * 4, [4] * 4, blank_index=0)


#: Losses of logits and labels, whose mean is taken.
_LOSSES: dict[str, _Loss] = {
    "cross_entropy": lambda z, y: -tf.reduce_sum(y * _log(tf.nn.softmax(z)), 1),
    "cross_entropy_of_clipped": lambda z, y: -tf.reduce_sum(y * tf.math.log(_clipped(tf.nn.softmax(z))), 1),
    "softmax_by_hand": _softmax_by_hand,
    "kl": lambda z, y: tf.reduce_sum((0.9 * y + 0.025) * (_log(0.9 * y + 0.025) - _log(tf.nn.softmax(z))), 1),
    "focal": lambda z, y: -tf.reduce_sum(y * (1 - tf.nn.softmax(z)) ** 2 * _log(tf.nn.softmax(z)), 1),
    "entropy_penalty": lambda z, y: (
        tf.nn.softmax_cross_entropy_with_logits(y, z)
        + 0.1 * tf.reduce_sum(tf.nn.softmax(z) * _log(tf.nn.softmax(z)), 1)
    ),
    "binary_cross_entropy": lambda z, y: -(y * _log(tf.sigmoid(z)) + (1 - y) * _log(1 - tf.sigmoid(z))),
    "binary_cross_entropy_of_clipped": lambda z, y: (
        -tf.where(y > 0, tf.math.log(_clipped(tf.sigmoid(z))), tf.math.log1p(-_clipped(tf.sigmoid(z))))
    ),
    "binary_focal": _binary_focal,
    "dice": lambda z, y: (
        -tf.math.log((2 * tf.reduce_sum(tf.sigmoid(z) * y) + 1e-5) / (tf.reduce_sum(tf.sigmoid(z) + y) + 1e-5))
    ),
    "log_density_of_tanh": lambda z, y: (tf.tanh(z) - (2 * y - 1)) ** 2 - 0.01 * _log(1 - tf.tanh(z) ** 2),
    "softplus_hinge": lambda z, y: tf.nn.softplus(1 - (2 * y - 1) * z),
    "log_cosh": lambda z, y: z - y + tf.nn.softplus(-2 * (z - y)) + tf.math.log(tf.cosh(z - y)),
    "huber": lambda z, y: tf.where(tf.abs(z - y) < 1, 0.5 * tf.square(tf.abs(z - y)), tf.abs(z - y) - 0.5),
    "charbonnier": lambda z, y: tf.sqrt((z - y) ** 2 + 1e-12),
    "cosine": lambda z, y: 1 - tf.reduce_sum(z * y, 1) / (tf.norm(z, axis=1) * tf.norm(y, axis=1) + _EPSILON),
    "contrastive": _contrastive,
    "poisson": lambda z, y: tf.exp(z / 8) - 3 * y * _log(tf.exp(z / 8)),
    "gaussian": _gaussian,
    "ctc": _ctc,
}

_V1 = tf.compat.v1.losses
_OF_TENSORFLOW_1: dict[str, _Loss] = {
    "absolute_difference": lambda z, y: _V1.absolute_difference(y, z),
    "cosine_distance": lambda z, y: _V1.cosine_distance(y, z, axis=1),
    "hinge_loss": lambda z, y: _V1.hinge_loss(y, z),
    "huber_loss": lambda z, y: _V1.huber_loss(y, z),
    "log_loss": lambda z, y: _V1.log_loss(y, tf.sigmoid(z)),
    "mean_pairwise_squared_error": lambda z, y: _V1.mean_pairwise_squared_error(y, z),
    "mean_squared_error": lambda z, y: _V1.mean_squared_error(y, z),
    "sigmoid_cross_entropy": lambda z, y: _V1.sigmoid_cross_entropy(y, z),
    "softmax_cross_entropy": lambda z, y: _V1.softmax_cross_entropy(y, z),
    "sparse_softmax_cross_entropy": lambda z, y: _V1.sparse_softmax_cross_entropy(tf.argmax(y, 1), z),
}


def test_all_losses_of_tensorflow_1_are_in_the_table() -> None:
    named = {name for name in dir(_V1) if name.islower() and not name.startswith(("get_", "_"))}
    assert named - {"add_loss", "compute_weighted_loss"} == set(_OF_TENSORFLOW_1)


def _problem(saturation: float = 1.0) -> tuple[tf.Tensor, tf.Tensor, list[tf.Variable]]:
    """Return inputs, labels, and the weights of a net whose wrong answers are sure of themselves."""
    random = np.random.default_rng(5)
    x = np.float32(random.normal(size=[_BATCH, 6]))
    y = np.eye(_CLASSES, dtype=np.float32)[np.argmax(x[:, :_CLASSES], 1)]
    w, u = np.float32(random.normal(size=[6, 8])), np.float32(random.normal(size=[8, _CLASSES]))
    return tf.constant(x), tf.constant(y), [tf.Variable(w), tf.Variable(saturation * u), tf.Variable(y[0] * 0)]


def _gradients(
    compute: _Loss, scope: Any, x: tf.Tensor, y: tf.Tensor, weights: Any, scale: float = 2.0**6
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the loss of a net, and its gradients, which are those of the scaled loss over the scale."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        with scope:
            loss = tf.reduce_mean(compute(tf.nn.elu(x @ weights[0]) @ weights[1] + weights[2], y))
        scaled = loss * scale
    return loss, [grad / scale for grad in tape.gradient(scaled, weights)]


def _assert_near(grads: list[tf.Tensor], known: list[tf.Tensor]) -> None:
    for grad, expected in zip(grads, known, strict=True):
        assert np.linalg.norm(grad - expected) < 3e-2 * np.linalg.norm(expected) + 1e-4


@pytest.mark.parametrize("name", [*_LOSSES, *_OF_TENSORFLOW_1])
def test_gradients_where_the_net_is_sure_and_wrong_are_those_of_float32(name: str) -> None:
    compute, problem = (_LOSSES | _OF_TENSORFLOW_1)[name], _problem(saturation=3.0)
    loss, grads = _gradients(compute, tfmp.autocast(), *problem)
    known_loss, known = _gradients(compute, _PLAIN, *problem)
    assert loss.dtype == tf.float32
    assert float(loss) == pytest.approx(float(known_loss), rel=1e-2, abs=1e-3)
    _assert_near([tf.concat([tf.reshape(each, [-1]) for each in grads], 0)], [np.concatenate([*map(np.ravel, known)])])


def test_gradients_within_xla_are_those_of_float32() -> None:
    x, y, weights = _problem(saturation=3.0)
    names = ["cross_entropy", "kl", "focal", "binary_cross_entropy", "log_density_of_tanh", "contrastive"]

    @tf.function(jit_compile=True, autograph=False)
    def compute(x: tf.Tensor, y: tf.Tensor, weights: list[tf.Tensor]) -> Any:
        return [_gradients(_LOSSES[name], tfmp.autocast(), x, y, weights)[1] for name in names]

    for name, grads in zip(names, compute(x, y, [tf.convert_to_tensor(each) for each in weights]), strict=True):
        _assert_near(grads, _gradients(_LOSSES[name], _PLAIN, x, y, weights)[1])


@pytest.mark.parametrize(("name", "dtype"), [(name, "float16") for name in _LOSSES] + [("ctc", "bfloat16")])
def test_loss_trains_as_in_float32(name: str, dtype: str) -> None:
    def trained(scope: Any, scaler: tfmp.GradScaler) -> list[float]:
        x, y, weights = _problem()
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.05)

        @tf.function(autograph=False)
        def step() -> tf.Tensor:
            scale = scaler.scale(tf.constant(1.0))
            loss, grads = _gradients(_LOSSES[name], scope, x, y, weights, scale)
            scaler.step(optimizer, [(grad * scale, weight) for grad, weight in zip(grads, weights, strict=True)])
            scaler.update()
            return loss

        return [float(step()) for _ in range(_STEPS)]

    scaler = tfmp.GradScaler(init_scale=2.0**8)
    losses = trained(tfmp.autocast(dtype), scaler)
    expected = trained(_PLAIN, tfmp.GradScaler(enabled=False))
    assert losses[-1] == pytest.approx(expected[-1], rel=3e-2 if dtype == "float16" else 0.1, abs=2e-3)
    assert losses[-1] < losses[0]
    assert (int(scaler.skipped_steps), float(scaler.loss_scale)) == (0, 2**8)


_OF_KERAS: dict[str, Callable[..., Any]] = {
    "categorical": lambda keras, z, y: keras.losses.CategoricalCrossentropy()(y, tf.nn.softmax(z)),
    "sparse": lambda keras, z, y: keras.losses.SparseCategoricalCrossentropy()(tf.argmax(y, 1), tf.nn.softmax(z)),
    "binary": lambda keras, z, y: keras.losses.BinaryCrossentropy()(y, tf.sigmoid(z)),
    "binary focal": lambda keras, z, y: keras.losses.BinaryFocalCrossentropy()(y, tf.sigmoid(z)),
    "kl": lambda keras, z, y: keras.losses.KLDivergence()(y, tf.nn.softmax(z)),
    "poisson": lambda keras, z, y: keras.losses.Poisson()(y, tf.nn.softplus(z)),
    "log cosh": lambda keras, z, y: keras.losses.LogCosh()(y, z),
    "cosine": lambda keras, z, y: keras.losses.CosineSimilarity()(y, z),
    "huber": lambda keras, z, y: keras.losses.Huber()(y, z),
    "layer of probabilities": lambda keras, z, y: keras.losses.CategoricalCrossentropy()(
        y, keras.layers.Activation("softmax")(z)
    ),
    "layer of gates": lambda keras, z, y: keras.losses.BinaryCrossentropy()(y, keras.layers.Activation("sigmoid")(z)),
}


@for_every_keras()
@pytest.mark.parametrize("name", list(_OF_KERAS))
def test_losses_of_keras_on_probabilities_have_finite_gradients(keras: ModuleType, name: str) -> None:
    def compute(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.cast(_OF_KERAS[name](keras, z, y), tf.float32)

    problem = _problem(saturation=3.0)
    found, known = (_gradients(compute, scope, *problem, 1.0) for scope in (tfmp.autocast(), _PLAIN))
    _assert_near(found[1], known[1])
