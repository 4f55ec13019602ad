"""The hosts that are Keras 2, Keras 3 and tf_keras."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

import tfmp
from kit.hosts import Host, Loop, State, V1Graph, dataset, state_of, told_by
from kit.oracle import Steps
from kit.structures import Fed


class _Keras(Host):
    """The base class of loops and `fit`: it resets, saves and restores variables, and reads the state."""

    def _set_up(self, weights: Sequence[Any], opt: Any) -> None:
        self._weights = [of_tensorflow(weight) for weight in weights]
        self._opt = opt
        inner = opt.inner_optimizer if isinstance(opt, tfmp.LossScaleOptimizer) else opt
        self._moving = [*self._weights, *map(of_tensorflow, self._variables(inner))]
        held = [*self._moving, *map(of_tensorflow, self._variables(opt))]
        # By identity: variables compare by value.
        self._held = list({id(each): each for each in held}.values())
        self._at_start = [each.numpy() for each in self._held]

    def _built(self, weights: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return an optimizer with these options that has made its variables."""
        opt = self.optimizer(self._keras.optimizers.SGD(0.5, **options))
        opt.build(weights)
        return opt

    def _variables(self, opt: Any) -> Sequence[Any]:
        return opt.variables

    def begin(self) -> None:
        for each, value in zip(self._held, self._at_start, strict=True):
            each.assign(value)

    def _checkpoint(self) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(weights=self._weights, optimizer=self._opt)

    def _state(self) -> State:
        with self._strategy.scope():
            results = self._strategy.experimental_local_results
            moving = [part.numpy() for variable in self._moving for part in results(variable)]
            return state_of(moving, self._opt.iterations.numpy(), told_by(self._opt))


class KerasLoop(_Keras, Loop):
    """A custom training loop, with the wrapper's setting `jit_compile`.

    Without `averages` the optimizer averages no weights, as the structure may ask for: under a strategy Keras 3 fails.
    """

    def __init__(self, *given: Any, jit_compile: bool | None = None, averages: bool = True, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._compiles = {} if jit_compile is None else {"jit_compile": jit_compile}
        structure = self.structure
        options = {name: value for name, value in structure.options.items() if averages or "ema" not in name}
        with self._strategy.scope():
            make = getattr(self._keras, "Variable", tf.Variable)
            weights = {
                name: make(value, name=name, dtype=value.dtype.name) for name, value in structure.initial.items()
            }
            self._set_up(list(weights.values()), self._built(list(weights.values()), options))
        self._by_name = weights
        self._compile()

    def settings(self) -> dict[str, Any]:
        return self._compiles | super().settings()

    def _on_replica(self, fed: Fed) -> None:
        variables = {name: of_tensorflow(weight) for name, weight in self._by_name.items()}
        with tf.GradientTape() as tape:
            loss = self.structure.loss(variables, fed)
            if self.rule:
                loss = self._opt.get_scaled_loss(loss) if self._unscales else self._opt.scale_loss(loss)
        grads = tape.gradient(loss, list(variables.values()))
        if self.rule and self._unscales:
            grads = self._opt.get_unscaled_gradients(grads)
        grads = grads if self._clip is None else self._clip(grads)
        self._opt.apply_gradients(zip(grads, self._by_name.values(), strict=True))

    @property
    def _unscales(self) -> bool:
        """Whether the loop unscales gradients itself; otherwise `apply_gradients` unscales them."""
        return self._clip is not None


class KerasFit(_Keras):
    """Training with a model's `fit`."""

    lacks = frozenset({"clip"})

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        structure = self.structure

        class Model(self._keras.Model):  # type: ignore[name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.held = {
                    name: self.add_weight(name=name, shape=value.shape, dtype=value.dtype.name, initializer="zeros")
                    for name, value in structure.initial.items()
                }

            def call(self, fed: Fed) -> tf.Tensor:
                variables = {name: of_tensorflow(weight) for name, weight in self.held.items()}
                return tf.reshape(structure.loss(variables, fed), [1])

        self._model = Model()
        self._model.built = True
        weights = list(self._model.held.values())
        for weight, value in zip(weights, structure.initial.values(), strict=True):
            weight.assign(value)
        opt = self._built(weights, structure.options)
        self._model.compile(opt, loss=_output)
        self._set_up(weights, opt)

    def train(self, steps: Steps) -> list[State]:
        states = [self._state()]
        note = self._keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: states.append(self._state()))
        fed = dataset(self.structure, steps).map(lambda fed: (fed, tf.zeros([1])))
        self._model.fit(fed, shuffle=False, verbose=0, callbacks=[note])
        return states


class LegacyLoop(KerasLoop):
    """A custom training loop with a legacy optimizer, which unscales gradients itself, as those of Keras 2 do.

    The arguments are those of `KerasLoop`. Legacy optimizers have neither moving averages nor the method `build`.
    """

    def _built(self, weights: Sequence[Any], options: Mapping[str, Any]) -> Any:
        opt = self.optimizer(legacy_sgd(self._keras, options))
        opt._create_all_weights(weights)
        # The manager makes its variables when they are first read.
        told_by(opt)
        return opt

    def _variables(self, opt: Any) -> Sequence[Any]:
        of_manager = opt.manager.variables if isinstance(opt, tfmp.LossScaleOptimizer) else []
        return [*opt.variables(), *of_manager]

    @property
    def _unscales(self) -> bool:
        return True


class LegacyGraph(V1Graph):
    """A legacy optimizer in a session, which counts its steps in the global step, as under Estimator."""

    lacks = frozenset({"clip"})

    def _make_optimizer(self, step: tf.Variable) -> Any:
        opt = self.optimizer(legacy_sgd(self._keras, self.structure.options))
        opt.iterations = step
        return opt

    def _minimize(self, opt: Any, loss: tf.Tensor, step: tf.Variable, variables: Sequence[tf.Variable]) -> tf.Operation:
        del step
        # Keras refuses a variable here that the loss does not depend on.
        grads = tf.compat.v1.gradients(loss, variables)
        used = [variable for variable, grad in zip(variables, grads, strict=True) if grad is not None]
        return tf.group(opt.get_updates(loss, used))


def legacy_sgd(keras: ModuleType, options: Mapping[str, Any]) -> Any:
    """Return a legacy optimizer with the options of a structure that it has."""
    return keras.optimizers.legacy.SGD(0.5, **{name: value for name, value in options.items() if "ema" not in name})


def _output(target: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    del target
    return output


def compiled(step: Callable[..., Any], signature: Any, **settings: Any) -> Callable[..., Any]:
    """Return a `tf.function` that takes a step, and is traced once."""
    # Without AutoGraph: it would take seconds to look through all code that a step calls, and find nothing to convert.
    return tf.function(step, input_signature=signature, autograph=False, **settings)


by_xla = functools.partial(compiled, jit_compile=True)


def of_tensorflow(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` inside a Keras 3 variable; a `tf.Variable` is returned as it is."""
    return variable if isinstance(variable, tf.Variable) else variable.value
