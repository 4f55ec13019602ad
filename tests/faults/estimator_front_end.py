"""The front-end of the fault tests for Estimator."""

import contextlib
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import tensorflow as tf
from faults import Rule
from front_ends import FrontEnd, State, Steps, as_tensors, dataset, initializer, outcomes_of, state_of, v1_optimizer
from structures import Structure

tf1 = tf.compat.v1


class Estimator(FrontEnd):
    """A `tf.compat.v1.train.Optimizer` under Estimator.

    Each call of `train` makes a new graph, and starts from a checkpoint if there is one.
    """

    def __init__(self, structure: Structure, rule: Rule | None) -> None:
        super().__init__(structure, rule)
        self._directories = contextlib.ExitStack()
        weakref.finalize(self, self._directories.close)

    def begin(self) -> None:
        self._directories.close()
        self._begin_in(self._directories.enter_context(tempfile.TemporaryDirectory()))

    def train(self, steps: Steps) -> list[State]:
        self._states: list[State] = []
        self._estimator.train(lambda: dataset(self.structure, steps))
        return self._states

    def save(self, directory: Path) -> None:
        shutil.copytree(self._estimator.model_dir, directory, dirs_exist_ok=True)

    def restore(self, directory: Path) -> None:
        self._begin_in(str(directory))

    def _begin_in(self, directory: str) -> None:
        config = tf.estimator.RunConfig(log_step_count_steps=None, save_summary_steps=None)
        self._estimator = tf.estimator.Estimator(self._model_fn, directory, config)

    def _model_fn(self, features: dict[str, tf.Tensor], mode: str) -> Any:
        variables = {
            name: tf1.get_variable(name, value.shape, tf.as_dtype(value.dtype), initializer(value))
            for name, value in self.structure.initial.items()
        }
        opt = self.optimizer(v1_optimizer(self.structure))
        step = tf1.train.get_or_create_global_step()
        train_op = opt.minimize(self.structure.loss(variables, features), step, var_list=list(variables.values()))
        moving = [variable.read_value() for variable in [*variables.values(), *opt.variables()]]
        hook = _StateHook(self._states, [moving, step.read_value(), as_tensors(outcomes_of(opt))])
        # The loss is reported as 0, because Estimator ends the training if the loss is NaN.
        return tf.estimator.EstimatorSpec(mode, loss=tf.zeros([]), train_op=train_op, training_hooks=[hook])


class _StateHook(tf1.train.SessionRunHook):
    def __init__(self, states: list[State], fetches: Any) -> None:
        self._states = states
        self._fetches = fetches

    def after_create_session(self, session: tf1.Session, coord: Any) -> None:
        del coord
        self._states.append(state_of(*session.run(self._fetches)))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        del run_values
        self._states.append(state_of(*run_context.session.run(self._fetches)))
