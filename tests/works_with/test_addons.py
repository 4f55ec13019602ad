"""TensorFlow Addons: its layers, losses, callbacks and optimizers in models that compute in float16."""

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
    "tensorflow_addons", reason="needs tensorflow-addons, which the tox environment works_with_keras2 installs"
)
tfa = load("tensorflow_addons")
keras = trainings.keras_of(tfa.layers.Maxout)

LIBRARY = table.Library(
    name="TensorFlow Addons",
    distribution="tensorflow-addons",
    beside=["keras", "tf_keras", "tensorflow"],
    write='`tfmp.set_precision(model, "O2")`, then `model.compile(tfmp.LossScaleOptimizer(tfa.optimizers.LAMB()))`, '
    "with tfmp's wrapper outside of those of Addons",
    limits="`WeightNormalization` and `Sparsemax` fail in float16, with any wrapper: name them in `keep_float32`. "
    "`SpectralNormalization` changes its kernel in the forward pass, also in a step that is skipped. A "
    "model with `Snake` cannot be saved by `tf.train.Checkpoint`. The callback `AverageModelCheckpoint` "
    "accepts only Addons' own optimizers, no wrapper around one: save the averages by "
    "`opt.inner_optimizer.assign_average_vars`. [All optimizers](legacy_optimizers.md) have a table of their own.",
)

pytestmark = [pytest.mark.works_with(LIBRARY), pytest.mark.filterwarnings("default")]

_ROWS, _LENGTH, _CLASSES = 16, 6, 4


def _dense() -> list[Any]:
    layers = tfa.layers
    return [
        keras.layers.Dense(16, name="first"),
        layers.GELU(),
        keras.layers.Dense(16, name="hidden"),
        layers.Maxout(8),
        layers.TLU(),
        keras.layers.Dense(_CLASSES, name="logits"),
    ]


def _attention(rows: Any) -> Any:
    attended = tfa.layers.MultiHeadAttention(head_size=8, num_heads=2, name="attention")([rows, rows])
    together = tfa.layers.StochasticDepth(1.0, name="depth")([rows, keras.layers.Dense(8, name="back")(attended)])
    normalized = tfa.layers.GroupNormalization(4, name="groups")(together)
    return keras.layers.Dense(_CLASSES, name="logits")(keras.layers.GlobalAveragePooling1D()(normalized))


def _make(model: str) -> Any:
    keras.utils.set_random_seed(1)
    if model == "dense":
        return keras.Sequential([keras.Input([8]), *_dense()])
    rows = keras.Input([_LENGTH, 8])
    return keras.Model(rows, _attention(rows))


#: By their models: an optimizer, and a loss that the model ends in.
_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "dense": lambda: tfa.optimizers.LAMB(1e-2),
    "attention": lambda: tfa.optimizers.Lookahead(tfa.optimizers.RectifiedAdam(1e-2), 3),
}
_KEEPS = ("logits",)


@functools.cache
def _subject_of(model: str) -> Callable[[], Subject]:
    rng = np.random.default_rng(0)

    def batch() -> tuple[tf.Tensor, tf.Tensor]:
        x = rng.normal(size=(_ROWS, 8) if model == "dense" else (_ROWS, _LENGTH, 8))
        labels = np.argmax(x[:, :_CLASSES] if model == "dense" else x.mean(axis=1)[:, :_CLASSES], axis=-1)
        return tf.constant(x, tf.float32), tf.one_hot(labels, _CLASSES)

    four = [batch() for _ in range(4)]
    focal = tfa.losses.SigmoidFocalCrossEntropy(from_logits=True, reduction="sum_over_batch_size")
    return lambda: Subject(
        keras,
        lambda: _make(model),
        _OPTIMIZERS[model],
        [four[index % 4] for index in range(STEPS)],
        lambda of, taken: focal(taken[1], of(taken[0], training=True)),
        {"loss": focal},
        _KEEPS,
    )


every_model = pytest.mark.parametrize("model", _OPTIMIZERS)


@pytest.mark.feature("float32's curve")
@every_model
def test_float16_trains_on_the_curve_of_float32(model: str) -> None:
    subject_of = _subject_of(model)
    expected, found = (trainings.losses(subject_of, *of) for of in (("O0", "none"), ("O2", "tfmp")))
    assert trainings.farthest(found, expected) < 1e-3
    assert np.mean(expected[-4:]) < 0.98 * np.mean(expected[:4])


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
    assert trainings.computing_in(keras, trained, "float32") == {"logits"}
    losses = trainings.fit(
        subject._replace(batches=subject.batches[:1] * 8), trained, trainings.scaled(subject.optimizer())
    )
    assert losses[-1] < losses[0]


@pytest.mark.feature("O1, O2", "dense")
@pytest.mark.parametrize("layer", ["WeightNormalization", "Sparsemax"])
def test_layers_that_fail_in_float16_work_if_they_are_kept(layer: str) -> None:
    """If this fails at its first assertion, the library has mended the layer, and it need not be kept any more."""
    makes = {
        "WeightNormalization": lambda: tfa.layers.WeightNormalization(keras.layers.Dense(4), name="kept"),
        "Sparsemax": lambda: tfa.layers.Sparsemax(name="kept"),
    }

    def output(**kwargs: Any) -> tf.Tensor:
        model = keras.Sequential([keras.Input([8]), makes[layer]()])
        tfmp.set_precision(model, "O2", **kwargs)
        return model(tf.ones([2, 8]))

    with pytest.raises((ValueError, tf.errors.NotFoundError, tf.errors.InvalidArgumentError)):
        output()
    assert bool(tf.reduce_all(tf.math.is_finite(output(keep_float32=["kept"]))))


@pytest.mark.feature("check")
@every_model
def test_check_finishes_and_what_it_suggests_trains(model: str) -> None:
    subject = _subject_of(model)()
    checked = subject.at("O2")
    report = tfmp.check_precision(checked, subject.compile_with["loss"], subject.batches[:2], progress=False)
    assert (report.keep_float32, report.float16_error) == ([], None)
    opt = tfmp.LossScaleOptimizer(subject.optimizer(), initial_scale=report.suggested_loss_scale)
    losses = trainings.fit(subject, checked, opt)
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


@pytest.mark.feature("recompute", "attention")
def test_layers_are_recomputed_with_the_same_gradients() -> None:
    subject = _subject_of("attention")()
    plain = subject.make()
    recomputed = tfmp.recompute_layers(plain, "attention|groups")
    found = []
    for made in (plain, recomputed):
        with tf.GradientTape() as tape:
            loss = subject.loss(made, subject.batches[0])
        found.append([each.numpy() for each in tape.gradient(loss, plain.trainable_variables)])
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.feature("resume")
@every_model
def test_checkpoint_goes_on_in_every_bit(model: str, tmp_path: Path) -> None:
    trainings.assert_resumes(_subject_of(model)(), tmp_path)


@pytest.mark.feature("callbacks", "attention")
def test_callbacks_of_tfmp_go_with_those_of_the_library(tmp_path: Path) -> None:
    subject = _subject_of("attention")()
    x, y = (tf.concat(each, 0).numpy() for each in zip(*subject.batches[:4], strict=True))
    model = subject.at("O2")
    model.compile(trainings.scaled(subject.optimizer()), **subject.compile_with)
    theirs = [tfa.callbacks.TQDMProgressBar(), tfa.callbacks.TimeStopping(300)]
    history = model.fit(
        x, y, batch_size=_ROWS, epochs=2, verbose=0, callbacks=[*theirs, tfmp.LossScaleCallback()]
    ).history
    assert (history["loss_scale"], history["skipped_steps"]) == ([trainings.SCALE] * 2, [0, 0])
    averaging = tfa.callbacks.AverageModelCheckpoint(True, str(tmp_path / "weights"), save_weights_only=True)
    model.compile(trainings.scaled(tfa.optimizers.MovingAverage(keras.optimizers.legacy.SGD(0.01))), "mse")
    with pytest.raises(TypeError, match="MovingAverage or StochasticAverage"):
        model.fit(x, y, verbose=0, callbacks=[averaging])
