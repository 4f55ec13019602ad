"""TensorFlow Probability's layers: distributions as outputs, and distributions of weights."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras2_trainings as trainings
import numpy as np
import pytest
import table
import tensorflow as tf
from keras2_trainings import STEPS, Subject

import tfmp
from benchmarks.legacy_optimizers import load

pytest.importorskip(
    "tensorflow_probability",
    reason="needs tensorflow-probability, which the tox environment works_with_keras2 installs",
)
tfp = load("tensorflow_probability")
keras = trainings.keras_of(tfp.layers.DenseFlipout)

LIBRARY = table.Library(
    name="TensorFlow Probability",
    distribution="tensorflow-probability",
    beside=["keras", "tf_keras", "tensorflow"],
    write='`tfmp.set_precision(model, "O2", keep_float32=["parameters", "output", "variational"])`: the '
    "`DistributionLambda`, the layer before it, and all layers whose weights are distributions",
    limits="`DenseFlipout`, `DenseReparameterization` and `DenseVariational` fail in float16, with any wrapper: they "
    "convert their inputs to the type of their variables, or draw weights in another one. A `DistributionLambda` "
    "computes likelihoods in the type of its parameters: keep it in float32, and name the layers so that you can. "
    "`check_precision` draws weights anew in each run, so what it says of layers behind a distribution of weights is "
    "about other weights.",
)

pytestmark = [pytest.mark.works_with(LIBRARY), pytest.mark.filterwarnings("default")]

_ROWS = 16


def _distribution(parameters: tf.Tensor) -> Any:
    scale = 0.1 + tf.math.softplus(parameters[..., 1:])
    return tfp.distributions.Normal(loc=parameters[..., :1], scale=scale)


def _with_distribution() -> list[Any]:
    return [
        keras.layers.Dense(32, "relu", name="hidden"),
        keras.layers.Dense(2, name="parameters"),
        tfp.layers.DistributionLambda(_distribution, name="output"),
    ]


def _posterior(kernel_size: int, bias_size: int = 0, dtype: Any = None) -> Any:
    size = kernel_size + bias_size

    def around(values: tf.Tensor) -> Any:
        normal = tfp.distributions.Normal(loc=values[..., :size], scale=1e-3 * tf.nn.softplus(values[..., size:]))
        return tfp.distributions.Independent(normal, reinterpreted_batch_ndims=1)

    initializer = keras.initializers.RandomNormal(stddev=0.3, seed=7)
    layers = [tfp.layers.VariableLayer(2 * size, dtype=dtype, initializer=initializer)]
    return keras.Sequential([*layers, tfp.layers.DistributionLambda(around)])


def _prior(kernel_size: int, bias_size: int = 0, dtype: Any = None) -> Any:
    size = kernel_size + bias_size

    def around_zero(_: Any) -> Any:
        normal = tfp.distributions.Normal(loc=tf.zeros([size]), scale=tf.ones([size]))
        return tfp.distributions.Independent(normal, reinterpreted_batch_ndims=1)

    return keras.Sequential([tfp.layers.DistributionLambda(around_zero)])


def _flipout() -> Any:
    # As the documentation has it, the divergence is divided by the number of examples.
    return tfp.layers.DenseFlipout(
        16,
        activation="relu",
        name="variational",
        seed=3,
        kernel_divergence_fn=lambda q, p, _: tfp.distributions.kl_divergence(q, p) / 1000,
    )


def _variational() -> Any:
    return tfp.layers.DenseVariational(16, _posterior, _prior, kl_weight=1e-3, activation="relu", name="variational")


_LAYERS: dict[str, Callable[[], list[Any]]] = {
    "DistributionLambda": _with_distribution,
    "DenseFlipout": lambda: [
        keras.layers.Dense(32, "relu", name="hidden"),
        _flipout(),
        keras.layers.Dense(1, name="parameters"),
    ],
    "DenseVariational": lambda: [
        keras.layers.Dense(32, "relu", name="hidden"),
        _variational(),
        keras.layers.Dense(1, name="parameters"),
    ],
}

_KEEPS = {
    "DistributionLambda": ("parameters", "output"),
    "DenseFlipout": ("parameters", "variational"),
    "DenseVariational": ("parameters", "variational"),
}


def _likelihood(labels: tf.Tensor, distribution: Any) -> tf.Tensor:
    return -distribution.log_prob(labels)


@functools.cache
def _subject_of(model: str) -> Callable[[], Subject]:
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(8, 1)).astype(np.float32)
    inputs = rng.normal(size=(4, _ROWS, 8)).astype(np.float32)
    four = [(tf.constant(x), tf.constant(x @ kernel)) for x in inputs]
    loss = _likelihood if model == "DistributionLambda" else "mse"

    def make() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input([8]), *_LAYERS[model]()])

    def of_loop(of: Any, batch: Any) -> tf.Tensor:
        x, y = batch
        outputs = of(x, training=True)
        each = _likelihood(y, outputs) if model == "DistributionLambda" else (outputs - y) ** 2
        return tf.add_n([tf.reduce_mean(each), *of.losses])

    return lambda: Subject(
        keras,
        make,
        lambda: keras.optimizers.Adam(1e-2),
        [four[index % 4] for index in range(STEPS)],
        of_loop,
        {"loss": loss},
        _KEEPS[model],
    )


every_model = pytest.mark.parametrize("model", _LAYERS)


@pytest.mark.feature("float32's curve")
@every_model
def test_float16_trains_on_the_curve_of_float32(model: str) -> None:
    """The layers with distributions of weights draw the same numbers in both, as they stay in float32."""
    subject_of = _subject_of(model)
    expected, found = (trainings.losses(subject_of, *of) for of in (("O0", "none"), ("O2", "tfmp")))
    assert trainings.farthest(found, expected) < 2e-3
    assert np.mean(expected[-4:]) < 0.9 * np.mean(expected[:4])


@pytest.mark.feature("Keras' wrapper")
@every_model
def test_losses_are_those_of_keras_own_wrapper(model: str) -> None:
    subject_of = _subject_of(model)
    found, expected = (trainings.losses(subject_of, "O2", wrapper) for wrapper in ("tfmp", "Keras"))
    assert trainings.farthest(found, expected) == 0


@pytest.mark.feature("overflow")
@every_model
def test_overflow_changes_nothing_but_the_scale(model: str) -> None:
    trainings.assert_skips_an_overflow(_subject_of(model)())


@pytest.mark.feature("O1, O2")
@every_model
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_levels_compute_in_float16_and_learn(model: str, level: str) -> None:
    subject = _subject_of(model)()
    trained = subject.at(level)
    assert trainings.computing_in(keras, trained, "float16") == {"hidden"}
    losses = trainings.fit(subject, trained, trainings.scaled(subject.optimizer()))
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])


@pytest.mark.feature("O1, O2")
@pytest.mark.parametrize("model", ["DenseFlipout", "DenseVariational"])
def test_distributions_of_weights_fail_in_float16_by_themselves(model: str) -> None:
    """If this fails, the library has mended them, and they need not be kept in float32 any more."""
    made = _subject_of(model)().make()
    tfmp.set_precision(made, "O2")
    with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError), match=r"variational|dtype|type"):
        made(tf.ones([2, 8]))


@pytest.mark.feature("check", "DistributionLambda")
def test_check_finishes_and_what_it_suggests_trains() -> None:
    subject = _subject_of("DistributionLambda")()
    checked = subject.at("O2")
    report = tfmp.check_precision(checked, _likelihood, subject.batches[:2], progress=False)
    assert (report.keep_float32, report.far_off, report.float16_error) == ([], [], None)
    assert report.float16_loss == pytest.approx(report.loss, rel=0.01)
    manager = tfmp.ExponentialUpdateLossScaleManager(report.suggested_loss_scale, 2000)
    found = trainings.fit(subject, checked, tfmp.LossScaleOptimizer(subject.optimizer(), manager))
    assert trainings.farthest(found, trainings.losses(_subject_of("DistributionLambda"), "O0", "none")) < 0.02


@pytest.mark.feature("recompute", "DistributionLambda")
def test_layer_before_the_distribution_is_recomputed_with_the_same_gradients() -> None:
    subject = _subject_of("DistributionLambda")()
    found = []
    for recomputes in (False, True):
        made = subject.make()
        made = tfmp.recompute_layers(made, "hidden") if recomputes else made
        with tf.GradientTape() as tape:
            loss = subject.loss(made, subject.batches[0])
        found.append([each.numpy() for each in tape.gradient(loss, made.trainable_variables)])
    trainings.assert_equal(*found)


@pytest.mark.feature("resume", "DistributionLambda")
def test_checkpoint_goes_on_in_every_bit(tmp_path: Path) -> None:
    trainings.assert_resumes(_subject_of("DistributionLambda")(), tmp_path)
