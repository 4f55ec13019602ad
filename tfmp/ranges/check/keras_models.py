"""Checks a model of Keras, through its layers."""

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.any_keras.internals import compiled_with, is_compiled, layers_directly_in
from tfmp.any_keras.which import is_keras2
from tfmp.core.dtypes import HALF_TYPES_BY_NAME
from tfmp.core.gradients import arithmetic
from tfmp.mixed_precision.keras_layers import (
    called_layers_of,
    compute_dtype,
    is_quantized,
    layers_of,
    paths_within,
)
from tfmp.ranges.check import around_keras
from tfmp.ranges.check.model_runs import (
    ModelRun,
    Precision,
    RunTensors,
    by_name,
    eager_run,
    told_apart,
    weighted_mean,
)

#: An object of any Keras.
_Keras: TypeAlias = Any


class KerasModel:
    """A model of any Keras that is built, with the loss that it is trained on.

    `loss_fn` is a function of the labels and the outputs, or a name that Keras knows; None stands for the loss that the
    model is compiled with.
    """

    has_float16 = True
    keeps_float32 = True

    def __init__(self, keras: ModuleType, model: _Keras, loss_fn: Callable[..., Any] | str | None) -> None:
        self._keras = keras
        self._model = model
        self._loss_fn = around_keras.loss_of_name(keras, loss_fn) if isinstance(loss_fn, str) else loss_fn
        self._is_named = isinstance(loss_fn, str)
        self._layers = _layers(keras, model)
        _validate(keras, model, self._loss_fn)
        self._paths = {**paths_within(keras, model), id(model): [model.name]}
        self._names = _names(keras, self._layers, self._paths)
        self._layer_of_variable = _layers_by_variable(self._layers)
        computes_in_half = [layer for layer in self._layers if compute_dtype(keras, layer) in HALF_TYPES_BY_NAME]
        # A model that computes in half precision already has layers that the user keeps in float32.
        self._may_be_half = {id(layer) for layer in computes_in_half or self._layers}
        # Layers that keep their types. They are an obstacle only if the model calls them.
        self._of_other_types = {id(layer) for layer in self._layers if _is_of_other_type(keras, layer)}
        #: Of the last run. Not all its calls, whose tensors would stay in memory during the next one.
        self._failure: _Failure | None = None

    @property
    def needs_labels(self) -> bool:
        """Whether the model is compiled with a loss, and does not only add losses itself."""
        return self._loss_fn is None and (compiled_with(self._model) or {}).get("loss") is not None

    def run(self, batch: Any, precision: Precision) -> ModelRun:  # noqa: ANN401 - whatever the model takes
        """Run a batch of `fit` forward and backward, as in training, but for the layers that draw random numbers."""
        calls = _Calls(self._keras, self._names)
        try:
            return self._run(batch, precision, calls)
        finally:
            self._failure = calls.failure

    def _run(self, batch: Any, precision: Precision, calls: "_Calls") -> ModelRun:  # noqa: ANN401 - as above
        with self._prepared(precision, calls) as sources:
            with tf.GradientTape() as tape:
                tape.watch([source for source in sources if not isinstance(source, tf.Variable)])
                loss, returned = self._loss(batch)
                scaled = loss * precision.loss_scale
            self._refuse_other_types(calls)
            # Layers may be called again while the gradients are computed, in order to compute activations again.
            inputs, outputs = list(calls.inputs), list(calls.outputs)
            with around_keras.on_first_replica(self._keras, self._model):
                grads = tape.gradient(scaled, [*(tensor for _, tensor in outputs), *sources])
        names = [self._names[id(self._layer_of_variable[id(each)])] for each in self._model.trainable_variables]
        of_outputs, of_variables = grads[: len(outputs)], grads[len(outputs) :]
        tensors = RunTensors(
            loss=loss,
            inputs=by_name(inputs),
            outputs=by_name(outputs),
            output_gradients=by_name((name, grad) for (name, _), grad in zip(outputs, of_outputs, strict=True)),
            weights=by_name(zip(names, map(tf.convert_to_tensor, sources), strict=True)),
            weight_gradients=by_name(zip(names, of_variables, strict=True)),
            cast_inputs=by_name(calls.cast_inputs),
            own_outputs=by_name(calls.own_outputs),
        )
        returning = {name for name, tensor in outputs if any(tensor is each for each in returned)}
        return eager_run(tensors, precision.loss_scale)._replace(returning=frozenset(returning))

    @property
    def already_float32(self) -> Sequence[str]:
        """The names of the layers that a model in half precision computes in float32."""
        kept = [layer for layer in self._layers if id(layer) not in self._may_be_half | self._of_other_types]
        return [self._names[id(layer)] for layer in kept if id(layer) in self._names]

    def failed_in(self, kept: Collection[str]) -> tuple[str, str] | None:
        """Return the layer to keep in float32, too, after an error: that whose code failed, or that holds this one."""
        holder_of = {id(inner): layer for layer in self._layers for inner in layers_directly_in(layer)}
        named = [layer for layer in self._layers if self._name(layer) in kept]
        in_float32 = {id(inner) for layer in named for inner in layers_of(layer)}
        if self._failure is None:
            return None
        layer = self._failure.layer
        while id(layer) in in_float32:
            layer = holder_of.get(id(layer), self._model)
        if layer is self._model:
            return None
        inside = {id(inner) for inner in layers_of(layer)}
        for each in named:
            if id(each) in inside:
                return self._name(layer), f"it combines what {self._name(each)} returns in float32 with float16"
        return self._name(layer), f"its code fails in float16: {self._failure.error}"

    def _name(self, layer: _Keras) -> str:
        # Models are not looked at, but may be kept.
        return self._names.get(id(layer)) or "/".join(self._paths[id(layer)])

    @contextlib.contextmanager
    def _prepared(self, precision: Precision, calls: "_Calls") -> Iterator[list[Any]]:
        """Let the layers compute in the types of a run, see their calls, and keep the model's state.

        Yield what to differentiate by, one for each trained variable.
        """
        in_float32 = self._kept_in_float32(precision)
        with contextlib.ExitStack() as changed:
            changed.enter_context(around_keras.adding_losses_in_float32(self._keras))
            for layer in self._layers:
                if precision.dtype is not None and id(layer) not in self._of_other_types:
                    policy = "float32" if id(layer) in in_float32 else "mixed_float16"
                    changed.enter_context(around_keras.computing_in(self._keras, layer, policy))
                changed.enter_context(around_keras.called_through(layer, functools.partial(calls.call, layer)))
            yield changed.enter_context(around_keras.state_unchanged(self._keras, self._model))

    def _kept_in_float32(self, precision: Precision) -> set[int]:
        if precision.dtype != "float16":
            return set(map(id, self._layers))
        named = [layer for layer in self._layers if self._name(layer) in precision.keep_float32]
        # A layer that is kept takes the layers that it holds with it.
        kept = {id(inner) for layer in named for inner in layers_of(layer)}
        return kept | (set(map(id, self._layers)) - self._may_be_half)

    def _refuse_other_types(self, calls: "_Calls") -> None:
        _refuse([layer for layer in self._layers if id(layer) in self._of_other_types & calls.called])

    def _loss(self, batch: Any) -> tuple[tf.Tensor, list[Any]]:  # noqa: ANN401 - what the model takes
        """Return the loss that `fit` would compute, a float32 scalar that is not scaled, and the model's outputs."""
        x, y, weights = self._keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(_tensor, batch))
        outputs = self._model(x, training=True)
        returned = tf.nest.flatten(outputs)
        if self._loss_fn is None:
            loss = around_keras.compiled_loss(self._keras, self._model, x=x, y=y, y_pred=outputs, sample_weight=weights)
            if loss is None:
                raise ValueError(f"the model {self._model.name!r} was compiled without a loss, and adds none.")
            return _whole(loss), returned
        added = [tf.cast(loss, tf.float32) for loss in self._model.losses]
        return tf.add_n([*self._loss_terms(self._loss_fn, y, outputs, weights), *added]), returned

    def _loss_terms(self, loss_fn: Callable[..., Any], y: _Keras, outputs: _Keras, weights: _Keras) -> list[tf.Tensor]:
        """Return what a loss makes of the outputs, as float32 scalars."""
        if not isinstance(loss_fn, self._keras.losses.Loss):
            return [weighted_mean(loss_fn(y, outputs), weights)]
        if not self._is_named:
            return [_whole(loss_fn(y, outputs, sample_weight=weights))]
        # As `compile` has it, one name is for each of several outputs.
        targets, flat = tf.nest.flatten(y), tf.nest.flatten(outputs)
        each = tf.nest.flatten(weights) if len(tf.nest.flatten(weights)) == len(flat) else [weights] * len(flat)
        return [
            arithmetic.widen(loss_fn(target, output, sample_weight=weight))
            for target, output, weight in zip(targets, flat, each, strict=True)
        ]


def _whole(loss: _Keras) -> tf.Tensor:
    """Return what Keras differentiates: of a loss whose reduction is "none", the sum."""
    return tf.reduce_sum(arithmetic.widen(tf.convert_to_tensor(loss)))


class _Failure(NamedTuple):
    """The innermost layer whose call raised an error, and what that says, in a line."""

    layer: _Keras
    error: str


class _Calls:
    """What layers take and return in a run; `names` has those of the layers to look at, by their ids."""

    def __init__(self, keras: ModuleType, names: Mapping[int, str]) -> None:
        self._keras = keras
        self._names = names
        #: The ids of the layers that were called.
        self.called: set[int] = set()
        self.inputs: list[tuple[str, tf.Tensor]] = []
        self.outputs: list[tuple[str, tf.Tensor]] = []
        #: Those of these that Keras casts, and those that a layer has computed itself.
        self.cast_inputs: list[tuple[str, tf.Tensor]] = []
        self.own_outputs: list[tuple[str, tf.Tensor]] = []
        self.failure: _Failure | None = None
        #: How many layers are being called that were told not to train.
        self._not_training = 0

    def call(self, layer: _Keras, call: Callable[..., Any], *args: _Keras, **kwargs: _Keras) -> _Keras:
        """Call a layer by its own `call`, in inference if it draws random numbers, and note its inputs and outputs."""
        self.called.add(id(layer))
        draws = around_keras.draws_random_numbers(self._keras, layer)
        positional: Sequence[Any] = args
        if draws:
            # Dropout would draw another mask in float16 than in float32.
            positional, kwargs = _with_training(call, args, kwargs, was=True, now=False)
        elif self._not_training:
            # The layers within it that draw no numbers train all the same.
            positional, kwargs = _with_training(call, args, kwargs, was=False, now=True)
        self._not_training += draws
        calls_before = len(self.outputs)
        try:
            returned = call(*positional, **kwargs)
        except Exception as error:
            self.failure = self.failure or _Failure(layer, _line(error))
            raise
        finally:
            self._not_training -= draws
        name = self._names.get(id(layer))
        # Keras 2 also calls layers in a graph that it throws away, to learn the shapes of their results.
        if name is not None and tf.executing_eagerly():
            inputs, outputs = _floating((args, kwargs)), _floating(returned)
            passed_on = {id(tensor) for tensor in [*inputs, *(inner for _, inner in self.outputs[calls_before:])]}
            # Keras 2 casts the first argument only.
            cast = _floating(args[:1]) if is_keras2(self._keras) else inputs
            self.cast_inputs.extend((name, tensor) for tensor in cast)
            self.own_outputs.extend((name, tensor) for tensor in outputs if id(tensor) not in passed_on)
            self.inputs.extend((name, tensor) for tensor in inputs)
            self.outputs.extend((name, tensor) for tensor in outputs)
        return returned


def _line(error: Exception) -> str:
    """Return the first line of an error, without what TensorFlow writes before and behind it."""
    first = next(iter(str(error).splitlines()), "")
    return re.sub(r"^{{.*?}} | \[Op:.*$", "", first) or type(error).__name__


def _with_training(
    call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, was: bool, now: bool
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of a call with another value of `training`, if they have it with the value it was."""
    parameters = inspect.signature(call).parameters
    if "training" not in parameters:
        return args, kwargs
    position = list(parameters).index("training")
    if position < len(args) and args[position] is was:
        return [*args[:position], now, *args[position + 1 :]], kwargs
    return args, {**kwargs, "training": now} if kwargs.get("training") is was else kwargs


def _validate(keras: ModuleType, model: _Keras, loss_fn: Callable[..., Any] | None) -> None:
    if not model.built:
        raise ValueError(f"the model {model.name!r} has no variables yet: call it on a batch first, or build it.")
    if loss_fn is None and not is_compiled(keras, model):
        raise ValueError(f"loss_fn is None, and the model {model.name!r} is not compiled with a loss: pass loss_fn.")
    # Keras 3 has a function of its own for calls of quantized layers.
    _refuse([layer for layer in called_layers_of(keras, model) if is_quantized(keras, layer)])


def _is_of_other_type(keras: ModuleType, layer: _Keras) -> bool:
    return not tf.as_dtype(compute_dtype(keras, layer)).is_floating or is_quantized(keras, layer)


def _refuse(layers: Sequence[_Keras]) -> None:
    if layers:
        raise ValueError(
            "float16 cannot take the place of integers, in which these layers compute: "
            f"{', '.join(layer.name for layer in layers)}. Pass the part of the model behind them, or the model before "
            "it was quantized."
        )


def _layers(keras: ModuleType, model: _Keras) -> list[_Keras]:
    return [each for each in layers_of(model) if not isinstance(each, keras.layers.InputLayer)]


def _names(keras: ModuleType, layers: Sequence[_Keras], paths: Mapping[int, list[str]]) -> dict[int, str]:
    """Return names by the ids of the layers that are to be looked at.

    A model only calls its layers, so it is looked at only if it has weights of its own. A layer whose name another one
    has, too, is named together with the layer that holds it.
    """
    by_id = {id(layer): layer for layer in layers}
    owners = {id(layer) for layer in _layers_by_variable(list(by_id.values())).values()}
    looked_at = {key: path for key, path in paths.items() if key in owners or not isinstance(by_id[key], keras.Model)}
    last = Counter(path[-1] for path in looked_at.values())
    names = (path[-1] if last[path[-1]] == 1 else "/".join(path) for path in looked_at.values())
    return dict(zip(looked_at, told_apart(names), strict=True))


def _layers_by_variable(layers: Sequence[_Keras]) -> dict[int, _Keras]:
    """Return, by the id of a trained variable, the innermost layer that holds it."""
    found: dict[int, _Keras] = {}
    for layer in layers:
        inner = {id(each) for part in layers_directly_in(layer) for each in part.trainable_variables}
        found.update((id(each), layer) for each in layer.trainable_variables if id(each) not in inner)
    return found


def _floating(nest: _Keras) -> list[tf.Tensor]:
    return [each for each in tf.nest.flatten(nest) if isinstance(each, tf.Tensor) and each.dtype.is_floating]


def _tensor(value: _Keras) -> _Keras:
    """Return a part of a batch as a tensor; float64 as float32, as `fit` does."""
    if value is None:
        return None
    tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(value)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.float64 else tensor
