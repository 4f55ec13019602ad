"""What `tfmp.check_precision` found: a table, plain data, and a picture."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from tfmp.core import settings
from tfmp.mixed_precision.levels.existing_models import PolicyReport, set_precision
from tfmp.ranges.histogram import RangeHistogram


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPrecision:
    """What was found of a layer, a probe or a variable. Ranges are those in float32.

    Attributes:
        name: The name.
        activations: What the layer returns, or the probe's values.
        largest_activation: The largest magnitude of these.
        activation_gradients: The gradients for the activations, not scaled.
        weights: The trained variables.
        weight_gradients: The gradients for these, not scaled.
        keep_float32: Why the layer cannot compute in float16; None if it can.
        cosine: The cosine of the angle between the gradients for its variables in float16 and in float32; None if
            there was nothing to compare.
        relative_error: The norm of the difference of both, divided by the norm in float32; None as above.
        far_off: Why the gradients in float16 are far from those in float32; None if they are not.

    Provisional: a minor version may change the attributes.
    """

    name: str
    activations: RangeHistogram
    largest_activation: float
    activation_gradients: RangeHistogram
    weights: RangeHistogram
    weight_gradients: RangeHistogram
    keep_float32: str | None = None
    cosine: float | None = None
    relative_error: float | None = None
    far_off: str | None = None

    @property
    def gradients(self) -> RangeHistogram:
        """The gradients for the activations and for the variables together."""
        return self.activation_gradients + self.weight_gradients

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """What `tfmp.check_precision` found. `print(report)` shows it as a table.

    Attributes:
        layers: The layers in the order in which the model calls them; or the probes, then the variables.
        suggested_loss_scale: The power of two for a `tfmp.FixedLossScaleManager`, and where a dynamic manager should
            begin. With it, the largest gradient can become eight times as large before it overflows.
        bfloat16_needs_scaling: Whether gradients would be lost in bfloat16 without a loss scale.
        batches: How many batches were run.
        loss: The mean of the losses in float32.
        float16_loss: That in float16; None if the model was not run in float16.
        float16_error: Why the model cannot be run in float16, as TensorFlow or Keras says it; None if it can.
        keeping_fails: Whether that is so only if the layers in `keep_float32` are in float32: the model's own code then
            combines the two types. No level of precision can help there.
        already_float32: The names of the layers that a model in half precision computes in float32 already.

    Provisional: a minor version may change the attributes.
    """

    layers: Sequence[LayerPrecision]
    suggested_loss_scale: float
    bfloat16_needs_scaling: bool
    batches: int
    loss: float
    float16_loss: float | None
    float16_error: str | None = None
    keeping_fails: bool = False
    already_float32: Sequence[str] = ()

    @property
    def keep_float32(self) -> list[str]:
        """The names of the layers that must compute in float32; `tfmp.set_precision` takes them as `keep_float32`."""
        return [layer.name for layer in self.layers if layer.keep_float32]

    @property
    def remaining(self) -> list[str]:
        """Those of `keep_float32` that a model in half precision does not compute in float32 yet."""
        return [name for name in self.keep_float32 if name not in self.already_float32]

    @property
    def far_off(self) -> list[str]:
        """The names of the layers whose gradients in float16 are far from those in float32."""
        return [layer.name for layer in self.layers if layer.far_off]

    def apply(self, model: Any, level: str = "O2") -> PolicyReport:  # noqa: ANN401 - a model of any Keras
        """Set a level of precision on the model, by `tfmp.set_precision`, with what must be in float32 in float32.

        These are the layers in `keep_float32` and those in `already_float32`. Check the model again afterwards: the
        second report is about the model as it is then. If its `remaining` is not empty, apply it, too.

        Args:
            model: The model of Keras that was checked, or another one with layers of the same names.
            level: "O2", or another level for float16.

        Returns:
            What each layer computed in, and computes in now.

        Raises:
            ValueError: The model cannot be run in float16; or as for `tfmp.set_precision`.

        Examples:
            >>> import keras, tfmp
            >>> import tensorflow as tf
            >>> layers = [keras.layers.Dense(4, name="body"), keras.layers.Rescaling(1e6, name="huge")]
            >>> model = keras.Sequential([keras.Input([3]), *layers], name="net")
            >>> batches = [(tf.ones([8, 3]), tf.zeros([8, 4]))]
            >>> report = tfmp.check_precision(model, "mse", batches, progress=False)
            >>> print(report.apply(model))
            layer  before   O2
            net    float32  mixed_float16
            body   float32  mixed_float16
            huge   float32  float32        in keep_float32
            >>> second = tfmp.check_precision(model, "mse", batches, progress=False)
            >>> second.keep_float32, second.already_float32, second.remaining
            (['huge'], ['huge'], [])
        """
        if self.float16_error is not None:
            raise ValueError(
                "the model cannot be run in float16, so no level was set. bfloat16 has the range of float32: use "
                f'tfmp.set_precision(model, "O2-bfloat16"). {self.float16_error}'
            )
        names = dict.fromkeys([*self.already_float32, *self.keep_float32])
        return set_precision(model, level, keep_float32=map(_pattern, names))

    def __getitem__(self, name: str) -> LayerPrecision:
        """Return what was found of a layer.

        Args:
            name: The name of the layer, the probe or the variable.

        Raises:
            KeyError: There is none of this name.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}: the report has {', '.join(layer.name for layer in self.layers)}.")

    def __str__(self) -> str:
        """Return a table of the layers, and what follows from it in words."""
        scale = self.suggested_loss_scale
        header = ["layer", "largest", "gradients", "zero", "lost", "subnormal", f"lost x{scale:g}", "error", ""]
        rows = [
            [
                layer.name,
                f"{layer.largest_activation:.3g}" if layer.activations.total else "",
                _exponents(layer.gradients),
                *_percentages(layer.gradients, scale),
                "" if layer.relative_error is None else f"{layer.relative_error:.1e}",
                "keep in float32" if layer.keep_float32 else "far off" if layer.far_off else "",
            ]
            for layer in self.layers
        ]
        return "\n".join([_table(header, rows), "", *self._sentences()])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data that JSON can hold; infinities and NaN become strings."""
        values = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {
            **values,
            "layers": [layer.to_dict() for layer in self.layers],
            "keep_float32": self.keep_float32,
            "remaining": self.remaining,
            "far_off": self.far_off,
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the report as JSON, and write it to a file if a path is given.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        if path is not None:
            with open(path, "w") as file:
                file.write(text + "\n")
        return text

    def plot(self, path: str | os.PathLike[str], loss_scale: float | None = None) -> None:
        """Draw the ranges of activations and gradients as heat maps: layers by powers of two.

        Lines mark what float16 can hold of gradients that are multiplied by the loss scale.

        Args:
            path: The file, whose suffix tells its format: .png, .svg or .pdf.
            loss_scale: The factor of the gradients; by default the suggested scale. 1 shows them without scaling.

        Raises:
            ImportError: Matplotlib is not installed.
            OSError: The file cannot be written.
            ValueError: `loss_scale` is not greater than 0.
        """
        from tfmp.ranges import plots

        scale = settings.positive("loss_scale", self.suggested_loss_scale if loss_scale is None else loss_scale)
        plots.heat_maps(
            path,
            {
                "activations": ({layer.name: layer.activations for layer in self.layers}, 1.0),
                f"gradients, loss scale {scale:g}": ({layer.name: layer.gradients for layer in self.layers}, scale),
            },
        )

    def _sentences(self) -> list[str]:
        total = sum((layer.gradients for layer in self.layers), start=RangeHistogram())
        before, after = total.shares(), total.shares(scale=self.suggested_loss_scale)
        found = [
            f"Suggested loss scale: {self.suggested_loss_scale:g}. Without scaling, float16 loses {before.lost:.1%} of "
            f"all gradients and keeps {before.subnormal:.1%} with fewer bits; with it, {after.lost:.1%} and "
            f"{after.subnormal:.1%}."
        ]
        kept = "{} does not fit into float16: {}." if self.keeping_fails else "Keep {} in float32: {}."
        found += [kept.format(layer.name, layer.keep_float32) for layer in self.layers if layer.keep_float32]
        found += [f"{layer.name} is far off in float16: {layer.far_off}." for layer in self.layers if layer.far_off]
        if self.keeping_fails:
            found.append(
                "It does not help to keep that in float32, since the model's own code combines it with float16, and "
                "fails. Train in bfloat16, which has the range of float32, for example by "
                'tfmp.set_precision(model, "O2-bfloat16"); or change the code such that it casts to one type what it '
                f"combines. {self.float16_error}"
            )
        elif self.float16_error is not None:
            found.append(
                f"The model cannot be run in float16, so its gradients were not compared. {self.float16_error}"
            )
        elif self.float16_loss is None:
            found.append("The model was not run in float16: pass in_float16 to compare its gradients.")
        else:
            found.append(f"Loss: {self.loss:.6g} in float32, {self.float16_loss:.6g} in float16.")
            if self.already_float32:
                remains = f"what remains is {', '.join(self.remaining)}" if self.remaining else "nothing else must be"
                found.append(f"In float32 already: {', '.join(self.already_float32)}; {remains}.")
        needs = "also needs a loss scale" if self.bfloat16_needs_scaling else "needs no loss scale"
        return [*found, f"bfloat16 {needs}."]


def _pattern(name: str) -> re.Pattern[str]:
    """Return what matches a layer by the name that a report gives it, which may be numbered."""
    return re.compile("|".join(map(re.escape, {name, re.sub(r" \(\d+\)$", "", name)})))


def _exponents(histogram: RangeHistogram) -> str:
    found = histogram.exponents
    return "" if found is None else f"2^{found[0]}..2^{found[1]}"


def _percentages(histogram: RangeHistogram, scale: float) -> list[str]:
    """Return what is 0, lost and subnormal, and what is lost at a loss scale; nothing of no values."""
    shares = histogram.shares()
    parts = (shares.zero, shares.lost, shares.subnormal, histogram.shares(scale=scale).lost)
    return [f"{part:.1%}" if histogram.total else "" for part in parts]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if index in (0, len(widths) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths).rstrip(), *map(line, rows)])


def _plain(value: Any) -> Any:  # noqa: ANN401 - the value of any field
    if isinstance(value, RangeHistogram):
        return value.to_dict()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return value
