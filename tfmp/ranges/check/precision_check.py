"""check_precision: what float16 would do to a model, before the training."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.any_keras.which import keras_of
from tfmp.core import settings
from tfmp.core.messages import visible_logger
from tfmp.core.tensorflow_internals import global_random_generator
from tfmp.environment import installed
from tfmp.ranges.check.float16_runs import Float16Runs
from tfmp.ranges.check.keras_models import KerasModel
from tfmp.ranges.check.model_runs import IN_FLOAT32, Subject, Totals, weighted_mean
from tfmp.ranges.check.probed_code import Functions, GraphLoss
from tfmp.ranges.check.suggestions import (
    bfloat16_needs_scaling,
    reason_far_off,
    reason_to_keep_float32,
    reason_to_return_float32,
    suggested_loss_scale,
)
from tfmp.ranges.report import LayerPrecision, PrecisionReport


def check_precision(
    model: Any,  # noqa: ANN401 - a model of any Keras, a function or a tensor
    loss_fn: Callable[..., Any] | str | None = None,
    batches: Iterable[Any] = (),
    *,
    num_batches: int = 8,
    tolerance: float = 0.3,
    variables: Sequence[tf.Variable] | None = None,
    in_float16: Callable[..., tf.Tensor] | tf.Tensor | None = None,
    session: tf.compat.v1.Session | None = None,
    progress: bool = True,
) -> PrecisionReport:
    """Find out what float16 would do to a model: which loss scale it needs, and which layers cannot take part.

    The model is run in float32, forward and backward, because float16 has already lost what one wants to see. The
    powers of two of its activations and gradients tell the loss scale, and which activations are too large. Then the
    same batches are run in float16 at that scale, and the gradients for the weights are compared layer by layer.

    Nothing of a model of Keras is changed: neither its weights nor its optimizer, types, random state or moving
    statistics. Functions are called as they are, and a TF1 graph gets the ops that count. Layers of Keras that draw
    random numbers, such as Dropout, are run as in inference, so that two checks find the same. Other layers run as in
    training.

    The rule:

        loss scale        2**(12 - e), if the largest gradient is from 2**e to 2**(e + 1): three bits below overflow;
                          half of that as long as gradients overflow in float16, but at least 1
        keep in float32   a layer whose inputs, outputs or weights reach 65520; then, in float16, the first layer that
                          returns infinities or NaN for finite inputs, until there is none; and the layers that return
                          the model's outputs, if gradients overflow or are far off, and are not with these in float32
        far off           a layer whose gradients differ from those in float32 by more than `tolerance` of their norm

    Args:
        model: One of three:

            * a model of Keras 3, Keras 2.15 or tf_keras that is built;
            * a function of raw TensorFlow for eager code. It takes the inputs of a batch and returns the outputs for
              `loss_fn`; without `loss_fn` it takes the batch and returns the loss. What it passes through
              `tfmp.ranges.probe` is looked at;
            * the loss of a TF1 graph, a tensor. The probes of the graph are looked at.
        loss_fn: A function of the labels and of the model's outputs that returns the loss, of any shape; its mean is
            taken. For Keras also a loss of Keras or its name, as for `compile`; None takes the loss that the model is
            compiled with.
        batches: What `fit` takes from a dataset: pairs of inputs and labels, or triples with the weights of the
            examples. For a graph, `feed_dict`s; `[None] * n` if the graph reads its own input.
        num_batches: The largest number of batches that are taken.
        tolerance: The relative difference of gradients from which on a layer is far off.
        variables: The variables to differentiate by, for functions and graphs; by default all that the loss depends
            on, or all trained variables of the graph. Those of both functions or losses must be the same.
        in_float16: For functions and graphs: the function, or the loss of the same graph, that computes the same in
            float16. Without it nothing is compared. Models of Keras need none.
        session: The session that runs the graph; by default the current one.
        progress: Whether to show progress, as a bar if tqdm is installed, otherwise as lines of the log.

    Returns:
        The report. If the model cannot be run in float16, it tells so, and has what was found in float32.

    Raises:
        TypeError: `model` is none of the three, `loss_fn` is no loss, a batch has no labels, or a setting is no number.
        ValueError: There are no batches; the loss or a gradient is infinite or NaN in float32; there are no gradients;
            the model of Keras is not built, has no loss, or has layers that compute in integers; an argument is given
            that does not belong to such a model; or a setting is out of range.

    Examples:
        >>> import keras, tfmp
        >>> keras.utils.set_random_seed(1)
        >>> model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        >>> report = tfmp.check_precision(model, "mse", [(tf.ones([16, 4]), tf.zeros([16, 1]))], progress=False)
        >>> report.keep_float32, report.far_off, report.bfloat16_needs_scaling
        ([], [], False)
        >>> report.suggested_loss_scale > 1
        True

    Source: the histograms over powers of two of NVCaffe ("Training with mixed precision", GTC 2017); the comparison of
    gradients was proposed in NVIDIA apex, issue 226.
    """
    tolerance = settings.positive("tolerance", tolerance)
    num_batches = settings.count("num_batches", num_batches)
    if not (loss_fn is None or isinstance(loss_fn, str) or callable(loss_fn)):
        raise TypeError(
            f"loss_fn must be a function, a loss of Keras or its name, got {loss_fn!r} of type "
            f"{type(loss_fn).__name__}. For a loss of each output, compile the model with them and leave out loss_fn."
        )
    taken = list(itertools.islice(iter(batches), num_batches))
    if not taken:
        raise ValueError("batches is empty: pass a few batches, as the training would take them.")
    if in_float16 is not None and any(batch is None for batch in taken):
        raise ValueError(
            "a graph that reads its own input would give in_float16 other batches than the loss in float32: pass "
            "feed_dicts, or leave out in_float16."
        )
    subject = _subject(model, loss_fn, variables, in_float16, session)
    if loss_fn is not None or subject.needs_labels:
        _refuse_without_labels(taken)
    with _global_seed_unchanged():
        return _Check(subject, taken, tolerance, progress).report()


def _subject(
    model: Any,  # noqa: ANN401 - checked here
    loss_fn: Callable[..., Any] | str | None,
    variables: Sequence[tf.Variable] | None,
    in_float16: Any,  # noqa: ANN401 - a function or a tensor
    session: tf.compat.v1.Session | None,
) -> Subject:
    keras = keras_of(model, "layers.Layer")
    if keras is not None:
        _refuse("a model of Keras", variables=variables, in_float16=in_float16, session=session)
        return KerasModel(keras, model, loss_fn)
    if tf.is_symbolic_tensor(model):
        _refuse("the loss of a graph", loss_fn=loss_fn)
        found = session or tf.compat.v1.get_default_session()
        if found is None:
            raise ValueError("the loss is a tensor of a graph, and there is no session: pass session.")
        return GraphLoss(model, in_float16, variables, found)
    if not callable(model):
        raise TypeError(
            "model must be a model of Keras, a function, or the loss of a TF1 graph, got "
            f"{model!r} of type {type(model).__name__}."
        )
    _refuse("a function", session=session)
    return Functions(_loss_of(model, loss_fn), in_float16 and _loss_of(in_float16, loss_fn), variables)


def _refuse_without_labels(batches: Sequence[Any]) -> None:
    """Refuse batches that are not pairs, as those that one gets from the two arrays that `fit` takes."""
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, np.ndarray | tf.Tensor) else ""
            raise TypeError(
                "batches must hold pairs of inputs and labels, or triples with the weights of the examples, got "
                f"{type(batch).__name__}{shape}: pass the data in batches, such as [(x[:32], y[:32])] or "
                "tf.data.Dataset.from_tensor_slices((x, y)).batch(32)."
            )


def _refuse(model: str, **arguments: object) -> None:
    """Refuse arguments that would change nothing."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(f"{model} needs no {' and no '.join(given)}: leave it out.")


def _loss_of(
    function: Callable[..., tf.Tensor], loss_fn: Callable[..., Any] | str | None
) -> Callable[[Any], tf.Tensor]:
    """Return a function of a batch that computes the loss."""
    if loss_fn is None:
        return function
    if isinstance(loss_fn, str):
        raise TypeError(f"loss_fn must be a function, since the model is one, got {loss_fn!r}.")

    def loss(batch: Any) -> tf.Tensor:  # noqa: ANN401 - whatever the functions take
        inputs, labels, *weights = batch
        return weighted_mean(loss_fn(labels, function(inputs)), weights[0] if weights else None)

    return loss


@contextlib.contextmanager
def _global_seed_unchanged() -> Iterator[None]:
    """Give eager code that draws random numbers afterwards the same ones as if the block had not run."""
    generator = global_random_generator()
    if generator is None:
        # Without a seed, random numbers cannot be repeated anyway.
        yield
        return
    state = generator.getstate()
    # Other seeds within: a kernel that TensorFlow keeps for a seed goes on where it stopped.
    generator.seed(repr(state))
    try:
        yield
    finally:
        generator.setstate(state)


class _Check:
    """The runs of one check; `tolerance` is the relative difference of gradients from which on a layer is far off."""

    def __init__(self, subject: Subject, batches: Sequence[Any], tolerance: float, progress: bool) -> None:
        self._subject = subject
        self._batches = batches
        self._tolerance = tolerance
        self._progress = progress
        self._totals = Totals()
        #: The names of the layers that return the model's outputs.
        self._returning: frozenset[str] = frozenset()

    def report(self) -> PrecisionReport:
        """Run all batches and return the report."""
        losses = [self._measure(batch) for batch in self._shown("float32")]
        gradients = self._totals.all_gradients()
        if gradients.nonfinite:
            raise ValueError(
                f"gradients are infinite or NaN in float32 already, first those of {self._first_nonfinite_gradient()}, "
                "which no precision or loss scale can mend."
            )
        if gradients.exponents is None:
            raise ValueError("the loss has no gradients other than 0: there is nothing that float16 could lose.")
        reasons = {name: reason_to_keep_float32(name, self._totals.of) for name in self._totals.names()}
        found = self._in_float16({name: reason for name, reason in reasons.items() if reason is not None})
        return PrecisionReport(
            # What is kept may be a model, which is not looked at by itself.
            layers=[self._layer(name, found) for name in dict.fromkeys([*self._totals.names(), *found.kept])],
            suggested_loss_scale=found.loss_scale,
            bfloat16_needs_scaling=bfloat16_needs_scaling(gradients),
            batches=len(self._batches),
            loss=sum(losses) / len(losses),
            float16_loss=sum(found.losses) / len(found.losses) if found.losses else None,
            float16_error=found.error,
            keeping_fails=found.keeping_fails,
            already_float32=self._subject.already_float32,
        )

    def _shown(self, precision: str) -> Iterable[Any]:
        """Yield the batches, and show which of them is run."""
        if self._progress and installed("tqdm"):
            from tqdm import tqdm

            return tqdm(self._batches, desc=f"check_precision, {precision}", unit="batch", leave=False)
        if self._progress:
            visible_logger().info("check_precision: %d batches in %s", len(self._batches), precision)
        return self._batches

    def _measure(self, batch: Any) -> float:  # noqa: ANN401 - whatever the user's code takes
        run = self._subject.run(batch, IN_FLOAT32)
        if not math.isfinite(run.loss):
            raise ValueError(f"the loss is {run.loss} in float32 already, which no precision or loss scale can mend.")
        self._totals.add(run)
        self._returning |= run.returning
        return run.loss

    def _in_float16(self, kept: Mapping[str, str]) -> Float16Runs:
        """Run the batches in float16, but for some layers; `kept` has why."""
        scale = suggested_loss_scale(self._totals.all_gradients(without=kept))
        found = Float16Runs(self._subject, kept, scale)
        if not self._subject.has_float16:
            return found
        found.compare(functools.partial(self._shown, "float16"))
        returning = self._returning - found.kept.keys()
        before = set(found.comparison.far_off(self._tolerance)) - returning
        higher = suggested_loss_scale(self._totals.all_gradients(without=found.kept.keys() | returning))
        is_suspect = before or found.loss_scale < scale or scale == 1 < higher
        if not (returning and is_suspect and found.outputs_are_finite) or found.error:
            return found
        # What float16 rounds of the outputs changes the gradient of the loss for them, and so all others: a softmax
        # that is rounded to 0 has 1 / 0 in it. With the outputs in float32, there may be nothing else to say.
        other = Float16Runs(self._subject, {**found.kept, **dict.fromkeys(sorted(returning), "")}, higher)
        other.compare(functools.partial(self._shown, "float16"))
        after = set(other.comparison.far_off(self._tolerance)) - returning
        allows_more = other.loss_scale > found.loss_scale
        if other.error or not (2 * len(after) < len(before) or (after <= before and allows_more)):
            return found
        reason = reason_to_return_float32(len(before - after), found.loss_scale if allows_more else None)
        other.kept.update(dict.fromkeys(returning, reason))
        return other

    def _first_nonfinite_gradient(self) -> str:
        kinds = ("output_gradients", "weight_gradients")
        # The backward pass begins at the end of the model.
        found = [
            name for name in self._totals.names() for kind in kinds if self._totals.histogram(kind, name).nonfinite
        ]
        return found[-1]

    def _layer(self, name: str, in_float16: Float16Runs) -> LayerPrecision:
        totals = self._totals
        agreement = in_float16.comparison.agreement(name)
        outputs = totals.of["outputs"].get(name)
        layer = LayerPrecision(
            name=name,
            activations=totals.histogram("outputs", name),
            largest_activation=outputs.largest if outputs else 0.0,
            activation_gradients=totals.histogram("output_gradients", name),
            weights=totals.histogram("weights", name),
            weight_gradients=totals.histogram("weight_gradients", name),
            keep_float32=in_float16.kept.get(name),
            cosine=agreement and agreement.cosine,
            relative_error=agreement and agreement.relative_error,
        )
        return dataclasses.replace(layer, far_off=reason_far_off(layer, in_float16.loss_scale, self._tolerance))
