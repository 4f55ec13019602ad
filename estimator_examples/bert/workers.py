"""The processes that train together: a single one, or several that Horovod or TF_CONFIG connects."""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf

from estimator_examples.bert.options import Options


class SingleWorker:
    """A process that trains alone.

    Attributes:
        rank: The number of this worker. Worker 0 keeps the record of the steps, and reports.
        count: The number of workers.
        strategy: The strategy with which Estimator distributes the training; None for no strategy.
    """

    rank = 0
    count = 1
    strategy: tf.distribute.Strategy | None = None

    def with_own_directory(self, options: Options) -> Options:
        """Return options with a directory for this worker's data; all write the same data, so none has to wait."""
        if not self.rank:
            return options
        return dataclasses.replace(options, model_dir=options.model_dir / f"worker_{self.rank}")

    def train(self, estimator: tf.estimator.Estimator, spec: tf.estimator.TrainSpec) -> None:
        """Train together with the other workers."""
        estimator.train(spec.input_fn, max_steps=spec.max_steps)


class HorovodWorker(SingleWorker):
    """One of the processes that horovodrun started; tfmp averages their gradients."""

    def __init__(self) -> None:
        """Connect to the other processes.

        Raises:
            ImportError: Horovod is not installed.
            ValueError: There are no other processes.
        """
        try:
            import horovod.tensorflow as horovod
        except ImportError as error:
            raise ImportError(
                f"--distribute horovod needs Horovod ({error}). No extra of tfmp installs it, because it must be "
                "compiled against the installed TensorFlow: estimator_examples/README.md has the command."
            ) from error
        horovod.init()
        if horovod.size() == 1:
            raise ValueError(
                "--distribute horovod needs two processes or more, got 1: start them with `horovodrun -np 2 python -m "
                "estimator_examples.bert.run_pretraining ...`."
            )
        self.rank, self.count = horovod.rank(), horovod.size()
        self._broadcast = horovod.BroadcastGlobalVariablesHook(0)

    def train(self, estimator: tf.estimator.Estimator, spec: tf.estimator.TrainSpec) -> None:
        """Train together with the other workers, starting from the first worker's weights."""
        estimator.train(spec.input_fn, hooks=[self._broadcast], max_steps=spec.max_steps)


class TfConfigWorker(SingleWorker):
    """One of the workers that the variable TF_CONFIG lists; tf.distribute sums their gradients."""

    def __init__(self) -> None:
        """Read TF_CONFIG, and connect to the other workers.

        Raises:
            ValueError: TF_CONFIG does not list two or more workers.
        """
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        try:
            cluster = resolver.cluster_spec().as_dict()
        except ValueError:  # TF_CONFIG is not JSON
            cluster = {}
        if list(cluster) != ["worker"] or len(cluster["worker"]) < 2:
            raise ValueError(
                "--distribute tf_config needs two workers or more in the environment variable TF_CONFIG, got "
                f"{os.environ.get('TF_CONFIG')!r}: estimator_examples/README.md has an example."
            )
        self.rank, self.count = resolver.task_id, len(cluster["worker"])
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def train(self, estimator: tf.estimator.Estimator, spec: tf.estimator.TrainSpec) -> None:
        """Train together with the other workers, by `train_and_evaluate`: Estimator's `train` refuses this strategy."""
        tf.estimator.train_and_evaluate(estimator, spec, tf.estimator.EvalSpec(spec.input_fn))


WORKERS = {"none": SingleWorker, "horovod": HorovodWorker, "tf_config": TfConfigWorker}
