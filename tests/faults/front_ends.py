"""The front-ends of the fault tests, which train and return the state after every step; here those of TensorFlow 1."""

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

#: For each step, the values that each replica is fed.
Steps = Sequence[Sequence[Fed]]


class State(NamedTuple):
    """The state of a training after a step.

    Attributes:
        moving: The values that only an applied step may change, for each replica: weights, slots, averages, and for
            Keras the count of steps.
        steps: The host's count of steps.
        loss_scale: The loss scale; 1 without a wrapper.
        outcomes: The numbers of applied steps, of skipped steps, and of skipped steps in a row until now; and whether
            the last step was applied.
    """

    moving: list[np.ndarray]
    steps: int
    loss_scale: float
    outcomes: tuple[int, int, int, bool]


def manager(rule: Rule) -> tfmp.LossScaleManager:
    """Return an exponential manager.

    Args:
        rule: The settings of the manager.
    """
    return tfmp.ExponentialUpdateLossScaleManager(**rule._asdict())


class FrontEnd(abc.ABC):
    """An optimizer in its host, such as a session or Keras' `fit`; it is built or traced once and can train repeatedly.

    Args:
        structure: The structure to train.
        rule: The settings of the manager; None for an optimizer without a wrapper.
    """

    def __init__(self, structure: Structure, rule: Rule | None) -> None:
        self.structure = structure
        self.rule = rule

    @abc.abstractmethod
    def begin(self) -> None:
        """Reset everything to the values before the first step."""

    @abc.abstractmethod
    def train(self, steps: Steps) -> list[State]:
        """Take steps, and return the state before the first step and the state after each step.

        Args:
            steps: The values that the steps are fed.
        """

    @abc.abstractmethod
    def save(self, directory: Path) -> None:
        """Write a checkpoint.

        Args:
            directory: The directory for the checkpoint.
        """

    @abc.abstractmethod
    def restore(self, directory: Path) -> None:
        """Restore a checkpoint.

        Args:
            directory: The directory with the checkpoint.
        """

    def optimizer(self, inner: Any) -> Any:
        """Return an optimizer in tfmp's wrapper; without a rule, the optimizer itself."""
        return tfmp.LossScaleOptimizer(inner, manager(self.rule)) if self.rule else inner


def outcomes_of(opt: Any) -> list[Any]:
    """Return the scale and the outcomes of steps from a wrapper's properties, as tensors or as values.

    Args:
        opt: The optimizer; if it has no wrapper, constants are returned.
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
    """Return a state made from values.

    Args:
        moving: The values that only an applied step may change.
        steps: The host's count of steps.
        outcomes: The values of `outcomes_of`.
    """
    scale, applied, skipped, in_a_row, finite = outcomes
    return State(
        [np.asarray(value) for value in moving],
        int(steps),
        float(scale),
        (int(applied), int(skipped), int(in_a_row), bool(finite)),
    )


def as_tensors(values: Sequence[Any]) -> list[tf.Tensor]:
    """Convert values to tensors, because a session cannot fetch numbers.

    Args:
        values: Tensors or numbers.
    """
    return [tf.convert_to_tensor(value) for value in values]


def v1_optimizer(structure: Structure) -> tf1.train.Optimizer:
    """Return an inner optimizer with the options of a structure.

    Args:
        structure: The structure to train.
    """
    momentum = structure.options.get("momentum")
    return tf1.train.MomentumOptimizer(0.5, momentum) if momentum else tf1.train.GradientDescentOptimizer(0.5)


class V1Graph(FrontEnd):
    """A `tf.compat.v1.train.Optimizer` in a session.

    Args:
        structure: The structure to train.
        rule: The settings of the manager; None for an optimizer without a wrapper.
        use_resource: Whether variables are resource variables; otherwise they are reference variables.
        strategy: The strategy with the replicas; by default there is one device.
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
            opt = self._make_optimizer(step)

            def on_replica() -> tf.Operation:
                loss = structure.loss(variables, self._fed[replica_number()])
                return self._minimize(opt, loss, step, list(variables.values()))

            self._train_op = tf.group(strategy.experimental_local_results(strategy.run(on_replica)))
            moving = [*variables.values(), *opt.variables()]
            local = [part.read_value() for each in moving for part in strategy.experimental_local_results(each)]
            self._fetches = [local, step.read_value(), as_tensors(outcomes_of(opt))]
            self._saver = tf1.train.Saver()
            self._initialize = tf1.global_variables_initializer()

    def _make_optimizer(self, step: tf.Variable) -> Any:
        del step
        return self.optimizer(v1_optimizer(self.structure))

    def _minimize(self, opt: Any, loss: tf.Tensor, step: tf.Variable, variables: Sequence[tf.Variable]) -> tf.Operation:
        return opt.minimize(loss, step, var_list=variables)

    def begin(self) -> None:
        # A new session, because only there the wrapper's counts of steps are 0 again.
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
    """Return the index of the replica whose part of the graph is being built."""
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
        # A slot that does not exist yet counts as 0, the value that it starts from.
        slots = [self._inner.get_slot(variable, "momentum") for variable in self._variables.values()]
        momenta = [0 * w if slot is None else slot.numpy() for w, slot in zip(weights, slots, strict=True)]
        return state_of([*weights, *momenta], self._step.numpy(), outcomes_of(self._opt))


def dataset(structure: Structure, steps: Steps) -> tf.data.Dataset:
    """Return the values that the steps of one replica are fed, as a dataset.

    Args:
        structure: The structure to train.
        steps: The values that each step is fed.
    """

    def rows() -> Iterator[Fed]:
        for (fed,) in steps:
            yield dict(fed)

    feds = tf.data.Dataset.from_generator(rows, output_signature=dict(structure.fed))
    return feds.apply(tf.data.experimental.assert_cardinality(len(steps)))


def initializer(value: np.ndarray) -> Any:
    """Return the initializer of a variable.

    Args:
        value: The first value of the variable; if it is large, all its elements must be 1.
    """
    # A large value would become a large constant in the graph.
    is_large = value.size > 1000
    return tf1.ones_initializer() if is_large else lambda shape, dtype=None, **_: tf.reshape(value, shape)
