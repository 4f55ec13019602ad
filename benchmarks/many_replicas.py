"""Measures what it costs many devices, simulated on one machine, to agree whether all gradients are finite.

    python -m benchmarks.many_replicas --json replicas.json --plot replicas.png

Logical CPU devices train under MirroredStrategy. Three contenders take the same steps, in turns: a bare optimizer,
tfmp's wrapper, and the wrapper without the reduction of the flag that says whether the gradients are finite. Figures
are medians. The devices share the machine's cores, so only ratios are meaningful. In the end every replica overflows
once, and each time all replicas must skip the step.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import report
from tfmp.core.distribute import Mirrored
from tfmp.core.step import scaler
from tfmp.types import Gradients


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    conditions = report.printed_conditions()
    _make_devices(max(options.replicas))
    replicas = [_measure_replicas(count, options) for count in options.replicas]
    print(f"\n{_replicas_text(replicas)}", flush=True)
    report.write_json(options.json, {"conditions": conditions, "replicas": replicas})
    if options.plot:
        _plot(replicas, options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="numbers of replicas (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of every optimizer (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--plot", type=Path, help="a file to draw them in; needs matplotlib")
    return parser


def _make_devices(count: int) -> None:
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


class WithoutFlag(Mirrored):
    """The replicas of a strategy, without the reduction of the flag: the first replica's flag alone decides."""

    def agree(
        self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return the flag of this replica, whatever the other replicas' flags are."""
        del grads, names
        return usable, max_abs


class ReplicaTraining:
    """Weights under MirroredStrategy; every element of a replica's gradients equals the replica's input.

    Args:
        count: The number of replicas.
        wrapped: Whether tfmp wraps the optimizer.
        with_flag: Whether the replicas agree on the flag.
    """

    def __init__(self, count: int, wrapped: bool, with_flag: bool = True) -> None:
        # Keras 2 or 3, whichever belongs to the installed TensorFlow.
        import keras

        # The default, collective ops, fails on CPUs when one process makes a second strategy.
        self._strategy = tf.distribute.MirroredStrategy(
            [f"cpu:{replica}" for replica in range(count)], cross_device_ops=tf.distribute.ReductionToOneDevice()
        )
        with self._strategy.scope():
            self.weights = [tf.Variable(tf.zeros([128, 128])) for _ in range(8)]
            self.opt = keras.optimizers.Adam(1e-3)
            if wrapped:
                manager = tfmp.ExponentialUpdateLossScaleManager(2.0**40, 2**30, 1, decr_ratio=0.5)
                self.opt = tfmp.LossScaleOptimizer(self.opt, manager)
            self.opt.build(self.weights)

        def on_replica(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(weight) for weight in self.weights]) * x
                loss = self.opt.scale_loss(loss) if wrapped else loss
            self.opt.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights, strict=True))

        def step(inputs: tf.Tensor) -> None:
            # No option of tfmp leaves the reduction of the flag out.
            missing = mock.patch.object(scaler, "current_distribution", return_value=WithoutFlag())
            with contextlib.nullcontext() if with_flag else missing:
                self._strategy.run(on_replica, args=(inputs,))

        self._step = tf.function(step)
        self.inputs = self.inputs_of([1.0] * count)

    def inputs_of(self, values: Sequence[float]) -> tf.distribute.DistributedValues:
        """Return the input of a step that feeds each replica its value."""
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    def step(self, inputs: tf.distribute.DistributedValues | None = None) -> None:
        """Take a step on all replicas."""
        self._step(self.inputs if inputs is None else inputs)

    def weights_of_replicas(self) -> list[list[np.ndarray]]:
        """Return the values of the weights on each replica."""
        parts = [self._strategy.experimental_local_results(weight) for weight in self.weights]
        return [[part.numpy() for part in replica] for replica in zip(*parts, strict=True)]


def _measure_replicas(count: int, options: argparse.Namespace) -> dict[str, Any]:
    trainings = {
        "bare": ReplicaTraining(count, wrapped=False),
        "wrapped": ReplicaTraining(count, wrapped=True),
        "without_flag": ReplicaTraining(count, wrapped=True, with_flag=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for training in trainings.values():
        training.step()
    for _ in range(options.rounds):
        for name, training in trainings.items():
            seconds[name].append(_seconds(training.step, options.steps))
    return {"replicas": count, "seconds": seconds, **_overflow_on_each(trainings["wrapped"], count)}


def _seconds(run: Callable[[], None], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - started) / times


def _overflow_on_each(training: ReplicaTraining, count: int) -> dict[str, Any]:
    """Let one replica after the other overflow; return how many steps were skipped and whether weights stayed equal."""
    before = training.weights_of_replicas()
    skipped = int(training.opt.skipped_steps)
    for replica in range(count):
        training.step(training.inputs_of([float("inf") if each == replica else 1.0 for each in range(count)]))
    after = training.weights_of_replicas()
    return {
        "skipped": int(training.opt.skipped_steps) - skipped,
        "weights_unchanged": all(np.array_equal(*pair) for pair in _pairs(before, after)),
        "replicas_equal": all(np.array_equal(*pair) for replica in after for pair in _pairs([after[0]], [replica])),
    }


def _pairs(one: list[list[np.ndarray]], other: list[list[np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [pair for mine, others in zip(one, other, strict=True) for pair in zip(mine, others, strict=True)]


def _replicas_text(replicas: Sequence[dict[str, Any]]) -> str:
    rows = []
    for measured in replicas:
        seconds = measured["seconds"]
        rows.append(
            [
                str(measured["replicas"]),
                f"{1000 * statistics.median(seconds['bare']):.1f}",
                f"{_median_ratio(measured, 'wrapped', 'bare'):.2f}",
                f"{_median_ratio(measured, 'without_flag', 'bare'):.2f}",
                f"{_median_ratio(measured, 'wrapped', 'without_flag'):.2f}",
                f"{measured['skipped']} of {measured['replicas']}",
                "yes" if measured["weights_unchanged"] and measured["replicas_equal"] else "NO",
            ]
        )
    header = ["replicas", "bare, ms", "wrapped", "without flag", "flag alone", "skipped", "weights kept"]
    return f"MirroredStrategy: a step, and its time as a multiple\n{report.table(header, rows)}"


def _median_ratio(measured: dict[str, Any], name: str, base: str) -> float:
    return report.median_ratio(measured["seconds"][name], measured["seconds"][base])


def _plot(replicas: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, times = pyplot.subplots(figsize=(6, 4.5))
    counts = [measured["replicas"] for measured in replicas]
    for name, label in (("wrapped", "wrapped"), ("without_flag", "wrapped, without the flag")):
        times.plot(counts, [_median_ratio(each, name, "bare") for each in replicas], marker="o", label=label)
    times.set(xlabel="logical replicas", ylabel="time of a step / of a bare one", ylim=(0, None))
    times.set_title("MirroredStrategy on one machine")
    times.grid(alpha=0.3)
    times.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
