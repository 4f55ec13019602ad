"""Hosts: optimizers that train what they are fed and tell their state after each step. Here those of TensorFlow 1.

A new host adds a class and a line in `kit.installed`, and is tested by all of tests/contract.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tfmp
from kit.oracle import Rule, Steps
from kit.structures import Fed, Structure

tf1 = tf.compat.v1

#: Makes further arguments of a wrapper.
Settings = Callable[[], Mapping[str, Any]]


class State(NamedTuple):
    """The state of a training after a step or a micro-batch.

    Attributes:
        moving: The values that only an applied step may change, for each replica: weights, slots, averages, and for
            Keras the count of steps.
        steps: The host's count of steps.
        told: What tfmp tells, as far as the host tells it: by the names of the fields of `Expected`.
    """

    moving: list[np.ndarray]
    steps: int
    told: Mapping[str, Any]


def as_json(state: State) -> list[Any]:
    """Return what JSON can hold of a state, for `from_json`."""
    numbers = tf.nest.map_structure(lambda value: np.asarray(value).tolist(), dict(state.told))
    return [[value.tolist() for value in state.moving], state.steps, numbers]


def from_json(values: Sequence[Any]) -> State:
    """Return the state that `as_json` made values of."""
    moving, steps, told = values
    return State([np.float64(value) for value in moving], steps, told)


class Host(abc.ABC):
    """An optimizer where it is used, such as a session or Keras' `fit`; it is built or traced once, and trains often.

    Without a `rule` the optimizer is not wrapped. `make_settings` makes the other arguments of the wrapper; those of
    `tfmp.GradScaler` get the same names. Beside them, `records_norm` asks for norms, `clip` is what the script does to
    the gradients, and `wrap` takes the place of `tfmp.LossScaleOptimizer`. Without a `strategy` there is one device.
    """

    #: What the host cannot do: names that scenarios need.
    lacks: frozenset[str] = frozenset()

    def __init__(
        self,
        structure: Structure,
        rule: Rule | None,
        make_settings: Settings = dict,
        *,
        keras: ModuleType | None = None,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        self.structure, self.rule = structure, rule
        self._keras: Any = keras
        self._strategy = strategy or tf.distribute.get_strategy()
        self._make_settings = make_settings
        self._clip: Callable[[Sequence[Any]], Sequence[Any]] | None = make_settings().get("clip")

    @abc.abstractmethod
    def begin(self) -> None:
        """Reset everything to the values before the first step."""

    @abc.abstractmethod
    def train(self, steps: Steps) -> list[State]:
        """Take steps, and return the state before the first step and the state after each step."""

    def save(self, directory: Path) -> None:
        """Write a checkpoint."""
        self._checkpoint().save(directory / "checkpoint")

    def restore(self, directory: Path) -> None:
        """Begin anew, and restore a checkpoint."""
        self.begin()
        self._checkpoint().restore(tf.train.latest_checkpoint(directory)).assert_existing_objects_matched()

    def _checkpoint(self) -> tf.train.Checkpoint:
        """Return the checkpoint of all that goes on."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the wrapper."""
        assert self.rule is not None
        manager = tfmp.ExponentialUpdateLossScaleManager(**self.rule._asdict())
        settings = {"loss_scale_manager": manager, **self._make_settings()}
        settings.pop("clip", None)
        return settings

    def result_of_step(self, told: dict[str, Any]) -> dict[str, Any]:
        """Take the norm out of what a graph tells, and return it, if it must be fetched with the step.

        With accumulation the step is in a conditional, and the norm is kept in a variable.
        """
        return {} if "accumulation_steps" in self._make_settings() or "norm" not in told else {"norm": told.pop("norm")}

    def optimizer(self, inner: Any) -> Any:
        """Return an optimizer in tfmp's wrapper; without a rule, the optimizer itself."""
        if self.rule is None:
            return inner
        settings = self.settings()
        records_norm = settings.pop("records_norm", False)
        opt = settings.pop("wrap", tfmp.LossScaleOptimizer)(inner, **settings)
        if records_norm:
            opt.record_gradient_norm()
        return opt


def told_by(opt: Any) -> dict[str, Any]:
    """Return what a wrapper or a scaler tells, by the names of the fields of `Expected`; another one tells nothing."""
    # Horovod's optimizer for TensorFlow 1 does not forward the properties of the one within it.
    opt = opt if isinstance(opt, tfmp.LossScaleOptimizer | tfmp.GradScaler) else getattr(opt, "_optimizer", opt)
    if not isinstance(opt, tfmp.LossScaleOptimizer | tfmp.GradScaler):
        return {}
    told = {
        "applied": opt.applied_steps,
        "skipped": opt.skipped_steps,
        "in_a_row": opt.consecutive_skipped_steps,
        "last_finite": opt.last_step_finite,
        "last_applied": opt.last_step_applied,
        "spikes": opt.skipped_spikes,
        "loss_scale": opt.loss_scale,
    }
    if opt.records_gradient_norm:
        told["norm"] = opt.gradient_norm
    for report in opt.overflow_reports():
        names = [name.split("/")[-1].split(":")[0] for name in report.names]
        told["overflowed"] = dict(zip(names, tf.unstack(report.steps), strict=True))
    return told


def state_of(moving: Sequence[Any], steps: Any, told: Mapping[str, Any]) -> State:
    """Return a state made from values."""
    return State(
        list(map(np.asarray, moving)), int(steps), tf.nest.map_structure(lambda value: np.asarray(value)[()], told)
    )


def v1_optimizer(structure: Structure) -> tf1.train.Optimizer:
    """Return an inner optimizer with the options of a structure."""
    momentum = structure.options.get("momentum")
    return tf1.train.MomentumOptimizer(0.5, momentum) if momentum else tf1.train.GradientDescentOptimizer(0.5)


def minimize(
    opt: Any,
    loss: Any,
    step: tf.Variable,
    variables: Sequence[tf.Variable],
    clip: Callable[[Sequence[Any]], Sequence[Any]] | None,
) -> Any:
    """Minimize a loss by an optimizer of TensorFlow 1, whose gradients the script may clip."""
    if clip is None:
        return opt.minimize(loss, step, var_list=variables)
    grads, _ = zip(*opt.compute_gradients(loss, variables), strict=True)
    return opt.apply_gradients(zip(clip(grads), variables, strict=True), step)


def graph_variables(structure: Structure, use_resource: bool | None = None) -> dict[str, tf.Variable]:
    """Make the variables of a structure in a graph."""
    return {
        name: tf1.get_variable(name, each.shape, each.dtype, _initializer(each), use_resource=use_resource)
        for name, each in structure.initial.items()
    }


class V1Graph(Host):
    """A `tf.compat.v1.train.Optimizer` in a session."""

    def __init__(self, *given: Any, use_resource: bool = True, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.graph = tf.Graph()
        structure, strategy = self.structure, self._strategy
        with self.graph.as_default(), strategy.scope():
            variables = graph_variables(structure, use_resource)
            step = tf1.train.get_or_create_global_step()
            self._fed = [
                {name: tf1.placeholder(spec.dtype, spec.shape) for name, spec in structure.fed.items()}
                for _ in range(strategy.num_replicas_in_sync)
            ]
            opt = self._make_optimizer(step)

            def on_replica() -> tf.Operation:
                loss = structure.loss(variables, self._fed[replica_number()])
                return self._minimize(opt, loss, step, list(variables.values()))

            self._train_op = tf.group(strategy.experimental_local_results(strategy.run(on_replica)))
            moving = [*variables.values(), *opt.variables()]
            local = [part.read_value() for each in moving for part in strategy.experimental_local_results(each)]
            told = told_by(opt)
            self._norm = self.result_of_step(told)
            self._fetches = [local, step.read_value(), told]
            self._saver = tf1.train.Saver()
            self._initialize = tf1.global_variables_initializer()

    def _make_optimizer(self, step: tf.Variable) -> Any:
        del step
        return self.optimizer(v1_optimizer(self.structure))

    def _minimize(self, opt: Any, loss: tf.Tensor, step: tf.Variable, variables: Sequence[tf.Variable]) -> tf.Operation:
        return minimize(opt, loss, step, variables, self._clip)

    def begin(self) -> None:
        # A new session, because only there the wrapper's counts of steps are 0 again.
        self._new_session()
        self._session.run(self._initialize)

    def train(self, steps: Steps) -> list[State]:
        states = [self._state({})]
        for feds in steps:
            placeholders = {
                placeholder: fed[name]
                for of_replica, fed in zip(self._fed, feds, strict=True)
                for name, placeholder in of_replica.items()
            }
            _, norm = self._session.run([self._train_op, self._norm], placeholders)
            states.append(self._state(norm))
        return states

    def save(self, directory: Path) -> None:
        with self.graph.as_default():
            self._saver.save(self._session, str(directory / "model.ckpt"))

    def restore(self, directory: Path) -> None:
        self._new_session()
        with self.graph.as_default():
            self._saver.restore(self._session, str(directory / "model.ckpt"))

    def _new_session(self) -> None:
        if hasattr(self, "_session"):
            self._session.close()
        self._session = tf1.Session(graph=self.graph)

    def _state(self, norm: Mapping[str, Any]) -> State:
        moving, steps, told = self._session.run(self._fetches)
        return state_of(moving, steps, told | norm)


def replica_number() -> int:
    """Return the index of the replica whose part of the graph is being built."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


class Loop(Host):
    """A loop in eager code or in a function, whose variables are made anew by `begin`.

    `compiled` makes a `tf.function` of a function that takes a step, and of its signature; None is for eager steps.
    """

    def __init__(self, *given: Any, compiled: Callable[..., Any] | None = None, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._compiled = compiled

    def _make(self) -> None:
        """Make the variables and the optimizer, in the strategy's scope."""
        raise NotImplementedError

    @abc.abstractmethod
    def _on_replica(self, fed: Fed) -> None:
        """Take a step on one replica."""

    @abc.abstractmethod
    def _state(self) -> State:
        """Return the state after the last step."""

    def begin(self) -> None:
        with self._strategy.scope():
            self._make()
        self._compile()

    def _compile(self) -> None:
        signature = [[dict(self.structure.fed)] * self._strategy.num_replicas_in_sync]
        self._run = self._compiled(self._take_step, signature) if self._compiled else self._take_step

    def train(self, steps: Steps) -> list[State]:
        states = [self._state()]
        for feds in steps:
            self._run([tf.nest.map_structure(tf.convert_to_tensor, dict(fed)) for fed in feds])
            states.append(self._state())
        return states

    def _take_step(self, feds: Sequence[Fed]) -> None:
        if len(feds) == 1:
            self._on_replica(feds[0])
        else:
            self._strategy.run(lambda: self._on_replica(feds[replica_number()]))


def step_counter() -> tf.Variable:
    """Make a count of steps, of which the replicas of a strategy write one."""
    only_first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=only_first)


class V1Eager(Loop):
    """A `tf.compat.v1.train.Optimizer` in eager code, or in a function."""

    def _make(self) -> None:
        self._variables = {name: tf.Variable(value, name=name) for name, value in self.structure.initial.items()}
        self._step = step_counter()
        self._inner = v1_optimizer(self.structure)
        self._opt = self.optimizer(self._inner)

    def _on_replica(self, fed: Fed) -> None:
        minimize(
            self._opt,
            lambda: self.structure.loss(self._variables, fed),
            self._step,
            list(self._variables.values()),
            self._clip,
        )

    def _checkpoint(self) -> tf.train.Checkpoint:
        parts = {"step": self._step, "optimizer": self._inner, **self._variables}
        if self.rule:
            parts |= {"manager": self._opt.manager, "accumulation": self._opt.accumulation}
        if self.rule and self._opt.spike_detector is not None:
            parts["detector"] = self._opt.spike_detector
        return tf.train.Checkpoint(**parts)

    def _state(self) -> State:
        moving = weights_and_momenta(self._strategy, self._inner, list(self._variables.values()))
        with self._strategy.scope():
            return state_of(moving, self._step.numpy(), told_by(self._opt))


def weights_and_momenta(
    strategy: tf.distribute.Strategy, opt: tf1.train.Optimizer, weights: Sequence[tf.Variable]
) -> list[tf.Tensor]:
    """Return the values of weights and of their slots on each replica.

    A slot that does not exist yet counts as 0, the value that it starts from.
    """
    slots = [opt.get_slot(weight, "momentum") for weight in weights]
    pairs = [*((weight, 1) for weight in weights)]
    pairs += [(weight, 0) if slot is None else (slot, 1) for weight, slot in zip(weights, slots, strict=True)]
    return [part * factor for each, factor in pairs for part in strategy.experimental_local_results(each)]


def dataset(structure: Structure, steps: Steps) -> tf.data.Dataset:
    """Return the values that the steps of one replica are fed, as a dataset."""

    def rows() -> Iterator[Fed]:
        for (fed,) in steps:
            yield dict(fed)

    feds = tf.data.Dataset.from_generator(rows, output_signature=dict(structure.fed))
    return feds.apply(tf.data.experimental.assert_cardinality(len(steps)))


def _initializer(value: np.ndarray) -> Any:
    """Return the initializer of a variable; of a large one, all elements must be 1."""
    # A large value would become a large constant in the graph.
    is_large = value.size > 1000
    return tf1.ones_initializer() if is_large else lambda shape, dtype=None, **_: tf.reshape(value, shape)
