"""Measures how much Horovod's workers send in a step of tfmp, and what the two small reductions of a step cost.

    horovodrun --gloo -np 2 python -m benchmarks.horovod_traffic --json traffic_2.json

All processes run on this machine. The bytes that they send are read from the counters of the loopback interface, so no
other program should use it during the measurement. Every way to share gradients takes the same steps, in turns. Figures
are medians.

The first table is for gradients with the shapes of BERT's. The second table is for a few gradients after a backward
pass that takes time but no CPU, like a backward pass on an accelerator. It shows which of the small reductions run
during the backward pass and so add no time to the step.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tensorflow as tf

import tfmp
from benchmarks import ring_sums
from benchmarks.harness import report
from benchmarks.harness.bert_shapes import bert_shapes
from tfmp.core.distribute import Horovod
from tfmp.core.step import scaler
from tfmp.types import Gradients

tf1 = tf.compat.v1

#: About the highest value that a dynamic scale reaches where activations are float16.
_LOSS_SCALE = 2.0**16


class Way(NamedTuple):
    """A way to share gradients.

    Attributes:
        wrapped: Whether tfmp wraps the optimizer.
        averages: The package that averages gradients, "tfmp" or "hvd".
        dtype: The type in which gradients are sent.
    """

    wrapped: bool
    averages: str
    dtype: tf.DType

    def __str__(self) -> str:
        """Return the label of this way in a table."""
        who = "tfmp" if self.averages == "tfmp" else f"{'tfmp around ' if self.wrapped else ''}hvd.DistributedOptimizer"
        return f"{who}, {self.dtype.name}"


WAYS = (
    Way(True, "tfmp", tf.float32),
    Way(True, "tfmp", tf.float16),
    Way(False, "hvd", tf.float32),
    Way(False, "hvd", tf.float16),
    Way(True, "hvd", tf.float32),
    Way(True, "hvd", tf.float16),
)


class Lacking(Horovod):
    """The processes that Horovod connects, without some of the small reductions.

    Args:
        horovod: The module `horovod.tensorflow`, initialized.
        reductions: The reductions to keep: "forms", in which workers compare the forms of their gradients (missing,
            dense or sparse); "flag", in which they agree whether all gradients are finite.
    """

    def __init__(self, horovod: Any, reductions: Sequence[str]) -> None:  # noqa: ANN401 - a module
        super().__init__(horovod)
        self._reductions = reductions

    def _assert_same_forms(self, grads: Gradients, names: Sequence[str]) -> tf.Operation:
        return super()._assert_same_forms(grads, names) if "forms" in self._reductions else tf.no_op()

    def agree(
        self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return whether the flag is true in every process, or only in this one."""
        return super().agree(usable, max_abs, grads, names) if "flag" in self._reductions else (usable, max_abs)


#: The small reductions that a step keeps, by the label of the table's row.
KEPT: Mapping[str, tuple[str, ...]] = {"neither": (), "forms": ("forms",), "flag": ("flag",), "both": ("forms", "flag")}


class Workers:
    """All processes of the run, as this process sees them, with one graph and one session.

    Args:
        horovod: The module `horovod.tensorflow`, initialized.
    """

    def __init__(self, horovod: Any) -> None:  # noqa: ANN401 - a module
        self.horovod = horovod
        self.rank, self.count = horovod.rank(), horovod.size()
        # A placeholder: TensorFlow's constant folding would remove Horovod's reduction of a constant.
        self._barrier = horovod.allreduce(tf1.placeholder_with_default(1.0, []), op=horovod.Sum, name="barrier")
        # The processes share the cores.
        threads = tf1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=4)
        self.session = tf1.Session(config=threads)

    def measure(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        """Return the bytes that one worker sent in a call, and the seconds of a call, both as means.

        Args:
            run: The function to measure.
            times: How often to call it.
        """
        run()  # Not measured: Horovod negotiates the tensors behind each name again after other tensors were sent.
        self.session.run(self._barrier)
        sent, started = _loopback_bytes(), time.perf_counter()
        for _ in range(times):
            run()
        self.session.run(self._barrier)
        seconds = time.perf_counter() - started
        return (_loopback_bytes() - sent) / times / self.count, seconds / times


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and let the first process print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    import horovod.tensorflow as horovod

    horovod.init()
    figures: dict[str, Any] = {"conditions": report.conditions(f"horovodrun --gloo -np {horovod.size()}")}
    texts = [report.lines(figures["conditions"])]
    with tf.Graph().as_default():
        figures["sharing"] = _measure_sharing(Workers(horovod), options)
        texts.append(_sharing_text(figures["sharing"]))
    with tf.Graph().as_default():
        figures["small_reductions"] = _measure_small_reductions(Workers(horovod), options)
        texts.append(_reductions_text(figures["small_reductions"]))
    if horovod.rank() == 0:
        print("\n\n".join(texts))
        report.write_json(options.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="number of the model's layers (default: %(default)s)")
    parser.add_argument(
        "--vocabulary", type=int, default=4096, help="size of the model's vocabulary (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of every way to share gradients (default: %(default)s)"
    )
    parser.add_argument("--small_rounds", type=int, default=15, help="turns with few gradients (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn (default: %(default)s)")
    parser.add_argument(
        "--backward_ms",
        type=float,
        default=20,
        help="duration of the backward pass, in milliseconds (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    return parser


def _measure_sharing(workers: Workers, options: argparse.Namespace) -> dict[str, Any]:
    shapes = bert_shapes(options.hidden, options.layers, options.vocabulary)
    sizes = [int(np.prod(shape)) for shape in shapes]
    all_gradients = [ring_sums.worker_gradients(rank, sum(sizes)) for rank in range(workers.count)]
    own = np.split(all_gradients[workers.rank], np.cumsum(sizes)[:-1])
    fed = {tf1.placeholder(tf.float32, shape): part.reshape(shape) for part, shape in zip(own, shapes, strict=True)}
    coefficients = [tf1.Variable(part, trainable=False, use_resource=True) for part in fed]
    steps = {way: _sharing_step(workers.horovod, way, coefficients) for way in WAYS}
    workers.session.run(tf1.global_variables_initializer(), fed)

    mean = np.mean(all_gradients, axis=0, dtype=np.float64)
    figures: dict[str, Any] = {str(way): {"turns": []} for way in steps}
    for way, (_, shared) in steps.items():
        figure = figures[str(way)]
        flat = np.concatenate([np.ravel(part) for part in workers.session.run(shared)])
        figure["relative_error"] = ring_sums.relative_error(flat, mean)
        figure["formula_bytes"] = 2 * (workers.count - 1) / workers.count * sum(sizes) * way.dtype.size
        if way.averages == "tfmp" and workers.rank == 0:
            scaled = np.stack(all_gradients) * np.float32(_LOSS_SCALE)
            simulated = ring_sums.ring_mean(scaled, way.dtype.as_numpy_dtype) / _LOSS_SCALE
            figure["simulated_relative_error"] = ring_sums.relative_error(simulated, mean)
    for _ in range(options.rounds):
        for way, (train_op, _) in steps.items():
            measured = workers.measure(functools.partial(workers.session.run, train_op), options.steps)
            figures[str(way)]["turns"].append(measured)
    idle_bytes, _ = workers.measure(lambda: time.sleep(1), 2)
    return {
        "workers": workers.count,
        "parameters": sum(sizes),
        "idle_bytes_per_second": idle_bytes,
        "ways": figures,
    }


def _sharing_step(
    horovod: Any,  # noqa: ANN401 - a module
    way: Way,
    coefficients: Sequence[tf.Variable],
) -> tuple[tf.Operation, list[tf.Tensor]]:
    """Return a step of one way, and the gradients that it shares."""
    weights = [tf1.Variable(tf.zeros(each.shape), use_resource=True) for each in coefficients]
    opt: Any = tf1.train.GradientDescentOptimizer(0.01)
    if way.averages == "hvd":
        compression = horovod.Compression.fp16 if way.dtype == tf.float16 else horovod.Compression.none
        opt = horovod.DistributedOptimizer(opt, compression=compression)
    if way.wrapped:
        dtype = way.dtype.name if way.averages == "tfmp" and way.dtype != tf.float32 else None
        manager = tfmp.FixedLossScaleManager(_LOSS_SCALE)
        opt = tfmp.LossScaleOptimizer(opt, manager, is_distributed=True, aggregation_dtype=dtype)
    loss = tf.add_n([tf.reduce_sum(weight * each) for weight, each in zip(weights, coefficients, strict=True)])
    grads_and_vars = opt.compute_gradients(loss, weights)
    return opt.apply_gradients(grads_and_vars), [grad for grad, _ in grads_and_vars]


def _measure_small_reductions(workers: Workers, options: argparse.Namespace) -> dict[str, Any]:
    seconds = tf1.placeholder(tf.float32, [])
    steps = {name: _small_step(workers.horovod, kept, seconds) for name, kept in KEPT.items()}
    workers.session.run(tf1.global_variables_initializer())
    figures: dict[str, Any] = {"workers": workers.count, "seconds": {}, "bytes": {}}
    for _ in range(options.small_rounds):
        for backward_ms in (0.0, options.backward_ms):
            for name, step in steps.items():
                run = functools.partial(workers.session.run, step, {seconds: backward_ms / 1000})
                measured = workers.measure(run, 5 * options.steps)
                for kind, value in zip(("bytes", "seconds"), measured, strict=True):
                    figures[kind].setdefault(f"{backward_ms:g}", {}).setdefault(name, []).append(value)
    return figures


def _small_step(
    horovod: Any,  # noqa: ANN401 - a module
    kept: Sequence[str],
    seconds: tf.Tensor,
) -> tf.Operation:
    """Return a step with few gradients, after a backward pass of the given duration, with only these reductions."""
    weights = [tf1.Variable(tf.zeros([256]), use_resource=True) for _ in range(4)]
    coefficient = tf1.Variable(tf.ones([256]), trainable=False, use_resource=True)
    inner, manager = tf1.train.GradientDescentOptimizer(0.01), tfmp.FixedLossScaleManager(_LOSS_SCALE)
    opt: Any = tfmp.LossScaleOptimizer(inner, manager, is_distributed=True)
    with tf.control_dependencies([tf.numpy_function(_sleep, [seconds], tf.float32)]):
        late = tf.identity(coefficient)
    loss = tf.add_n([tf.reduce_sum(weight * late) for weight in weights])
    # No option of tfmp leaves these reductions out.
    with mock.patch.object(scaler, "current_distribution", return_value=Lacking(horovod, kept)):
        return opt.minimize(loss, var_list=weights)


def _sleep(seconds: np.float32) -> np.float32:
    time.sleep(float(seconds))
    return seconds


def _sharing_text(figures: dict[str, Any]) -> str:
    rows = []
    base = figures["ways"][str(WAYS[0])]["turns"]
    idle = figures["idle_bytes_per_second"]
    for name, figure in figures["ways"].items():
        sent = statistics.median(sent for sent, _ in figure["turns"])
        seconds = statistics.median(seconds for _, seconds in figure["turns"])
        pairs = list(zip(figure["turns"], base, strict=True))
        rows.append(
            [
                name,
                f"{sent / 2**20:.2f}",
                f"{figure['formula_bytes'] / 2**20:.2f}",
                f"{sent / figure['formula_bytes']:.3f}",
                f"{statistics.median(one[0] / other[0] for one, other in pairs):.3f}",
                f"{seconds * 1000:.0f}",
                f"{statistics.median(one[1] / other[1] for one, other in pairs):.2f}",
                f"{figure['relative_error']:.1e}",
                f"{figure['simulated_relative_error']:.1e}" if "simulated_relative_error" in figure else "",
            ]
        )
    header = ["way", "MiB sent", "formula", "of formula", "of float32", "ms", "of float32", "error", "simulated"]
    return (
        f"{figures['workers']} workers, {figures['parameters']} parameters: a step of one worker\n"
        f"{report.table(header, rows)}\n"
        f"An idle worker sends {idle / 2**10:.0f} KiB a second; this is not subtracted from the figures."
    )


def _reductions_text(figures: dict[str, Any]) -> str:
    rows = []
    for backward_ms, turns in figures["seconds"].items():
        sent = figures["bytes"][backward_ms]
        for name in KEPT:
            extra = [1000 * (one - other) for one, other in zip(turns[name], turns["neither"], strict=True)]
            rows.append(
                [
                    backward_ms,
                    name,
                    f"{1000 * statistics.median(turns[name]):.2f}",
                    f"{statistics.median(extra):+.2f}",
                    f"{min(extra):+.2f} to {max(extra):+.2f}",
                    f"{statistics.median(sent[name]) - statistics.median(sent['neither']):+.0f}",
                ]
            )
    header = ["backward ms", "small reductions", "step ms", "added ms", "in single turns", "added bytes"]
    return f"{figures['workers']} workers: what the small reductions add to a step\n{report.table(header, rows)}"


def _loopback_bytes() -> int:
    """Return the bytes that the loopback interface has received since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("/proc/net/dev has no interface lo: this runs on Linux only.")


if __name__ == "__main__":
    sys.exit(main())
