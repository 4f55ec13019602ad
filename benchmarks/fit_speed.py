"""Measures what loss scaling costs `model.fit` of a small transformer.

    python -m benchmarks.fit_speed --json fit.json --plot fit.png

There are three contenders: Keras' optimizer bare, in Keras' own wrapper, and in tfmp's wrapper. Each trains a model
that starts from the same weights. The models are fitted to the same data in one process, in turns whose order rotates.
Figures are medians, and ratios compare turns of the same round. The losses must agree. Float32 needs no loss scaling,
but it is the way to measure the cost of scaling on CPUs, where `--policy mixed_float16` is slow. The embedding's
gradients are sparse. Peak memory is what a turn needs above the memory in use before it; it is measured in a process of
its own.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np

import tfmp
from benchmarks.harness import peak_memory, report, training_turns

#: The results of a contender's turns; they can be written as JSON.
Figures: TypeAlias = dict[str, Any]

_SCALE = 2.0**15

_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda opt: opt,
    "Keras": lambda opt: keras.mixed_precision.LossScaleOptimizer(opt, initial_scale=_SCALE),
    "tfmp": lambda opt: tfmp.LossScaleOptimizer(opt, _manager()),
}

_LEARNING_RATES = {"Adam": 1e-3, "AdamW": 1e-3, "SGD": 0.1}

#: How much the losses of the contenders may differ. Sums are computed in any order, and Adam amplifies the rounding
#: differences. Without a loss scale, float16 also loses small gradients.
_TOLERANCES = {"float32": 1e-3, "mixed_bfloat16": 2e-2, "mixed_float16": 5e-2}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status.

    Raises:
        ArithmeticError: The losses of the contenders differ by more than the tolerance.
    """
    options = _parser().parse_args(argv)
    conditions = report.printed_conditions()
    memory = peak_memory.in_own_process(peaks, options)
    trainings = _trainings(options)
    weights = trainings["bare"].model.count_params()
    title = f"{options.optimizer}, {options.policy}{', XLA' if options.jit_compile else ''}, {weights:,} weights"
    print(f"\n{title}", flush=True)
    figures = _measure(trainings, options.rounds)
    for name, each in figures.items():
        each["peak_bytes"] = memory[name]
    print(f"\n{_text(figures)}", flush=True)
    settings = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    report.write_json(options.json, {"conditions": conditions, "settings": settings, "figures": figures})
    if options.plot:
        milliseconds: dict[str, Sequence[float]] = {
            name: [1000 * turn for turn in turns] for name, turns in _turns(figures).items()
        }
        training_turns.plot({f"model.fit\n{title}": milliseconds}, "ms a step", options.plot)
    training_turns.check_losses({name: each["losses"] for name, each in figures.items()}, _TOLERANCES[options.policy])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "layers": (2, "transformer layers"),
        "hidden": (256, "width of the layers, a multiple of 64"),
        "vocabulary": (20000, "number of different tokens"),
        "length": (32, "tokens in an example"),
        "batch": (4, "examples in a step"),
        "rounds": (9, "turns of every contender"),
        "steps": (20, "steps in a turn"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--optimizer", choices=_LEARNING_RATES, default="Adam", help="(default: %(default)s)")
    parser.add_argument(
        "--policy", choices=_TOLERANCES, default="float32", help="dtype policy of the layers (default: %(default)s)"
    )
    parser.add_argument("--jit_compile", action="store_true", help="compile the whole step with XLA")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--plot", type=Path, help="a file to draw them in; needs matplotlib")
    return parser


def counting(rows: int, length: int, vocabulary: int) -> np.ndarray:
    """Return tokens that count up; each row begins at a random token.

    Args:
        rows: The number of rows.
        length: The number of tokens to predict in a row; a row has one token more.
        vocabulary: The number of different tokens; after the last token, counting goes on at 0.

    Examples:
        >>> counting(2, 3, 5)
        array([[4, 0, 1, 2],
               [3, 4, 0, 1]])
    """
    starts = np.random.default_rng(0).integers(vocabulary, size=[rows, 1])
    return (starts + np.arange(length + 1)) % vocabulary


def transformer(options: argparse.Namespace) -> keras.Model:
    """Return a model that predicts the next token. It has no position embedding: counting needs none."""
    layers, dtype, hidden = keras.layers, options.policy, options.hidden
    tokens = keras.Input([options.length], dtype="int32")
    x = layers.Embedding(options.vocabulary, hidden, dtype=dtype)(tokens)
    for _ in range(options.layers):
        y = layers.LayerNormalization(dtype=dtype)(x)
        y = layers.MultiHeadAttention(max(1, hidden // 64), 64, dtype=dtype)(y, y, use_causal_mask=True)
        x = layers.Add(dtype=dtype)([x, y])
        y = layers.LayerNormalization(dtype=dtype)(x)
        y = layers.Dense(4 * hidden, activation="gelu", dtype=dtype)(y)
        x = layers.Add(dtype=dtype)([x, layers.Dense(hidden, dtype=dtype)(y)])
    logits = layers.Dense(options.vocabulary, dtype=dtype)(layers.LayerNormalization(dtype=dtype)(x))
    return keras.Model(tokens, layers.Activation("linear", dtype="float32")(logits))


class FitTraining:
    """A transformer that is fitted turn by turn.

    The dtype policy is set for the layers and not globally: with a global policy of mixed_float16, `compile` would wrap
    the bare optimizer too.

    Args:
        name: The name of the contender.
        tokens: A row for each example; a row has one token more than the model takes.
        options: The options of the command.
    """

    def __init__(self, name: str, tokens: np.ndarray, options: argparse.Namespace) -> None:
        self._tokens, self._batch = tokens, options.batch
        self.model = transformer(options)
        optimizer = getattr(keras.optimizers, options.optimizer)(_LEARNING_RATES[options.optimizer])
        self.model.compile(
            _WRAPPERS[name](optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=options.jit_compile,
        )
        self.loss = float("nan")

    def turn(self) -> float:
        """Fit all data once, and return the mean seconds of a step; `loss` is then the mean loss of these steps."""
        clock = _Clock()
        inputs, targets = self._tokens[:, :-1], self._tokens[:, 1:]
        fitted = self.model.fit(inputs, targets, batch_size=self._batch, shuffle=False, verbose=0, callbacks=[clock])
        self.loss = fitted.history["loss"][-1]
        return clock.seconds * self._batch / len(inputs)

    @property
    def steps_taken(self) -> int:
        """The number of steps that the optimizer applied; skipped steps are not counted."""
        # In Keras 2, the `iterations` of Keras' own wrapper are those of the inner optimizer.
        return int(self.model.optimizer.iterations)


class _Clock(keras.callbacks.Callback):
    """Times the steps of a fit, without the preparations before the first step."""

    seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds = time.perf_counter() - self._started


def _manager() -> tfmp.ExponentialUpdateLossScaleManager:
    """Return a manager with the same rule as Keras' own wrapper."""
    return tfmp.ExponentialUpdateLossScaleManager(
        _SCALE, incr_every_n_steps=2000, decr_every_n_nan_or_inf=1, decr_ratio=0.5
    )


def peaks(options: argparse.Namespace) -> dict[str, list[int | None]]:
    """Return the peak memory of each contender's turns, in bytes above the memory in use before the turn."""
    trainings = _trainings(options)
    for training in trainings.values():
        training.turn()
    return {name: [peak_memory.during(each.turn) for _ in range(3)] for name, each in trainings.items()}


def _trainings(options: argparse.Namespace) -> dict[str, FitTraining]:
    tokens = counting(options.steps * options.batch, options.length, options.vocabulary)
    trainings = {name: FitTraining(name, tokens, options) for name in _WRAPPERS}
    # The weights are copied: a seed in Keras would be one for the whole process, not for each model.
    for training in trainings.values():
        training.model.set_weights(trainings["bare"].model.get_weights())
    return trainings


def _measure(trainings: dict[str, FitTraining], rounds: int) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    for name, training in trainings.items():
        started = time.perf_counter()
        training.turn()
        first = time.perf_counter() - started
        figures[name] = {"first_fit_seconds": first, "losses": [training.loss], "step_seconds": []}
    for turn in range(rounds):
        for name in training_turns.rotated(list(trainings), turn):
            figures[name]["step_seconds"].append(trainings[name].turn())
            figures[name]["losses"].append(trainings[name].loss)
        latest = {name: 1000 * turns[-1] for name, turns in _turns(figures).items()}
        print(training_turns.progress(turn, rounds, latest, "ms a step"), flush=True)
    for name, training in trainings.items():
        figures[name]["steps_taken"] = training.steps_taken
    return figures


def _turns(figures: dict[str, Figures]) -> dict[str, list[float]]:
    return {name: each["step_seconds"] for name, each in figures.items()}


def _text(figures: dict[str, Figures]) -> str:
    turns = _turns(figures)
    rows = [
        [
            name,
            f"{1000 * statistics.median(turns[name]):.1f}",
            f"{report.median_ratio(turns[name], turns['bare']):.3f}",
            f"{report.median_ratio(turns[name], turns['Keras']):.3f}",
            training_turns.mebibytes(each["peak_bytes"]),
            f"{each['first_fit_seconds']:.1f}",
            f"{each['losses'][0]:.6f} -> {each['losses'][-1]:.6f}",
            str(each["steps_taken"]),
        ]
        for name, each in figures.items()
    ]
    header = ["", "ms a step", "of bare", "of Keras", "peak MiB", "first fit, s", "loss of a turn", "steps taken"]
    return report.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
