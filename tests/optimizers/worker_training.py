"""Trains hosts of tests/kit in one of two processes, of which each is fed other gradients; prints the states.

    horovodrun -np 2 python tests/optimizers/worker_training.py \
        'random/outside --host="v1 function" --last=60' 'constants/float16 --last=4'
    TF_CONFIG=... python tests/optimizers/worker_training.py 'random/strategy --host=keras3'

It needs PYTHONPATH=.:tests:tests/contract. Each argument is a training with its own options: what is fed, a scenario or
a key of `_OTHERS`, and how the optimizer is wrapped. Every line that is printed for a training contains the argument.
"""

import argparse
import atexit
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from kerases import installed
from kit.estimator_host import Estimator
from kit.hosts import Host, as_json
from kit.installed import hosts, replicated_hosts
from kit.keras_hosts import KerasLoop, compiled, of_tensorflow
from kit.oracle import combined
from kit.structures import Fed, Structure
from replica_training import SCENARIOS, FitOnReplicas, add_options, die_after, inputs
from scenarios import Scenario

import tfmp
import tfmp.npu

tf1 = tf.compat.v1

_WORKERS = 2


def wrap(hvd: Any, order: str, inner: Any, **settings: Any) -> Any:
    """Wrap an optimizer in tfmp's wrapper and, in some orders, in Horovod's.

    plain       tfmp's wrapper, is_distributed=True
    float16     the same, with aggregation_dtype="float16"
    alone       tfmp's wrapper, is_distributed=False
    inside      tfmp's wrapper around Horovod's
    outside     Horovod's wrapper around tfmp's
    npu         the same as inside, with the NPU bridge's class
    unchecked   the same as plain, with the NPU bridge's class and without a check for overflow"""
    settings["is_distributed"] = order != "alone"
    if order == "inside":
        return tfmp.LossScaleOptimizer(hvd.DistributedOptimizer(inner), **settings)
    if order == "npu":
        return tfmp.npu.NPULossScaleOptimizer(hvd.DistributedOptimizer(inner), **settings)
    if order == "unchecked":
        unchecked = tfmp.npu.FixedLossScaleManager(8, enable_overflow_check=False)
        return tfmp.npu.NPULossScaleOptimizer(inner, **settings | {"loss_scale_manager": unchecked})
    if order == "outside":
        return hvd.DistributedOptimizer(tfmp.LossScaleOptimizer(inner, **settings))
    dtype = "float16" if order == "float16" else None
    return tfmp.LossScaleOptimizer(inner, aggregation_dtype=dtype, **settings)


def of_mean(scenario: Scenario) -> Scenario:
    """Return a scenario with half of its gradients' norms: Horovod averages over two workers, and does not sum."""
    spikes = scenario.spikes and dataclasses.replace(scenario.spikes, max_norm=scenario.spikes.max_norm / _WORKERS)
    return dataclasses.replace(scenario, spikes=spikes)


def hosts_of_workers() -> dict[str, Any]:
    """Return by name the functions that make the hosts which the workers of a strategy run."""
    found = {name: pair.make for name, pair in replicated_hosts().items() if name not in {"v1 graph", "v1 eager"}}
    loop = {"compiled": compiled, "averages": False, "jit_compile": True}
    return found | {
        f"{title} compiled update": functools.partial(KerasLoop, keras=keras, **loop)
        for title, keras in installed().items()
    }


def _by_tape(loop: Any, fed: Fed) -> None:
    """Take a step on gradients that Horovod's tape averages."""
    variables = {name: of_tensorflow(weight) for name, weight in loop._by_name.items()}
    with tf.GradientTape() as tape:
        scaled = loop._opt.scale_loss(loop.structure.loss(variables, fed))
    hvd = importlib.import_module("horovod.tensorflow")
    grads = hvd.DistributedGradientTape(tape).gradient(scaled, [*variables.values()])
    # Legacy optimizers have this argument under an older name and with the opposite value.
    is_legacy = "legacy" in type(loop._opt.inner_optimizer).__module__
    averaged = {"experimental_aggregate_gradients": False} if is_legacy else {"skip_gradients_aggregation": True}
    loop._opt.apply_gradients(zip(grads, variables.values(), strict=True), **averaged)


def _by_minimize(loop: Any, fed: Fed) -> None:
    weights = loop._by_name
    loop._opt.minimize(lambda: loop.structure.loss(weights, fed), [*weights.values()])


_STEPS: dict[str, Callable[[Any, Fed], None]] = {"tape": _by_tape, "minimize": _by_minimize}


def _scenario(name: str, rank: int) -> Scenario:
    """Return what is fed; in the one named "uneven", each worker has a gradient of another variable."""
    if name != "uneven":
        return SCENARIOS[name]
    structure = Structure(
        {name: np.float32([1]) for name in ("first", "second")},
        {"factor": tf.TensorSpec([])},
        lambda variables, fed: fed["factor"] * tf.reduce_sum(variables[("first", "second")[rank]]),
        {"momentum": 0.5},
    )
    return Scenario([[{"factor": np.float32(1)}] * 2], (14,), structure=structure)


def make_host(hvd: Any, order: str, options: argparse.Namespace, scenario: Scenario) -> Host:
    """Return the host of a process of Horovod."""

    def settings() -> dict[str, Any]:
        found = dict(scenario.settings())
        if "GradScaler" in options.host:
            return {**found, "is_distributed": True}
        if order != "plain":
            # Horovod's optimizer for TensorFlow 1 does not forward the method that asks for it.
            found.pop("records_norm", None)
        return {**found, "wrap": lambda inner, **given: wrap(hvd, order, inner, **given)}

    make: Any = hosts()[options.host].make
    if options.by:
        way = type("Loop", (make.func,), {"_on_replica": _STEPS[options.by]})
        make = functools.partial(way, *make.args, **make.keywords)
    return make(scenario.structure, scenario.rule, settings)


#: Prints the state after a step.
_Note: TypeAlias = Callable[[Any], None]


def _by_scenario(hvd: Any, order: str, options: argparse.Namespace, rank: int, note: _Note) -> None:
    """Train by a scenario, of which each process is fed the share of its replica."""
    scenario = _scenario(options.fed, rank)
    if order == "strategy":
        make = Estimator if options.host == "Estimator" else hosts_of_workers()[options.host]
        steps = scenario.steps()
        host = make(scenario.structure, scenario.rule, scenario.settings, strategy=_strategy())
    else:
        scenario = of_mean(scenario)
        host = make_host(hvd, order, options, scenario)
        steps = [[combined(scenario.structure, [feds[rank]], options.factor)] for feds in scenario.steps()]
    if options.restore:
        host.restore(options.restore)
    else:
        host.begin()
    steps = steps[options.first : options.last]
    if isinstance(host, Estimator) and order == "strategy":
        host.note = lambda state: note(as_json(state))
        host.train(steps)
        return
    if not options.save:
        for state in host.train(steps)[1:]:
            note(as_json(state))
        return
    for number, feds in enumerate(steps, start=options.first + 1):
        # Every worker of a strategy must take part in saving, and each writes to its own directory.
        state, directory = as_json(host.train([feds])[-1]), options.save / str(rank) / str(number)
        if order == "strategy" or rank == 0:
            directory.mkdir(parents=True)
            host.save(directory)
        note(state)


def _by_constants(hvd: Any, order: str, options: argparse.Namespace, rank: int, note: _Note) -> None:
    """Train on a gradient that is a constant of the graph.

    At one step the first worker also fetches the loss, and the norm of the gradients.
    """
    with tf.Graph().as_default(), tf1.Session() as session:
        weight = tf1.get_variable("weight", initializer=1.0)
        table = tf1.get_variable("table", initializer=[1.0, 1.0])
        # Float16 cannot represent 1 + 2**-12, so a gradient that travels in float16 is rounded to 1.
        loss = weight * (1 + 2.0**-12) + tf.reduce_sum(tf.gather(table, [0]))
        inner = tf1.train.GradientDescentOptimizer(0.125)
        opt = wrap(hvd, order, inner, loss_scale_manager=tfmp.FixedLossScaleManager(8))
        train_op = opt.minimize(loss)
        session.run(tf1.global_variables_initializer())
        for step in range(options.last):
            session.run([train_op, loss, opt.gradient_norm] if step == 1 and rank == 0 else train_op)
            note(session.run(weight).tolist())


def _by_fit(hvd: Any, order: str, options: argparse.Namespace, rank: int, note: _Note) -> None:
    for state in FitOnReplicas(installed()[options.host], _strategy()).train(inputs()[: options.last]):
        note(state)


def _under_a_strategy(hvd: Any, order: str, options: argparse.Namespace, rank: int, note: _Note) -> None:
    """Take a step under a strategy, which Horovod's processes must not have."""
    strategy, weight = tf.distribute.OneDeviceStrategy("cpu:0"), tf.Variable(1.0)
    with strategy.scope():
        opt = wrap(hvd, order, tf1.train.GradientDescentOptimizer(0.125), loss_scale_manager=8)
        strategy.run(lambda: opt.minimize(lambda: weight * 1.0, var_list=[weight]))
    note(weight.numpy().tolist())


def _ranges(hvd: Any, order: str, options: argparse.Namespace, rank: int, note: _Note) -> None:
    """Note what `exponent_counts` sums over the workers, and what a hook finds in the second of three steps."""
    grads = [1.0, 2.0**rank]
    with tf.Graph().as_default(), tf1.Session() as session:
        rows = session.run(tfmp.ranges.exponent_counts([tf.constant(grads), None], is_distributed=True))
    if tf.executing_eagerly():
        eager = tfmp.ranges.exponent_counts([tf.constant(grads), None], is_distributed=True)
        assert eager.numpy().tolist() == rows.tolist()
    note([tfmp.ranges.RangeHistogram(row).to_dict() for row in rows])
    with tf.Graph().as_default():
        w = tf1.get_variable("w", initializer=[1.0, 2.0])
        factor = tf1.placeholder_with_default([4.0 * (rank + 1), 0.0], [2])
        opt = wrap(hvd, order, tf1.train.GradientDescentOptimizer(0.0), loss_scale_manager=16)
        loss = tf.reduce_sum(tfmp.ranges.probe(w * factor, "product"))
        train_op = opt.minimize(loss, tf1.train.get_or_create_global_step())
        hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=2)
        with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
            for _ in range(3):
                session.run(train_op)
    last = hook.ranges.last
    kinds = {kind: {name: each.to_dict() for name, each in of.items()} for kind, of in last.histograms.items()}
    note({"step": last.step, "loss_scale": last.loss_scale, **kinds})


_OTHERS = {"constants": _by_constants, "fit": _by_fit, "one device": _under_a_strategy, "ranges": _ranges}


@functools.cache
def _strategy() -> tf.distribute.Strategy:
    api = tf.distribute if tf.executing_eagerly() else tf1.distribute.experimental
    return api.MultiWorkerMirroredStrategy()


def options_of(training: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("fed_and_order")
    parser.add_argument("--by", choices=_STEPS, help="how the step of a loop is written")
    parser.add_argument("--factor", type=float, default=1.0, help="a factor for the gradients")
    parser.add_argument("--host", help="the name of the host")
    parser.add_argument(
        "--v1-behavior", action="store_true", help="turn TensorFlow 1's behavior on, for the trainings after it too"
    )
    add_options(parser)
    options = parser.parse_args(shlex.split(training))
    options.fed, options.order = options.fed_and_order.split("/")
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainings", nargs="+", help="what is fed, a slash, an order of `wrap`, and then options")
    parser.add_argument("--record", action="store_true", help="print the collective operations of Horovod in each")
    arguments = parser.parse_args()
    if "TF_CONFIG" in os.environ:
        hvd, rank = None, json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    else:
        if arguments.record:
            # With this setting Horovod can record its collective operations from a later call on. Recording keeps one
            # core busy, so it is not on by default.
            os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
        hvd = importlib.import_module("horovod.tensorflow")
        hvd.init()
        rank = hvd.rank()
    for training in arguments.trainings:
        tell = functools.partial(_tell, rank, training)
        warnings = _Warnings(tell)
        logging.getLogger("tfmp").addHandler(warnings)
        # If a training fails or hangs, this line shows which one.
        tell("START", None)
        try:
            _train(hvd, rank, training, arguments.record, tell)
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


def _train(hvd: Any, rank: int, training: str, record: bool, tell: Callable[[str, Any], None]) -> None:
    options = options_of(training)
    if options.v1_behavior:
        tf1.disable_v2_behavior()
    with tempfile.TemporaryDirectory() as directory:
        timeline = Path(directory) / "timeline.json"
        if record:
            _start_timeline(hvd, timeline, training)
        told: list[Any] = []

        def note(state: Any) -> None:
            told.append(state)
            tell("STATE", state)
            die_after(options, len(told), rank)

        _OTHERS.get(options.fed, _by_scenario)(hvd, options.order, options, rank, note)
        if record:
            hvd.stop_timeline()
        if record and rank == 0:
            events = timeline.read_text(encoding="utf-8")
            kinds = ("ALLREDUCE", "ALLGATHER")
            tell("COLLECTIVES", {kind: events.count(f'"name": "{kind}"') / len(told) for kind in kinds})


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


if __name__ == "__main__":
    main()
