"""Checks a model of Keras, through its layers."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.ranges.check import keras_internals
from tfmp.ranges.check.functions import by_name
from tfmp.ranges.check.passes import Pass, PassTensors, Precision, measurements, pass_of

#: An object of any Keras.
_Keras: TypeAlias = Any

_HALF = ("float16", "bfloat16")


class KerasModel:
    """A model of any Keras that is built, with the loss that it is trained on.

    Args:
        keras: The package that the model is of.
        model: The model.
        loss_fn: The loss, a function of the labels and the model's outputs or a name that Keras knows; None for the
            loss that the model is compiled with.

    Raises:
        ValueError: The model is not built, is not compiled and has no `loss_fn`, has nothing to train, or has a layer
            that computes in integers.
    """

    has_float16 = True
    keeps_float32 = True

    def __init__(self, keras: ModuleType, model: _Keras, loss_fn: Callable[..., Any] | str | None) -> None:
        self._keras = keras
        self._model = model
        self._loss_fn = keras.losses.get(loss_fn)
        self._layers = _layers(keras, model)
        _validate(model, self._layers, self._loss_fn)
        self._names = _names(keras, model)
        self._layer_of_variable = _layers_by_variable(self._layers)
        computes_in_half = [layer for layer in self._layers if layer.compute_dtype in _HALF]
        # A model that computes in half precision already has layers that the user keeps in float32.
        self._may_be_half = {id(layer) for layer in computes_in_half or self._layers}

    def run(self, batch: Any, precision: Precision) -> Pass:  # noqa: ANN401 - whatever the model takes
        """Run a batch forward and backward, as in training, but without the layers that draw random numbers.

        Args:
            batch: Inputs and labels, and perhaps the weights of the examples, as in `fit`.
            precision: How to compute.
        """
        inputs: list[tuple[str, tf.Tensor]] = []
        outputs: list[tuple[str, tf.Tensor]] = []

        def called(layer: _Keras, call: Callable[..., Any], *args: _Keras, **kwargs: _Keras) -> _Keras:
            if kwargs.get("training") and keras_internals.draws_random_numbers(layer):
                # Dropout would draw another mask in float16 than in float32.
                kwargs["training"] = False
            returned = call(*args, **kwargs)
            name = self._names.get(id(layer))
            # Keras 2 also calls layers in a graph that it throws away, to learn the shapes of their results.
            if name is not None and tf.executing_eagerly():
                inputs.extend((name, tensor) for tensor in _floating((args, kwargs)))
                outputs.extend((name, tensor) for tensor in _floating(returned))
            return returned

        with self._prepared(precision, called):
            with tf.GradientTape() as tape:
                loss = self._loss(batch)
                scaled = loss * precision.loss_scale
            variables = [_value(variable) for variable in self._model.trainable_variables]
            with keras_internals.on_first_replica(self._keras, self._model):
                grads = tape.gradient(scaled, [*(tensor for _, tensor in outputs), *variables])
        names = [self._names[id(self._layer_of_variable[id(each)])] for each in self._model.trainable_variables]
        of_outputs, of_variables = grads[: len(outputs)], grads[len(outputs) :]
        tensors = PassTensors(
            loss=loss,
            inputs=by_name(inputs),
            outputs=by_name(outputs),
            output_gradients=by_name((name, grad) for (name, _), grad in zip(outputs, of_outputs, strict=True)),
            weights=by_name(zip(names, map(tf.convert_to_tensor, variables), strict=True)),
            weight_gradients=by_name(zip(names, of_variables, strict=True)),
        )
        return pass_of(
            tf.nest.map_structure(lambda tensor: tensor.numpy(), measurements(tensors)), precision.loss_scale
        )

    @contextlib.contextmanager
    def _prepared(self, precision: Precision, called: Callable[..., Any]) -> Iterator[None]:
        """Let the layers compute in the types of a pass and be called through a function, and keep the model's state.

        Args:
            precision: How to compute.
            called: Takes a layer, its own `call`, and what it is called with; returns what the layer is to return.
        """
        in_float32 = self._kept_in_float32(precision)
        with contextlib.ExitStack() as changed:
            for layer in self._layers:
                if precision.dtype is not None:
                    policy = "float32" if id(layer) in in_float32 else "mixed_float16"
                    changed.enter_context(keras_internals.computing_in(self._keras, layer, policy))
                changed.enter_context(keras_internals.called_through(layer, functools.partial(called, layer)))
            changed.enter_context(keras_internals.state_unchanged(self._keras, self._model))
            yield

    def _kept_in_float32(self, precision: Precision) -> set[int]:
        if precision.dtype != "float16":
            return set(map(id, self._layers))
        named = [layer for layer in self._layers if self._names.get(id(layer)) in precision.keep_float32]
        # A layer that is kept takes the layers that it holds with it.
        kept = {id(inner) for layer in named for inner in keras_internals.layers_of(layer)}
        return kept | (set(map(id, self._layers)) - self._may_be_half)

    def _loss(self, batch: Any) -> tf.Tensor:  # noqa: ANN401 - whatever the model takes
        """Return the loss of a batch as `fit` would compute it, a float32 scalar that is not scaled."""
        x, y, weights = self._keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(_tensor, batch))
        outputs = self._model(x, training=True)
        if self._loss_fn is None:
            loss = keras_internals.compiled_loss(
                self._keras, self._model, x=x, y=y, y_pred=outputs, sample_weight=weights
            )
            if loss is None:
                raise ValueError(f"the model {self._model.name!r} was compiled without a loss, and adds none.")
            return arithmetic.widen(loss)
        if isinstance(self._loss_fn, self._keras.losses.Loss):
            values = self._loss_fn(y, outputs, sample_weight=weights)
        else:
            values = arithmetic.widen(tf.convert_to_tensor(self._loss_fn(y, outputs)))
            values = values if weights is None else values * tf.cast(weights, values.dtype)
        added = [tf.cast(loss, tf.float32) for loss in self._model.losses]
        return tf.add_n([tf.reduce_mean(arithmetic.widen(values)), *added])


def _validate(model: _Keras, layers: Sequence[_Keras], loss_fn: Callable[..., Any] | None) -> None:
    if not model.built:
        raise ValueError(f"the model {model.name!r} has no variables yet: call it on a batch first, or build it.")
    if loss_fn is None and not getattr(model, "compiled", getattr(model, "_is_compiled", False)):
        raise ValueError(f"loss_fn is None, and the model {model.name!r} is not compiled with a loss: pass loss_fn.")
    integers = [layer.name for layer in layers if not tf.as_dtype(layer.compute_dtype).is_floating]
    quantized = [layer.name for layer in layers if getattr(layer, "quantization_mode", None)]
    if integers or quantized:
        raise ValueError(
            "float16 cannot take the place of integers, in which these layers compute: "
            f"{', '.join(integers or quantized)}. Pass the part of the model behind them, or the model before it was "
            "quantized."
        )


def _layers(keras: ModuleType, model: _Keras) -> list[_Keras]:
    return [each for each in keras_internals.layers_of(model) if not isinstance(each, keras.layers.InputLayer)]


def _names(keras: ModuleType, model: _Keras) -> dict[int, str]:
    """Return names by the ids of the layers that are to be looked at.

    A model only calls its layers, so it is looked at only if it has weights of its own. A layer whose name another one
    has, too, is named together with the layer that holds it.
    """
    paths: dict[int, list[str]] = {}

    def walk(layer: _Keras, outer: list[str]) -> None:
        for inner in keras_internals.layers_directly_in(layer):
            if id(inner) not in paths and not isinstance(inner, keras.layers.InputLayer):
                paths[id(inner)] = [*outer, inner.name]
                walk(inner, paths[id(inner)])

    walk(model, [])
    by_id = {id(layer): layer for layer in [model, *_layers(keras, model)]}
    owners = {id(layer) for layer in _layers_by_variable(list(by_id.values())).values()}
    paths.setdefault(id(model), [model.name])
    looked_at = {key: path for key, path in paths.items() if key in owners or not isinstance(by_id[key], keras.Model)}
    last = Counter(path[-1] for path in looked_at.values())
    return {key: path[-1] if last[path[-1]] == 1 else "/".join(path) for key, path in looked_at.items()}


def _layers_by_variable(layers: Sequence[_Keras]) -> dict[int, _Keras]:
    """Return, by the id of a trained variable, the innermost layer that holds it."""
    found: dict[int, _Keras] = {}
    for layer in layers:
        inner = {id(each) for part in keras_internals.layers_directly_in(layer) for each in part.trainable_variables}
        found.update((id(each), layer) for each in layer.trainable_variables if id(each) not in inner)
    return found


def _floating(nest: _Keras) -> list[tf.Tensor]:
    return [each for each in tf.nest.flatten(nest) if isinstance(each, tf.Tensor) and each.dtype.is_floating]


def _tensor(value: _Keras) -> tf.Tensor | None:
    """Return a part of a batch as a tensor; float64 as float32, as `fit` does."""
    tensor = None if value is None else tf.convert_to_tensor(value)
    return tf.cast(tensor, tf.float32) if tensor is not None and tensor.dtype == tf.float64 else tensor


def _value(variable: _Keras) -> _Keras:
    # A variable of Keras 3 holds one of TensorFlow, by which tapes differentiate.
    return variable if isinstance(variable, tf.Variable) else variable.value
