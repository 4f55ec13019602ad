"""The host that is Estimator."""

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from kit.hosts import Host, Settings, State, dataset, initializer, minimize, state_of, told_by, v1_optimizer
from kit.oracle import Rule, Steps
from kit.structures import Structure

tf1 = tf.compat.v1


class Estimator(Host):
    """A `tf.compat.v1.train.Optimizer` under Estimator.

    Each call of `train` makes a new graph, and starts from a checkpoint if there is one.
    """

    def __init__(self, structure: Structure, rule: Rule | None, make_settings: Settings = dict) -> None:
        super().__init__(structure, rule, make_settings)
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
        loss = self.structure.loss(variables, features)
        train_op = minimize(opt, loss, step, list(variables.values()), self._clip)
        moving = [variable.read_value() for variable in [*variables.values(), *opt.variables()]]
        told = told_by(opt)
        norm = self.result_of_step(told)
        hook = _StateHook(self._states, [moving, step.read_value(), told], norm)
        # The loss is reported as 0, because Estimator ends the training if the loss is NaN.
        return tf.estimator.EstimatorSpec(mode, loss=tf.zeros([]), train_op=train_op, training_hooks=[hook])


class _StateHook(tf1.train.SessionRunHook):
    def __init__(self, states: list[State], fetches: Any, norm: Mapping[str, Any]) -> None:
        self._states = states
        self._fetches = fetches
        self._norm = norm

    def after_create_session(self, session: tf1.Session, coord: Any) -> None:
        del coord
        self._note(session, {})

    def before_run(self, run_context: Any) -> Any:
        del run_context
        return tf1.train.SessionRunArgs(self._norm)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._note(run_context.session, run_values.results)

    def _note(self, session: Any, norm: Mapping[str, Any]) -> None:
        moving, steps, told = session.run(self._fetches)
        self._states.append(state_of(moving, steps, told | norm))
