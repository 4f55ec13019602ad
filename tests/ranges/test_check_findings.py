"""What check_precision finds in models of every Keras: rows of a model, a batch and what it finds."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from checked_models import check, data, dense_model, overflowing_within, with_given_weights
from kerases import composed, for_every_keras

import tfmp


def _as_float32(labels: Any, outputs: Any) -> Any:
    """A loss whose gradient for the outputs is the labels."""
    return tf.cast(labels, tf.float32) * tf.cast(outputs, tf.float32)


def _of_first_output(labels: Any, outputs: Any) -> Any:
    return (tf.cast(outputs[0], tf.float32) - labels) ** 2


class Finding(NamedTuple):
    """A model and a batch, and what is found; each expected reason is a part of the one in the report."""

    make: Callable[[ModuleType], Any]
    x: Any = 1.0
    y: Any = 1.0
    keep: Mapping[str, str] = {}
    far_off: Mapping[str, str] = {}
    scale: float | None = None
    loss: Any = _as_float32
    tolerance: float = 0.3


def _called(model: Any, x: Any) -> Any:
    model(x)
    return model


def _sequential(*makers: Callable[[ModuleType], Any]) -> Callable[[ModuleType], Any]:
    return lambda keras: keras.Sequential([keras.Input([1]), *(make(keras) for make in makers)])


def _ones(name: str) -> Callable[[ModuleType], Any]:
    return lambda keras: keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)


def _times(factor: float, name: str = "huge") -> Callable[[ModuleType], Any]:
    return lambda keras: keras.layers.Rescaling(factor, name=name)


def _huge(factor: float) -> Callable[[ModuleType], Any]:
    return _sequential(_ones("first"), _times(factor))


def _overflowing(name: str) -> Callable[[ModuleType], Any]:
    return lambda keras: overflowing_within(keras, name)


def _block_that_overflows(keras: ModuleType) -> Any:
    parts = {"first": _ones("first")(keras), "inner": overflowing_within(keras, "inner")}
    return composed(keras, lambda self, x: self.inner(self.first(x)) * 2, settings={"name": "block"}, **parts)


def _overflowing_between_layers(*factors: float) -> Callable[[ModuleType], Any]:
    def call(self: Any, x: tf.Tensor) -> tf.Tensor:
        hidden = self.first(x)
        for factor in factors:
            hidden = hidden * factor
        return self.last(self.second(hidden) * 2**-10)

    def make(keras: ModuleType) -> Any:
        parts = {name: _ones(name)(keras) for name in ("first", "second", "last")}
        return _called(composed(keras, call, "Model", **parts), np.ones([2, 1], np.float32))

    return make


def _of_float32_constants(keras: ModuleType) -> Any:
    return composed(keras, lambda _, x: x * tf.constant([2.0]), settings={"name": "only"})


def _handing_on_biases(keras: ModuleType) -> Any:
    """As T5 hands on the biases of attention, in which masked positions are -1e9."""
    biases = composed(keras, lambda _, x: tf.cast(x, tf.float32) - 1e9, settings={"name": "biases"})
    parts = {"dense": keras.layers.Dense(4, name="dense"), "biases": biases}
    block = composed(keras, lambda self, x: (self.dense(x), self.biases(x)), settings={"name": "block"}, **parts)
    inputs = keras.Input([4])
    first, others = block(inputs)
    return with_given_weights(keras.Model(inputs, [keras.layers.Dense(1, name="head")(first), others]))


def _large(keras: ModuleType, units: int = 4) -> Any:
    return keras.layers.Dense(units, name="large", kernel_initializer=keras.initializers.Constant(1e5))


def _combining_types(base: str) -> Callable[[ModuleType], Any]:
    """Make a model with a block that adds what a layer with large values returns to what it takes, in raw code."""

    def make(keras: ModuleType) -> Any:
        def combined(self: Any, x: tf.Tensor) -> tf.Tensor:
            return (x + self.large(x)) * 1e-6

        parts = {
            "block": composed(keras, combined, base, {"name": "block"}, large=_large(keras)),
            "head": keras.layers.Dense(1, name="head"),
        }
        return _called(composed(keras, lambda self, x: self.head(self.block(x)), "Model", **parts), data()[0])

    return make


def _with_a_small_gradient(keras: ModuleType) -> Any:
    inputs = [keras.Input([1]), keras.Input([1])]
    return keras.Model(inputs, [_ones(n)(keras)(each) for n, each in zip(("large", "small"), inputs, strict=True)])


def _loss_with_a_small_gradient(exponent: int) -> Callable[[Any, Any], Any]:
    def loss(labels: Any, outputs: Any) -> Any:
        large, small = (tf.cast(each, tf.float32) for each in outputs)
        return labels * (large * 8 + small * 2.0**exponent)

    return loss


def _classifier(gap: float) -> Callable[[ModuleType], Any]:
    """Make a model that returns a softmax of logits of which one exceeds the others by `gap`."""

    def make(keras: ModuleType) -> Any:
        layers = [keras.layers.Dense(4, "relu", name="hidden"), keras.layers.Dense(3, "softmax", name="probabilities")]
        model = keras.Sequential([keras.Input([4]), *layers])
        kernel = np.zeros([4, 3], np.float32)
        kernel[0, 0], kernel[1] = gap, [0.1, 0.2, -0.3]
        model.set_weights([np.eye(4), np.zeros(4), kernel, np.zeros(3)])
        return model

    return make


def _cross_entropy(labels: Any, probabilities: Any) -> Any:
    """A loss whose gradient for a probability p is 1 / p."""
    found = tf.gather(tf.cast(probabilities, tf.float32), labels, batch_dims=1)
    return -tf.math.log(tf.clip_by_value(found, 1e-12, 1))


_FOUR_INPUTS = np.float32(np.stack([np.ones(8), np.linspace(0.5, 1, 8), np.ones(8), np.ones(8)], axis=1))
_LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1])
_WITHIN = "in float16 it returns infinities or NaN for finite inputs"
_BETWEEN = (
    "what it takes is infinite or NaN in float16, though no layer returned that: compute in float32, too, what the "
    "model computes between the layers before it and this one"
)
_ROUNDED = "by the rounding of float16 here or in the layers behind it"
_TWO_TYPES = {"large": "reach", "block": "it combines what large returns in float32 with float16"}

_FINDINGS = {
    "large activations": Finding(
        _sequential(_ones("first"), _times(1e5), _times(2**-17, "next"), _ones("last")),
        keep={
            "huge": "its activations reach 1e+05, and float16 ends at 65504",
            "next": "its input reaches 1e+05, and float16 ends at 65504",
        },
    ),
    "large output": Finding(_huge(1e5), y=2**-10, keep={"huge": "its activations reach 1e+05"}),
    "large weights": Finding(
        _sequential(lambda keras: _large(keras, 1), _ones("last")),
        1e-3,
        keep={"large": "its weights reach 1e+05, and float16 ends at 65504"},
    ),
    "activations before weights": Finding(
        _sequential(lambda keras: _large(keras, 1)), 1e6, 2**-30, {"large": "its activations reach 1e+11"}
    ),
    "rounds to 65504": Finding(_huge(65519.0), y=2**-12),
    "rounds to infinity": Finding(_huge(65520.0), y=2**-12, keep={"huge": "its activations reach 6.55e+04"}),
    "overflow within layers": Finding(
        _sequential(_ones("first"), _overflowing("one"), _times(0.5, "half"), _overflowing("two")),
        2.0,
        keep={"one": _WITHIN, "two": _WITHIN},
    ),
    "overflow within an inner layer": Finding(_sequential(_block_that_overflows), keep={"inner": _WITHIN}),
    # 90000 passes float16's limit in float32 already; 300 * 300 / 300 only on the way.
    "overflow between layers": Finding(
        _overflowing_between_layers(1e5), keep={"second": _BETWEEN}, far_off={"first": "", "second": "", "last": ""}
    ),
    "overflow on the way between layers": Finding(
        _overflowing_between_layers(300.0, 300.0, 1 / 300),
        keep={"second": _BETWEEN},
        far_off={"second": "", "last": ""},
    ),
    "code for float32": Finding(
        _sequential(_ones("first"), _of_float32_constants, _ones("last")),
        keep={
            "only": "its code fails in float16: cannot compute Mul as input #1(zero-based) was expected to be a half "
            "tensor but is a float tensor"
        },
    ),
    "handed on": Finding(_handing_on_biases, *data(), {"biases": "its activations reach 1e+09"}, loss=_of_first_output),
    "two types in a layer": Finding(_combining_types("Layer"), *data(), _TWO_TYPES, loss="mse"),
    "two types in a model": Finding(_combining_types("Model"), *data(), _TWO_TYPES, loss="mse"),
    "output that fits": Finding(_classifier(1.0), _FOUR_INPUTS, _LABELS, loss=_cross_entropy),
    "output that is small": Finding(
        _classifier(12.7),
        _FOUR_INPUTS,
        _LABELS,
        {"probabilities": "with its output in float16, the loss scale can be at most 1"},
        loss=_cross_entropy,
    ),
    "output that becomes 0": Finding(
        _classifier(20.0),
        _FOUR_INPUTS,
        _LABELS,
        {"probabilities": "with its output in float16, 1 more layer is far off, and the loss scale can be at most 1"},
        loss=_cross_entropy,
    ),
    # The output of the hidden layer is what float16 rounds too much.
    "output that need not be kept": Finding(
        _sequential(_ones("hidden"), _ones("o")),
        1.25 * 2.0**-23,
        2.0**20,
        far_off={"hidden": "", "o": ""},
        tolerance=0.1,
    ),
    "no scale is small enough": Finding(
        _sequential(_ones("only")), y=1.5 * 2.0**20, scale=1, far_off={"only": "its gradients overflow"}
    ),
    # The gradient for the outputs vanishes, and that for the weight, which is larger, with it.
    "half of the gradients vanish": Finding(
        _with_a_small_gradient,
        (np.ones([1, 1]), np.full([1, 1], 2.0**15)),
        scale=2**9,
        loss=_loss_with_a_small_gradient(-35),
        far_off={"small": "since even at the scale 50% of its gradients vanish and 0% lose bits"},
    ),
    "far off within the tolerance": Finding(
        _with_a_small_gradient, (np.ones([1, 1]), np.ones([1, 1])), loss=_loss_with_a_small_gradient(-40), tolerance=1
    ),
    # Half way between two numbers of float16, it is rounded by a fifth.
    "activations lose bits": Finding(
        _sequential(_ones("only")),
        1.25 * 2.0**-23,
        far_off={"only": "since 0% of its activations vanish and 100% lose bits"},
        tolerance=0.1,
    ),
    "tolerance below the rounding of float16": Finding(
        dense_model,
        *data(),
        {"o": "with its output in float16"},
        {"hidden": _ROUNDED, "o": _ROUNDED},
        loss="mse",
        tolerance=1e-9,
    ),
}


@pytest.mark.parametrize("finding", _FINDINGS.values(), ids=_FINDINGS)
@for_every_keras()
def test_report_has_what_there_is_to_find(keras: ModuleType, finding: Finding) -> None:
    x, y = (np.full([2, 1], each) if isinstance(each, float | int) else each for each in (finding.x, finding.y))
    model = finding.make(keras)
    report = check(model, finding.loss, [(x, y)], tolerance=finding.tolerance)
    assert (set(report.keep_float32), set(report.far_off)) == (finding.keep.keys(), finding.far_off.keys())
    for name, reason in finding.keep.items():
        assert reason in report[name].keep_float32
        assert f"Keep {name} in float32: {report[name].keep_float32}." in str(report)
    for name, reason in finding.far_off.items():
        assert reason in report[name].far_off
        assert f"{name} is far off in float16: {report[name].far_off}." in str(report)
    assert (report.float16_error, report.keeping_fails) == (None, False)
    assert finding.scale in (None, report.suggested_loss_scale)
    if finding.far_off:
        return
    assert report.float16_loss == pytest.approx(report.loss, rel=1e-2)
    if finding.loss is _cross_entropy:
        assert report.suggested_loss_scale >= 256
    # What the report says can be done.
    report.apply(model)
    outputs = tf.nest.flatten(model(tf.nest.map_structure(np.float32, x)))
    assert all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in outputs)


@for_every_keras()
def test_model_that_cannot_run_in_float16_has_a_report_of_float32(keras: ModuleType) -> None:
    def only_float32(self: Any, x: tf.Tensor) -> tf.Tensor:
        returned = self.first(x)
        if returned.dtype == tf.float16:
            raise TypeError("no float16, please")
        return returned

    model = _called(composed(keras, only_float32, "Model", first=_ones("first")(keras)), np.ones([2, 1], np.float32))
    report = check(model, _as_float32, [(np.ones([2, 1]), np.ones([2, 1]))])
    assert "no float16, please" in report.to_dict()["float16_error"]
    assert (report.suggested_loss_scale, report.float16_loss, report["first"].relative_error) == (2**12, None, None)
    assert "The model cannot be run in float16, so its gradients were not compared. TypeError: " in str(report)
    with pytest.raises(ValueError, match=r'so no level was set.*set_precision\(model, "O2-bfloat16"\)\. TypeError: '):
        report.apply(model)


@for_every_keras()
def test_report_tells_what_to_do_where_no_layer_can_be_kept(keras: ModuleType) -> None:
    def combined(self: Any, x: tf.Tensor) -> tf.Tensor:
        return self.head((self.small(x) + self.large(x)) * 1e-6)

    parts = {"large": _large(keras), "small": keras.layers.Dense(4), "head": keras.layers.Dense(1)}
    model, (x, y) = composed(keras, combined, "Model", **parts), data()
    model(x)
    report = check(model, "mse", [(x, y)])
    assert (report.keep_float32, report.keeping_fails) == (["large"], True)
    assert report.to_dict()["keeping_fails"] is True
    text = str(report)
    assert "large does not fit into float16: its " in text
    assert "Keep large in float32" not in text
    assert "It does not help to keep that in float32" in text
    assert 'tfmp.set_precision(model, "O2-bfloat16")' in text
    # What the report says can be done.
    tfmp.set_precision(model, "O2-bfloat16")
    assert bool(tf.reduce_all(tf.math.is_finite(model(x))))


@for_every_keras()
def test_second_look_confirms_what_was_applied_or_says_what_remains(keras: ModuleType) -> None:
    model, batches = _FINDINGS["large activations"].make(keras), [(np.ones([2, 1]), np.ones([2, 1]))]
    report = check(model, _as_float32, batches)
    assert (report.remaining, report.already_float32) == (["huge", "next"], [])
    tfmp.set_precision(model, "O2", keep_float32=["next"])
    second = check(model, _as_float32, batches)
    assert (second.remaining, second.already_float32) == (["huge"], ["next"])
    policies = {layer.name: layer.now for layer in second.apply(model).layers[1:]}
    assert policies == {"first": "mixed_float16", "huge": "float32", "next": "float32", "last": "mixed_float16"}
    third = check(model, _as_float32, batches)
    assert (third.remaining, third.already_float32, third.far_off) == ([], ["huge", "next"], [])
    assert "In float32 already: huge, next; nothing else must be." in str(third)


_HALF, _FULL = ["float32", "float32", "float16"], ["float32"] * 3


@pytest.mark.parametrize(
    ("policies", "factor", "expected"),
    [
        # A model that is all float32 runs in float16 as a whole.
        (("float32", "float32"), 1.0, (_HALF, _HALF)),
        # Layers that the user keeps in float32 stay so.
        (("mixed_float16", "float32"), 1.0, (_HALF, _FULL)),
        (("mixed_bfloat16", "float32"), 1.0, (_HALF, _FULL)),
        # A layer that is kept takes the layers within with it.
        (("float32", "float32"), 1e5, (_FULL, _FULL)),
    ],
)
@for_every_keras()
def test_types_in_which_the_layers_run(
    keras: ModuleType, policies: tuple[str, str], factor: float, expected: tuple[list[str], list[str]]
) -> None:
    seen: dict[str, list[str]] = {}

    def noted(self: Any, x: tf.Tensor) -> tf.Tensor:
        seen.setdefault(self.name, []).append(x.dtype.name)
        return x

    def block(policy: str, name: str) -> Any:
        inner = composed(keras, noted, settings={"dtype": policy, "name": f"in_{name}"})
        settings = {"dtype": policy, "name": name}
        return composed(keras, lambda self, x: self.inner(x) * factor, settings=settings, inner=inner)

    layers = [block(*each) for each in zip(policies, ("one", "two"), strict=True)]
    layers = [keras.Input([1]), keras.layers.Dense(1, dtype=policies[0]), *layers]
    model = with_given_weights(keras.Sequential(layers))
    seen.clear()
    report = check(model, _as_float32, [(np.ones([1, 1]), np.full([1, 1], 2.0**-30))])
    assert seen == dict(zip(("in_one", "in_two"), expected, strict=True))
    assert report.keep_float32 == (["one", "in_two", "two"] if factor == 1e5 else [])
