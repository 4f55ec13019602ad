"""The host that is Estimator."""

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from kit.hosts import Host, State, dataset, graph_variables, minimize, state_of, told_by, v1_optimizer
from kit.oracle import Steps

tf1 = tf.compat.v1


class Estimator(Host):
    """A `tf.compat.v1.train.Optimizer` under Estimator, on one device or on a worker of a strategy.

    Each call of `train` makes a new graph, and starts from a checkpoint if there is one. Workers share its directory.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._directories = contextlib.ExitStack()
        weakref.finalize(self, self._directories.close)
        self._workers = self._strategy.cluster_resolver
        self._rank = self._workers.task_id if self._workers else 0
        #: What is told each state in place of the list that `train` returns, which with workers it may never do.
        self.note: Callable[[State], None] | None = None

    def begin(self) -> None:
        self._directories.close()
        self._begin_in(self._directories.enter_context(tempfile.TemporaryDirectory()))

    def train(self, steps: Steps) -> list[State]:
        states: list[State] = []
        self._tell = self.note or states.append
        own = [[feds[self._rank]] for feds in steps]

        def input_fn() -> tf.data.Dataset:
            return dataset(self.structure, own)

        if self._workers:
            specs = tf.estimator.TrainSpec(input_fn), tf.estimator.EvalSpec(input_fn)
            tf.estimator.train_and_evaluate(self._estimator, *specs)
        else:
            self._estimator.train(input_fn)
        return states

    def save(self, directory: Path) -> None:
        shutil.copytree(self._estimator.model_dir, directory, dirs_exist_ok=True)

    def restore(self, directory: Path) -> None:
        self._begin_in(str(directory))

    def _begin_in(self, directory: str) -> None:
        # Only the first worker fetches summaries, to show that the workers need not run the same graph.
        config = tf.estimator.RunConfig(
            directory,
            train_distribute=self._strategy if self._workers else None,
            save_summary_steps=None if self._rank else 100,
            save_checkpoints_steps=None if self._rank else 20,
            log_step_count_steps=None,
        )
        self._estimator = tf.estimator.Estimator(self._model_fn, config=config)

    def _model_fn(self, features: dict[str, tf.Tensor], mode: str) -> Any:
        variables = graph_variables(self.structure)
        opt = self.optimizer(v1_optimizer(self.structure))
        step = tf1.train.get_or_create_global_step()
        loss = self.structure.loss(variables, features)
        train_op = minimize(opt, loss, step, list(variables.values()), self._clip)
        moving = [variable.read_value() for variable in [*variables.values(), *opt.variables()]]
        told = told_by(opt)
        norm = self.result_of_step(told)
        hook = _StateHook(self._tell, [moving, step.read_value(), told], norm)
        # The loss is reported as 0, because Estimator ends the training if the loss is NaN.
        return tf.estimator.EstimatorSpec(mode, loss=tf.zeros([]), train_op=train_op, training_hooks=[hook])


class _StateHook(tf1.train.SessionRunHook):
    def __init__(self, tell: Callable[[State], None], fetches: Any, norm: Mapping[str, Any]) -> None:
        self._tell = tell
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
        self._tell(state_of(moving, steps, told | norm))
