"""check_precision: what float16 would do to a model, before the training."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core import settings
from tfmp.core.log import visible_logger
from tfmp.environment import installed
from tfmp.hosts.keras.which import keras_of
from tfmp.ranges.check.comparison import GradientComparison
from tfmp.ranges.check.keras_models import KerasModel
from tfmp.ranges.check.model_runs import IN_FLOAT32, ModelRun, Precision, Subject, Totals, weighted_mean
from tfmp.ranges.check.probed_code import Functions, GraphLoss
from tfmp.ranges.check.random_state import global_seed_unchanged
from tfmp.ranges.check.suggestions import (
    bfloat16_needs_scaling,
    reason_far_off,
    reason_to_keep_float32,
    suggested_loss_scale,
)
from tfmp.ranges.report import LayerPrecision, PrecisionReport

#: What a model raises whose own code is not for float16.
_FAILURES = (TypeError, ValueError, tf.errors.OpError)


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
                          returns infinities or NaN for finite inputs, until there is none
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
        TypeError: `model` is none of the three, `loss_fn` is no loss, or a setting is no number.
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
    with global_seed_unchanged():
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


class _Check:
    """The runs of one check; `tolerance` is the relative difference of gradients from which on a layer is far off."""

    def __init__(self, subject: Subject, batches: Sequence[Any], tolerance: float, progress: bool) -> None:
        self._subject = subject
        self._batches = batches
        self._tolerance = tolerance
        self._progress = progress
        self._totals = Totals()
        self._scale = 1.0
        self._comparison = GradientComparison()
        #: Why layers are kept in float32, by their names.
        self._kept: dict[str, str] = {}
        #: Why the model could not be run in float16, and whether that is so only with layers kept in float32.
        self._float16_error: str | None = None
        self._keeping_fails = False

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
        for name in self._totals.names():
            reason = reason_to_keep_float32(name, self._totals.of)
            if reason is not None:
                self._kept[name] = reason
        self._scale = suggested_loss_scale(self._totals.all_gradients(without=self._kept))
        in_float16 = self._compare() if self._subject.has_float16 else []
        return PrecisionReport(
            # What is kept may be a model, which is not looked at by itself.
            layers=[self._layer(name) for name in dict.fromkeys([*self._totals.names(), *self._kept])],
            suggested_loss_scale=self._scale,
            bfloat16_needs_scaling=bfloat16_needs_scaling(gradients),
            batches=len(self._batches),
            loss=sum(losses) / len(losses),
            float16_loss=sum(in_float16) / len(in_float16) if in_float16 else None,
            float16_error=self._float16_error,
            keeping_fails=self._keeping_fails,
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
        return run.loss

    def _compare(self) -> list[float]:
        """Run all batches in float32 and in float16, and compare their gradients; return the losses in float16.

        Both begin anew when a layer is found to overflow or the loss scale to be too high. If the model cannot be run
        in float16, there is nothing to compare.
        """
        while True:
            self._comparison, losses = GradientComparison(), list[float]()
            for batch in self._shown("float16"):
                in_float32, in_float16 = self._subject.run(batch, IN_FLOAT32), self._run_in_float16(batch)
                if in_float16 is None:
                    self._comparison = GradientComparison()
                    return []
                if self._has_changed(in_float16):
                    break
                self._comparison.add(in_float32.gradients, in_float16.gradients)
                losses.append(in_float16.loss)
            else:
                return losses

    def _has_changed(self, run: ModelRun) -> bool:
        """Keep one more layer in float32, or halve the scale, if a run in float16 shows that it must be so."""
        name = self._first_overflowing(run)
        if name is not None:
            self._kept[name] = "in float16 it returns infinities or NaN for finite inputs"
            return True
        self._explain_overflow_between_layers(run)
        # Where an activation is not finite, a lower scale does not help.
        are_finite = all(measured.finite for measured in run.outputs.values()) and math.isfinite(run.loss)
        if are_finite and self._scale > 1 and not all(each.finite for each in run.weight_gradients.values()):
            self._scale /= 2
            return True
        return False

    def _run_in_float16(self, batch: Any) -> ModelRun | None:  # noqa: ANN401 - whatever the user's code takes
        try:
            return self._subject.run(batch, self._in_float16())
        except _FAILURES as error:
            if not self._subject.keeps_float32:
                # The user wrote what computes in float16.
                raise
            message = f"{type(error).__name__}: {error}"
        # Code of the model may combine what a layer returns in float32 with float16. The layer with this code may then
        # be kept as a whole.
        for holders in self._subject.holders(self._kept):
            run = self._tried(batch, self._kept.keys() | holders.keys())
            if run is not None:
                for holder, inner in holders.items():
                    self._kept.setdefault(holder, f"it combines what {inner} returns in float32 with float16")
                return run
        self._float16_error = message
        self._keeping_fails = bool(self._kept) and self._tried(batch, ()) is not None
        return None

    def _in_float16(self, keep_float32: Iterable[str] | None = None) -> Precision:
        return Precision("float16", self._scale, frozenset(self._kept if keep_float32 is None else keep_float32))

    def _tried(self, batch: Any, keep_float32: Iterable[str]) -> ModelRun | None:  # noqa: ANN401 - what the code takes
        try:
            return self._subject.run(batch, self._in_float16(keep_float32))
        except _FAILURES:
            return None

    def _first_nonfinite_gradient(self) -> str:
        kinds = ("output_gradients", "weight_gradients")
        # The backward pass begins at the end of the model.
        found = [
            name for name in self._totals.names() for kind in kinds if self._totals.histogram(kind, name).nonfinite
        ]
        return found[-1]

    def _first_overflowing(self, run: ModelRun) -> str | None:
        """Return the first layer that may still be kept in float32 and returns infinities or NaN for finite inputs."""
        if not self._subject.keeps_float32:
            return None
        # A layer within another one returns first: it comes first among the outputs.
        for name, measured in run.outputs.items():
            took_finite = name not in run.inputs or run.inputs[name].finite
            if not measured.finite and took_finite and name not in self._kept:
                return name
        return None

    def _explain_overflow_between_layers(self, run: ModelRun) -> None:
        """Say where an overflow comes from that happens after one layer has returned and before the next is called."""
        if not self._subject.keeps_float32:
            return
        name = next((name for name, measured in run.outputs.items() if not measured.finite), None)
        # No layer has returned anything but finite values before.
        if name in run.inputs and not run.inputs[name].finite:
            self._kept[name] = (
                "what it takes is infinite or NaN in float16, though no layer returned that: compute in float32, too, "
                "what the model computes between the layers before it and this one"
            )

    def _layer(self, name: str) -> LayerPrecision:
        totals = self._totals
        agreement = self._comparison.agreement(name)
        outputs = totals.of["outputs"].get(name)
        layer = LayerPrecision(
            name=name,
            activations=totals.histogram("outputs", name),
            largest_activation=outputs.largest if outputs else 0.0,
            activation_gradients=totals.histogram("output_gradients", name),
            weights=totals.histogram("weights", name),
            weight_gradients=totals.histogram("weight_gradients", name),
            keep_float32=self._kept.get(name),
            cosine=agreement and agreement.cosine,
            relative_error=agreement and agreement.relative_error,
        )
        return dataclasses.replace(layer, far_off=reason_far_off(layer, self._scale, self._tolerance))
