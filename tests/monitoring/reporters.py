"""The monitors of a training where they report, behind one interface: the callback in `fit`, and the hook in a session.

Both watch one weight of two elements, at first 1, whose gradient is [3, 4] times the factor of each step. So the norm
of the gradient is 5 times the factor.
"""

import abc
import collections
import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from kerases import for_every_keras, installed

import tfmp

tf1 = tf.compat.v1

EVERY_KERAS = for_every_keras()

#: A scale that each overflow halves, and that does not grow.
HALVED: dict[str, Any] = {
    "init_loss_scale": 1024,
    "incr_every_n_steps": 1000,
    "decr_every_n_nan_or_inf": 1,
    "decr_ratio": 0.5,
}

#: Multiplied by a scale of 256 or more it overflows float32; the loss itself does not.
OVERFLOW = 2.0**120

#: What a report shows: all numbers, or those that the settings ask for.
SHOWN = ("loss_scale", "skipped_steps", "gradient_norm", "skipped_spikes")


class Log(NamedTuple):
    """What tfmp logs: reports and all else in `info`, and warnings."""

    info: list[str]
    warnings: list[str]


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    """Collect what tfmp logs."""
    log, handler, logger = Log([], []), logging.Handler(), logging.getLogger("tfmp")
    lines = {logging.INFO: log.info, logging.WARNING: log.warnings}
    handler.emit = lambda record: lines[record.levelno].append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield log
    logger.removeHandler(handler)
    logger.setLevel(level)


def events(directory: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the values in the event file of a directory with their steps, by tag; a histogram is its rows."""
    found = collections.defaultdict(list)
    (path,) = directory.iterdir()
    for event in tf1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            number = tf.make_ndarray(value.tensor).tolist() if value.HasField("tensor") else value.simple_value
            found[value.tag].append((event.step, number))
    return dict(found)


def kinds(ranges: tfmp.ranges.RangeHistory) -> dict[str, dict[str, dict[str, int]]]:
    """Return what the last recording of ranges found, by kinds and names; without the name of the model in them."""
    return {
        kind: {"/".join(name.split("/")[-2:]): found.to_dict() for name, found in histograms.items()}
        for kind, histograms in ranges.last.histograms.items()
    }


def as_users_compile_it(keras: ModuleType) -> Any:
    """Return the `jit_compile` of `compile` by default: Keras 3 compiles the steps by XLA."""
    return "auto" if keras.__version__.startswith("3.") else None


def fit_model(
    keras: ModuleType,
    manager: Any = HALVED,
    *,
    inputs: int | None = 2,
    learning_rate: float = 0.0,
    model_class: Any = None,
    **settings: Any,
) -> Any:
    """Return a model of one weight. By default its steps are not compiled by XLA, which takes long.

    With one input the weight has one element, whose gradient is the factor. With None, the first step builds the model.
    """
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="last")
    model = (model_class or keras.Sequential)([layer] if inputs is None else [keras.Input([inputs]), layer])
    of_compile = {"jit_compile", "steps_per_execution", "metrics"}
    compiled = {"jit_compile": False} | {name: settings.pop(name) for name in of_compile & settings.keys()}
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(learning_rate), manager, **settings)
    model.compile(opt, loss=lambda target, output: target * output, **compiled)
    return model


def fit(model: Any, factors: Any, *callbacks: Any, **settings: Any) -> dict[str, list[float]]:
    """Fit a model, to one factor a step unless told otherwise, and return the history."""
    y = np.float32(factors).reshape(-1, 1)
    # A model that is not built yet is built by its first step.
    x = np.tile(np.float32([3, 4] if model.built and model.input_shape[-1] == 2 else [1]), [len(y), 1])
    settings = {"batch_size": 1, "shuffle": False, "verbose": 0} | settings
    return model.fit(x, y, callbacks=list(callbacks), **settings).history


def recorder(keras: ModuleType, seen: list[dict[str, float]]) -> Any:
    """Return a callback that records what the logs of each batch show."""
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append({name: logs[name] for name in SHOWN if name in logs})
    )


class Run(NamedTuple):
    """What a run leaves: the callback or hook, what it shows at each reported step and logs besides, and its error."""

    monitor: Any
    shown: dict[str, list[float]]
    log: Log
    error: str | None
    #: The attempted steps of this run, and the weight at the end.
    steps: int
    weights: list[float]


class Reporter(abc.ABC):
    """A monitor where it reports; the manager may be the number of a fixed scale.

    Where one run needs a checkpoint to go on after another, it is in the directory.
    """

    #: How messages, and recordings of ranges, name the weight.
    weight: str
    short: str
    #: How often the last step of a run is reported once more, if every step is.
    repeats: int

    def __init__(
        self, directory: Path, manager: Any = HALVED, *, spikes: Any = None, learning_rate: float = 0.0
    ) -> None:
        self._directory = directory
        self._settings = {
            "manager": tfmp.FixedLossScaleManager(manager) if isinstance(manager, int) else manager,
            "skip_spikes": None if spikes is None else tfmp.SpikeDetector(**spikes),
            "learning_rate": learning_rate,
        }

    @abc.abstractmethod
    def run(self, factors: Sequence[float], **settings: Any) -> Run:
        """Go on with a step for each factor, under a new monitor with these settings."""


class FitReporter(Reporter):
    """The callback in the `fit` of a Keras."""

    short = "last/kernel"
    repeats = 1

    def __init__(self, keras: ModuleType, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._keras = keras
        self.model = fit_model(keras, **self._settings)
        (weight,) = self.model.trainable_variables
        self.weight = getattr(weight, "path", weight.name)

    def run(self, factors: Sequence[float], **settings: Any) -> Run:
        seen: list[dict[str, float]] = []
        before, error = int(self.model.optimizer.attempted_steps), None
        callback = tfmp.LossScaleCallback(**settings)
        with logged() as log:
            try:
                fit(self.model, factors, callback, recorder(self._keras, seen))
            except tfmp.LossScaleStuckError as caught:
                error = str(caught)
        shown = {name: [each[name] for each in seen] for name in (seen[0] if seen else ())}
        steps = int(self.model.optimizer.attempted_steps) - before
        return Run(callback, shown, log, error, steps, self.model.get_weights()[0].ravel().tolist())


class _Watch(tf1.train.SessionRunHook):
    """Counts the steps, and reads the weight after each."""

    def __init__(self, weight: tf.Tensor) -> None:
        self._weight = weight
        self.steps = 0
        self.value: list[float] = []

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps += 1
        self.value = run_context.session.run(self._weight).tolist()


class SessionReporter(Reporter):
    """The hook in a `MonitoredTrainingSession`, whose next run restores the checkpoint of the last one."""

    weight = "w:0"
    short = "w"
    repeats = 0

    def run(self, factors: Sequence[float], **settings: Any) -> Run:
        hook, error = tfmp.LossScaleLoggingHook(**settings), None
        with tf.Graph().as_default(), logged() as log:
            step = graph_step(following(*factors), **self._settings)
            watch = _Watch(step.weight.read_value())
            try:
                run_session([watch, hook], step.train_op, len(factors), checkpoint_dir=str(self._directory))
            except tfmp.LossScaleStuckError as caught:
                error = str(caught)
        reports = [re.fullmatch(_LINE, line) for line in log.info]
        lines = [line for line, report in zip(log.info, reports, strict=True) if report is None]
        shown = [{name: float(report[name]) for name in SHOWN if report[name]} for report in reports if report]
        columns = {name: [each[name] for each in shown if name in each] for name in (shown[0] if shown else ())}
        return Run(hook, columns, Log(lines, log.warnings), error, watch.steps, watch.value)


_LINE = (
    r"loss scale (?P<loss_scale>\S+), global step \d+, steps applied \d+, skipped (?P<skipped_steps>\d+) "
    r"\(\d+ in a row(, (?P<skipped_spikes>\d+) as spikes)?\)(, gradient norm (?P<gradient_norm>\S+))?"
)


class GraphStep(NamedTuple):
    """A step in a graph."""

    train_op: tf.Operation
    opt: tfmp.LossScaleOptimizer
    loss: tf.Tensor
    weight: tf.Variable


def graph_step(
    factor: Any = 1.0,
    manager: Any = HALVED,
    *,
    learning_rate: float = 0.0,
    with_global_step: bool = True,
    norm: bool = False,
    **settings: Any,
) -> GraphStep:
    """Build a step of one weight; `norm` asks the optimizer to record the norm of the gradient."""
    w = tf1.get_variable("w", initializer=[1.0, 1.0])
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(learning_rate), manager, **settings)
    if norm:
        opt.record_gradient_norm()
    loss = tf.identity(tf.reduce_sum(w * [3.0, 4.0]) * factor, name="loss")
    global_step = tf1.train.get_or_create_global_step() if with_global_step else None
    return GraphStep(opt.minimize(loss, global_step, [w]), opt, loss, w)


def following(*values: Any) -> tf.Tensor:
    """Return a tensor that has the next of the values at each run."""
    return tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(np.float32(values))).get_next()


def run_session(hooks: Any, fetches: Any, at_most: int, **settings: Any) -> None:
    """Run in a session with hooks, until one of them stops it."""
    hooks = hooks if isinstance(hooks, list) else [hooks]
    with tf1.train.MonitoredTrainingSession(hooks=hooks, log_step_count_steps=None, **settings) as session:
        for _ in range(at_most):
            if session.should_stop():
                break
            session.run(fetches)


REPORTERS: dict[str, Callable[..., Reporter]] = {
    **{name: functools.partial(FitReporter, keras) for name, keras in installed().items()},
    "session": SessionReporter,
}
