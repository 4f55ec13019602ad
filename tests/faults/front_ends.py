"""The front-ends, as the faults see them: train, and tell the state after every step."""

import abc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from faults import Rule
from structures import Fed, Structure

import tfmp

tf1 = tf.compat.v1

#: What each step is fed, one for each replica.
Steps = Sequence[Sequence[Fed]]


class State(NamedTuple):
    """What there is after a step.

    Attributes:
        moving: All that only an applied step may move: weights, slots, averages, the count of steps; for each replica.
        steps: The count of steps.
        loss_scale: The scale; 1 without a wrapper.
        outcomes: Steps applied, skipped, skipped in a row, and whether the last was applied.
    """

    moving: list[np.ndarray]
    steps: int
    loss_scale: float
    outcomes: tuple[int, int, int, bool]


def manager(rule: Rule) -> tfmp.LossScaleManager:
    """Make a manager.

    Args:
        rule: Its settings.
    """
    return tfmp.ExponentialUpdateLossScaleManager(**rule._asdict())


class FrontEnd(abc.ABC):
    """An optimizer in its host, traced or built once, that trains a structure again and again.

    Args:
        structure: What is trained.
        rule: The manager's settings; None for an optimizer in no wrapper.
    """

    def __init__(self, structure: Structure, rule: Rule | None) -> None:
        self.structure = structure
        self.rule = rule

    @abc.abstractmethod
    def begin(self) -> None:
        """Go back to the start."""

    @abc.abstractmethod
    def train(self, steps: Steps) -> list[State]:
        """Take steps, and return the state before them, and those after each.

        Args:
            steps: What they are fed.
        """

    @abc.abstractmethod
    def save(self, directory: Path) -> None:
        """Write a checkpoint.

        Args:
            directory: Where.
        """

    @abc.abstractmethod
    def restore(self, directory: Path) -> None:
        """Go back to a checkpoint.

        Args:
            directory: Where it is.
        """

    def optimizer(self, inner: Any) -> Any:
        """Wrap an optimizer, or do not."""
        return tfmp.LossScaleOptimizer(inner, manager(self.rule)) if self.rule else inner


def outcomes_of(opt: Any) -> list[Any]:
    """Return what a wrapper tells of the scale and the steps: tensors, or values.

    Args:
        opt: The optimizer; without a wrapper there is nothing to tell.
    """
    if not isinstance(opt, tfmp.LossScaleOptimizer):
        return [1.0, 0, 0, 0, True]
    return [
        opt.loss_scale,
        opt.applied_steps,
        opt.skipped_steps,
        opt.consecutive_skipped_steps,
        opt.last_step_finite,
    ]


def state_of(moving: Sequence[Any], steps: Any, outcomes: Sequence[Any]) -> State:
    """Make a state of values.

    Args:
        moving: All that only an applied step may move.
        steps: The count of steps.
        outcomes: What `outcomes_of` returned.
    """
    scale, applied, skipped, in_a_row, finite = outcomes
    return State(
        [np.asarray(value) for value in moving],
        int(steps),
        float(scale),
        (int(applied), int(skipped), int(in_a_row), bool(finite)),
    )


def as_tensors(values: Sequence[Any]) -> list[tf.Tensor]:
    """Make tensors of what may be numbers, which no session fetches.

    Args:
        values: Tensors or numbers.
    """
    return [tf.convert_to_tensor(value) for value in values]


def v1_optimizer(structure: Structure) -> tf1.train.Optimizer:
    """Make the optimizer that a structure asks for.

    Args:
        structure: What is trained.
    """
    momentum = structure.options.get("momentum")
    return tf1.train.MomentumOptimizer(0.5, momentum) if momentum else tf1.train.GradientDescentOptimizer(0.5)


class V1Graph(FrontEnd):
    """A `tf.compat.v1.train.Optimizer` in a session.

    Args:
        structure: What is trained.
        rule: The manager's settings; None for an optimizer in no wrapper.
        use_resource: Whether variables are resource variables, or reference variables.
        strategy: On whose replicas.
    """

    def __init__(
        self,
        structure: Structure,
        rule: Rule | None,
        *,
        use_resource: bool = True,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        super().__init__(structure, rule)
        self._graph = tf.Graph()
        strategy = strategy or tf.distribute.get_strategy()
        with self._graph.as_default(), strategy.scope():
            variables = {
                name: tf1.get_variable(
                    name,
                    shape=value.shape,
                    dtype=tf.as_dtype(value.dtype),
                    initializer=initializer(value),
                    use_resource=use_resource,
                )
                for name, value in structure.initial.items()
            }
            step = tf1.train.get_or_create_global_step()
            self._fed = [
                {name: tf1.placeholder(spec.dtype, spec.shape) for name, spec in structure.fed.items()}
                for _ in range(strategy.num_replicas_in_sync)
            ]
            opt = self.optimizer(v1_optimizer(structure))

            def on_replica() -> tf.Operation:
                loss = structure.loss(variables, self._fed[replica_number()])
                return opt.minimize(loss, step, var_list=list(variables.values()))

            self._train_op = tf.group(strategy.experimental_local_results(strategy.run(on_replica)))
            moving = [*variables.values(), *opt.variables()]
            local = [part.read_value() for each in moving for part in strategy.experimental_local_results(each)]
            self._fetches = [local, step.read_value(), as_tensors(outcomes_of(opt))]
            self._saver = tf1.train.Saver()
            self._initialize = tf1.global_variables_initializer()

    def begin(self) -> None:
        # In a new session the counts of steps are 0.
        self._new_session()
        self._session.run(self._initialize)

    def train(self, steps: Steps) -> list[State]:
        states = [self._state()]
        for feds in steps:
            placeholders = {
                placeholder: fed[name]
                for of_replica, fed in zip(self._fed, feds, strict=True)
                for name, placeholder in of_replica.items()
            }
            self._session.run(self._train_op, placeholders)
            states.append(self._state())
        return states

    def save(self, directory: Path) -> None:
        with self._graph.as_default():
            self._saver.save(self._session, str(directory / "model.ckpt"))

    def restore(self, directory: Path) -> None:
        self._new_session()
        with self._graph.as_default():
            self._saver.restore(self._session, str(directory / "model.ckpt"))

    def _new_session(self) -> None:
        if hasattr(self, "_session"):
            self._session.close()
        self._session = tf1.Session(graph=self._graph)

    def _state(self) -> State:
        return state_of(*self._session.run(self._fetches))


def replica_number() -> int:
    """Return the number of the replica that is being built."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


class V1Eager(FrontEnd):
    """A `tf.compat.v1.train.Optimizer` in eager code."""

    def begin(self) -> None:
        self._variables = {name: tf.Variable(value, name=name) for name, value in self.structure.initial.items()}
        self._step = tf.Variable(0, dtype=tf.int64)
        self._inner = v1_optimizer(self.structure)
        self._opt = self.optimizer(self._inner)

    def train(self, steps: Steps) -> list[State]:
        states = [self._state()]
        for (fed,) in steps:
            tensors = tf.nest.map_structure(tf.convert_to_tensor, dict(fed))
            self._opt.minimize(
                lambda tensors=tensors: self.structure.loss(self._variables, tensors),
                self._step,
                var_list=list(self._variables.values()),
            )
            states.append(self._state())
        return states

    def save(self, directory: Path) -> None:
        self._checkpoint().save(directory / "checkpoint")

    def restore(self, directory: Path) -> None:
        self.begin()
        self._checkpoint().restore(tf.train.latest_checkpoint(directory))

    def _checkpoint(self) -> tf.train.Checkpoint:
        parts = {"step": self._step, "optimizer": self._inner, **self._variables}
        if self.rule:
            parts["manager"] = self._opt._loss_scale_manager
        return tf.train.Checkpoint(**parts)

    def _state(self) -> State:
        weights = [variable.numpy() for variable in self._variables.values()]
        # A slot that is not made yet is what it starts from.
        slots = [self._inner.get_slot(variable, "momentum") for variable in self._variables.values()]
        momenta = [0 * w if slot is None else slot.numpy() for w, slot in zip(weights, slots, strict=True)]
        return state_of([*weights, *momenta], self._step.numpy(), outcomes_of(self._opt))


def dataset(structure: Structure, steps: Steps) -> tf.data.Dataset:
    """Return what one replica is fed, as a dataset.

    Args:
        structure: What is trained.
        steps: What each step is fed.
    """

    def rows() -> Iterator[Fed]:
        for (fed,) in steps:
            yield dict(fed)

    feds = tf.data.Dataset.from_generator(rows, output_signature=dict(structure.fed))
    return feds.apply(tf.data.experimental.assert_cardinality(len(steps)))


def initializer(value: np.ndarray) -> Any:
    """Return what gives a variable its first value.

    Args:
        value: The value.
    """
    # A large one would be a large constant of the graph.
    is_large = value.size > 1000
    return tf1.ones_initializer() if is_large else lambda shape, dtype=None, **_: tf.reshape(value, shape)
