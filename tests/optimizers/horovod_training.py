"""Trains with Horovod, feeds each process other inputs, and prints the state after every step.

    horovodrun -np 2 python tests/optimizers/horovod_training.py session/plain "fit/outside --last=60"

It needs PYTHONPATH=.:tests:tests/contract.

Each argument is a training with its own options. Every line printed for a training contains that argument.

The results are compared with a single process that trains on the mean of the gradients, without Horovod: `reference`
here for TF1, `ReplicaTraining` of `replica_training` for Keras.
"""

import argparse
import atexit
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import math
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import replica_training
import tensorflow as tf
from kit import checks
from kit.hosts import as_json
from kit.installed import hosts
from scenarios import REPLICATED, STRUCTURE, Scenario

import tfmp
import tfmp.npu
from tfmp.core.monitors.graph_records import overflow_reports_of_graph

tf1 = tf.compat.v1

_WORKERS = 2

_WEIGHTS = {"kernel": np.float32([1, 2]), "table": np.ones([4, 1], np.float32), "bias": np.float32(1)}


#: The inputs of two windows of three micro-batches, a column for each worker. The second worker overflows once, in the
#: first window.
MICRO_BATCHES = np.float32([[1, 2], [4, math.inf], [1, 2], [2, 2], [1, 1], [4, 2]])


def inputs(steps: int) -> np.ndarray:
    """Return the inputs, a row for each step and a column for each worker.

    The finite ones are powers of two, so that means are exact. Some are infinite, some are NaN, and some overflow when
    they are scaled.
    """
    chances = {0.25: 0.3, 0.5: 0.28, -1.0: 0.24, math.inf: 0.06, math.nan: 0.06, 2.0**127: 0.06}
    return np.random.default_rng(0).choice(list(chances), [steps, _WORKERS], p=list(chances.values()))


def manager() -> tfmp.ExponentialUpdateLossScaleManager:
    """Return a manager whose scale changes often, and in powers of two."""
    return tfmp.ExponentialUpdateLossScaleManager(256, 4, decr_every_n_nan_or_inf=5, decr_ratio=0.5)


class SessionTraining:
    """A model in a graph: a kernel with a dense gradient, a table with a sparse one, and a bias without a gradient.

    Args:
        opt: The optimizer.
        loss_scale_manager: The optimizer's manager.
        ranks: The workers whose inputs this process gets: one worker; or all, and the loss is then the mean of theirs.
        with_bias: Whether the loss depends on the bias too, so that it has a gradient.
    """

    def __init__(
        self, opt: Any, loss_scale_manager: tfmp.LossScaleManager, ranks: Sequence[int], with_bias: bool = False
    ) -> None:
        self._inputs = [tf1.placeholder(tf.float32, []) for _ in ranks]
        weights = [tf1.get_variable(name, initializer=value) for name, value in _WEIGHTS.items()]
        loss = _loss(weights, ranks, self._inputs) + (weights[-1] if with_bias else 0)
        self._train_op = opt.minimize(loss, tf1.train.get_or_create_global_step(), weights)
        self._variables = tf1.global_variables()
        self._outcomes = loss_scale_manager.get_status()
        (report,) = overflow_reports_of_graph(loss_scale_manager)
        self._overflows = [report.last, report.steps]
        self._saver = tf1.train.Saver()

    def states(self, fed: np.ndarray, restore: str | None = None, save: str | None = None) -> Iterator[dict[str, Any]]:
        """Take the steps; after each, yield the variables, the counts of steps and the overflow reports.

        Args:
            fed: The inputs, a row for each step.
            restore: The path of a checkpoint to start from.
            save: The path of the checkpoints that are saved after each step; the number of the step is appended.
        """
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            if restore is not None:
                self._saver.restore(session, restore)
            for taken, values in enumerate(fed, start=1):
                session.run(self._train_op, dict(zip(self._inputs, values, strict=True)))
                if save is not None:
                    self._saver.save(session, save, taken)
                names = ("variables", "outcomes", "overflows")
                fetched = session.run([self._variables, self._outcomes, self._overflows])
                yield {name: [value.tolist() for value in part] for name, part in zip(names, fetched, strict=True)}


def _loss(weights: Sequence[Any], ranks: Sequence[int], inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    kernel, table, _ = weights
    losses = []
    for rank, value in zip(ranks, inputs, strict=True):
        rows = tf.nn.embedding_lookup(table, [tf.where(value > 0, rank, 2), 3])
        losses.append((tf.reduce_sum(kernel) + tf.reduce_sum(rows)) * value)
    return tf.add_n(losses) / len(ranks)


def eager_states(
    opt: Any, loss_scale_manager: tfmp.LossScaleManager, ranks: Sequence[int], fed: np.ndarray, *, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Train the model of `SessionTraining` in eager code, with a loss that is a function; yield the state of each step.

    Args:
        opt: The optimizer.
        loss_scale_manager: The optimizer's manager.
        ranks: The workers whose inputs this process gets.
        fed: The inputs, a row for each step.
        compiled: Whether to run the step as a `tf.function`.
    """
    weights = [tf.Variable(value, name=name) for name, value in _WEIGHTS.items()]
    global_step = tf.Variable(0, dtype=tf.int64)

    def step(inputs: tf.Tensor) -> None:
        # The step is two calls, as in scripts that clip gradients between them.
        grads_and_vars = opt.compute_gradients(lambda: _loss(weights, ranks, tf.unstack(inputs)), weights)
        opt.apply_gradients(grads_and_vars, global_step)

    run = tf.function(step) if compiled else step
    for values in np.float32(fed):
        run(tf.constant(values))
        counts = [global_step, loss_scale_manager.get_loss_scale()]
        slots = [opt.get_slot(weight, name) for weight in weights[:2] for name in opt.get_slot_names()]
        yield {
            "variables": [variable.numpy().tolist() for variable in [*weights, *counts, *slots]],
            "outcomes": [value.numpy().tolist() for value in loss_scale_manager.get_status()],
        }


def reference(steps: int, ranks: Sequence[int] = range(_WORKERS), *, eager: bool = False) -> list[dict[str, Any]]:
    """Return the states of a single process that trains on the mean of the workers' gradients.

    Args:
        steps: The number of steps to take.
        ranks: The workers whose gradients are averaged.
        eager: Whether to train in eager code, on a loss that is a function.
    """
    fed = inputs(steps)[:, ranks]
    loss_scale_manager = manager()
    opt = tfmp.LossScaleOptimizer(tf1.train.AdamOptimizer(0.125), loss_scale_manager)
    if eager:
        return list(eager_states(opt, loss_scale_manager, ranks, fed, compiled=False))
    with tf.Graph().as_default():
        return list(SessionTraining(opt, loss_scale_manager, ranks).states(fed))


def wrap(hvd: Any, order: str, inner: Any, **settings: Any) -> Any:
    """Wrap an optimizer in tfmp's wrapper and, in some orders, in Horovod's.

        plain       tfmp's wrapper, is_distributed=True
        float16     the same, with aggregation_dtype="float16"
        strategy    the same as plain; the caller makes a strategy active
        alone       tfmp's wrapper, is_distributed=False
        inside      tfmp's wrapper around Horovod's
        outside     Horovod's wrapper around tfmp's
        npu         the same as inside, with the NPU bridge's class
        unchecked   the same as plain, with the NPU bridge's class and without a check for overflow

    Args:
        hvd: The module `horovod.tensorflow`.
        order: One of the names above.
        inner: The optimizer to wrap.
        settings: Further arguments of tfmp's wrapper.
    """
    if order == "inside":
        return tfmp.LossScaleOptimizer(hvd.DistributedOptimizer(inner), is_distributed=True, **settings)
    if order == "npu":
        return tfmp.npu.NPULossScaleOptimizer(hvd.DistributedOptimizer(inner), is_distributed=True, **settings)
    if order == "unchecked":
        unchecked = tfmp.npu.FixedLossScaleManager(8, enable_overflow_check=False)
        return tfmp.npu.NPULossScaleOptimizer(
            inner, is_distributed=True, **settings | {"loss_scale_manager": unchecked}
        )
    if order == "outside":
        return hvd.DistributedOptimizer(tfmp.LossScaleOptimizer(inner, is_distributed=True, **settings))
    dtype = "float16" if order == "float16" else None
    return tfmp.LossScaleOptimizer(inner, is_distributed=order != "alone", aggregation_dtype=dtype, **settings)


def _by_v1(hvd: Any, way: str, order: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rank = hvd.rank()
    fed = inputs(300)[options.first : options.last, [rank]]
    loss_scale_manager = manager()
    opt = wrap(hvd, order, tf1.train.AdamOptimizer(0.125), loss_scale_manager=loss_scale_manager)
    if way != "session":
        yield from eager_states(opt, loss_scale_manager, [rank], fed, compiled=way == "function")
        return
    with tf.Graph().as_default():
        training = SessionTraining(opt, loss_scale_manager, [rank], with_bias=options.missing and rank == 1)
        save = str(options.save / "checkpoint") if options.save and rank == 0 else None
        yield from training.states(fed, options.restore, save)


class _HandWritten:
    """A hand-written loop with a `tfmp.GradScaler`, behind the methods of an optimizer that `eager_states` calls."""

    def __init__(self, loss_scale_manager: tfmp.LossScaleManager, inner: Any) -> None:
        self._scaler = tfmp.GradScaler(manager=loss_scale_manager, is_distributed=True)
        self._inner = inner
        self.get_slot, self.get_slot_names = inner.get_slot, inner.get_slot_names

    def compute_gradients(self, loss: Callable[[], tf.Tensor], weights: Sequence[Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            scaled = self._scaler.scale(loss())
        return list(zip(self._scaler.unscale(self._inner, tape.gradient(scaled, weights)), weights, strict=True))

    def apply_gradients(self, grads_and_vars: Sequence[Any], global_step: tf.Variable) -> None:
        self._scaler.step(self._inner, grads_and_vars, global_step=global_step)
        self._scaler.update()


def _by_grad_scaler(hvd: Any, way: str, order: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    del way
    fed, loss_scale_manager = inputs(300)[options.first : options.last, [hvd.rank()]], manager()
    opt = _HandWritten(loss_scale_manager, tf1.train.AdamOptimizer(0.125))
    yield from eager_states(opt, loss_scale_manager, [hvd.rank()], fed, compiled=order == "function")


def _by_constants(hvd: Any, way: str, order: str, options: argparse.Namespace) -> Iterator[float]:
    """Train on a gradient that is a constant of the graph.

    At one step the first worker also fetches the loss, and the norm of the gradients.
    """
    del way
    with tf.Graph().as_default(), tf1.Session() as session:
        weight = tf1.get_variable("weight", initializer=1.0)
        table = tf1.get_variable("table", initializer=[1.0, 1.0])
        # Float16 cannot represent 1 + 2**-12, so a gradient that travels in float16 is rounded to 1.
        loss = weight * (1 + 2.0**-12) + tf.reduce_sum(tf.gather(table, [0]))
        opt = wrap(
            hvd, order, tf1.train.GradientDescentOptimizer(0.125), loss_scale_manager=tfmp.FixedLossScaleManager(8)
        )
        train_op = opt.minimize(loss)
        session.run(tf1.global_variables_initializer())
        for step in range(options.last):
            session.run([train_op, loss, opt.gradient_norm] if step == 1 and hvd.rank() == 0 else train_op)
            yield session.run(weight).tolist()


def _by_windows(hvd: Any, way: str, order: str, options: argparse.Namespace) -> Iterator[list[float]]:
    """Train on windows: a weight that all workers change, and a table of which each worker changes one row."""
    del options
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = tf1.placeholder(tf.float32, [])
        weight = tf1.get_variable("weight", initializer=1.0)
        table = tf1.get_variable("table", initializer=[1.0, 1.0])
        settings = {"accumulation_steps": 3, "overflow_drops": way, "loss_scale_manager": tfmp.FixedLossScaleManager(8)}
        opt = wrap(hvd, order, tf1.train.GradientDescentOptimizer(0.5), **settings)
        # The row depends on the input, because Horovod's own optimizer does not average constant gradients correctly.
        rows = tf.gather(table, [tf.where(fed > 0, hvd.rank(), 0)])
        train_op = opt.minimize((weight + tf.reduce_sum(rows)) * fed)
        session.run(tf1.global_variables_initializer())
        for micro_batch in MICRO_BATCHES[:, hvd.rank()]:
            session.run(train_op, {fed: micro_batch})
            yield [float(value) for value in np.hstack(session.run([weight, table]))]


def _by_keras(hvd: Any, way: str, order: str, options: argparse.Namespace) -> Iterator[replica_training.State]:
    training = replica_training.ReplicaTraining(
        importlib.import_module("keras"),
        tf.distribute.OneDeviceStrategy("cpu:0") if order == "strategy" else tf.distribute.get_strategy(),
        lambda inner: wrap(hvd, order, inner, loss_scale_manager=replica_training.manager()),
        legacy=options.legacy,
    )
    if options.restore:
        training.checkpoint.restore(options.restore)
    lacks_bias = options.missing and hvd.rank() == 0
    # Legacy optimizers have this argument under an older name and with the opposite value.
    averaged = {"experimental_aggregate_gradients": False} if options.legacy else {"skip_gradients_aggregation": True}
    minimize = {
        "loop": functools.partial(_by_tape, lambda tape: tape, lacks_bias, {}),
        "tape": functools.partial(_by_tape, hvd.DistributedGradientTape, lacks_bias, averaged),
        "minimize": lambda opt, loss, weights: opt.minimize(loss, weights),
    }
    fed = replica_training.inputs("random")[options.first : options.last, [hvd.rank()]] * options.factor
    for state in training.by_fit(fed) if way == "fit" else training.by_loop(fed, minimize=minimize[way]):
        if options.save and hvd.rank() == 0:
            training.checkpoint.save(options.save / "checkpoint")
        yield state


def _by_tape(
    share: Callable[[tf.GradientTape], tf.GradientTape],
    lacks_bias: bool,
    settings: Mapping[str, bool],
    opt: Any,
    loss: Callable[[], tf.Tensor],
    weights: list[Any],
) -> None:
    with tf.GradientTape() as tape:
        scaled = opt.scale_loss(loss())
    grads = share(tape).gradient(scaled, weights)
    if lacks_bias:
        grads[-1] = None
    opt.apply_gradients(zip(grads, weights, strict=True), **settings)


def _by_updates(hvd: Any, way: str, order: str, options: argparse.Namespace) -> Iterator[list[float]]:
    """Train in a session by `get_updates` of a legacy optimizer, which Estimator's heads call."""
    del way, options
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = tf1.placeholder(tf.float32, [])
        weight = tf1.get_variable("weight", initializer=1.0, use_resource=True)
        inner = importlib.import_module("keras").optimizers.legacy.SGD(0.5)
        opt = wrap(hvd, order, inner, loss_scale_manager=replica_training.manager())
        train_op = opt.get_updates(weight * fed, [weight])
        session.run(tf1.global_variables_initializer())
        for micro_batch in MICRO_BATCHES[:, hvd.rank()]:
            session.run(train_op, {fed: micro_batch})
            yield [float(value) for value in session.run([weight, opt.iterations, opt.loss_scale])]


def _by_scenario(hvd: Any, way: str, order: str, options: argparse.Namespace) -> Iterator[list[Any]]:
    """Train by a scenario of tests/contract, of which each process is fed the share of its replica."""
    del way
    scenario = of_mean(REPLICATED["clipped" if options.clips else "spikes of sums"])

    def settings() -> dict[str, Any]:
        found = dict(scenario.settings())
        if "GradScaler" in options.host:
            return {**found, "is_distributed": True}
        return {**found, "wrap": lambda inner, **given: wrap(hvd, order, inner, **given)}

    host = hosts()[options.host].make(STRUCTURE, scenario.rule, settings)
    states = checks.train(host, [[feds[hvd.rank()]] for feds in scenario.steps()][: options.last])
    yield from map(as_json, states[1:])


def of_mean(scenario: Scenario) -> Scenario:
    """Return a scenario with half of its gradients' norms: Horovod averages over two workers, and does not sum."""
    spikes = scenario.spikes and dataclasses.replace(scenario.spikes, max_norm=scenario.spikes.max_norm / _WORKERS)
    return dataclasses.replace(scenario, spikes=spikes)


_WAYS: dict[str, Callable[..., Iterator[Any]]] = {
    "session": _by_v1,
    "eager": _by_v1,
    "function": _by_v1,
    "scaler": _by_grad_scaler,
    "constants": _by_constants,
    "window": _by_windows,
    "micro_batch": _by_windows,
    "fit": _by_keras,
    "loop": _by_keras,
    "tape": _by_keras,
    "minimize": _by_keras,
    "updates": _by_updates,
    "scenario": _by_scenario,
}


def states(hvd: Any, training: str) -> Iterator[Any]:
    """Train, and yield the state after each step.

    Args:
        hvd: Horovod, initialized.
        training: A key of `_WAYS`, a slash, an order of `wrap`, and then options.
    """
    options = _options(training)
    return _WAYS[options.way](hvd, options.way, options.order, options)


def _options(training: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("way_and_order")
    parser.add_argument("--clips", action="store_true", help="clip gradients before they are applied")
    parser.add_argument("--factor", type=float, default=1.0, help="a factor for the inputs of Keras")
    parser.add_argument("--host", help="the kind of the optimizer, for `scenario`")
    parser.add_argument("--legacy", action="store_true", help="train with a legacy optimizer of Keras")
    parser.add_argument("--missing", action="store_true", help="give one process a gradient that the other lacks")
    parser.add_argument(
        "--v1-behavior", action="store_true", help="turn TensorFlow 1's behavior on, for the trainings after it too"
    )
    replica_training.add_options(parser)
    options = parser.parse_args(shlex.split(training))
    options.way, options.order = options.way_and_order.split("/")
    return options


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trainings", nargs="+", help="arguments of `states`")
    parser.add_argument(
        "--record", action="store_true", help="print the number of collective operations in each training"
    )
    arguments = parser.parse_args()
    if arguments.record:
        # With this setting Horovod can record its collective operations from a later call on. Recording keeps one core
        # busy, so it is not on by default.
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    for training in arguments.trainings:
        tell = functools.partial(_tell, hvd.rank(), training)
        warnings = _Warnings(tell)
        logging.getLogger("tfmp").addHandler(warnings)
        # If a training fails or hangs, this line shows which one.
        tell("START", None)
        try:
            _train(hvd, training, arguments.record, tell)
        except (tf.errors.InvalidArgumentError, NotImplementedError) as error:
            # The process goes on after the error. If it failed, horovodrun would end the other process before that
            # could print its own error.
            tell("REFUSED", str(error))
        logging.getLogger("tfmp").removeHandler(warnings)


class _Warnings(logging.Handler):
    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell("WARNED", record.getMessage())


def _train(hvd: Any, training: str, record: bool, tell: Callable[[str, Any], None]) -> None:
    options = _options(training)
    if options.v1_behavior:
        tf1.disable_v2_behavior()
    with tempfile.TemporaryDirectory() as directory:
        timeline = Path(directory) / "timeline.json"
        if record:
            _start_timeline(hvd, timeline, training)
        for taken, state in enumerate(states(hvd, training), start=1):
            tell("STATE", state)
            replica_training.die_after(options, taken, hvd.rank())
        if record:
            hvd.stop_timeline()
        if record and hvd.rank() == 0:
            tell("COLLECTIVES", _collectives_per_step(timeline, taken))


def _start_timeline(hvd: Any, path: Path, training: str) -> None:
    """Record from now on, in a process that asks for collective operations only when process 0 records as well.

    Horovod aborts process 0 if another process has asked for an operation before process 0 begins to record, and
    process 0 asks for it afterwards. A barrier would itself be such an operation, so the processes meet by a file.
    """
    hvd.start_timeline(str(path))
    launch = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    started = Path(tempfile.gettempdir()) / f"horovod_records_{launch}_{hashlib.md5(training.encode()).hexdigest()}"
    if hvd.rank() == 0:
        # Horovod's own thread begins to record some milliseconds later.
        time.sleep(0.2)
        started.touch()
        atexit.register(started.unlink, missing_ok=True)
    while not started.exists():
        time.sleep(0.01)


def _tell(rank: int, training: str, title: str, value: Any) -> None:
    print(f"{title} {rank} {training}:", json.dumps(value), flush=True)  # noqa: T201 - a command line prints


def _collectives_per_step(timeline: Path, steps: int) -> dict[str, float]:
    """Return the number of sums and the number of gathers over the processes in each step."""
    events = timeline.read_text(encoding="utf-8")
    return {kind: events.count(f'"name": "{kind}"') / steps for kind in ("ALLREDUCE", "ALLGATHER")}


if __name__ == "__main__":
    _main()
