"""The cells of the step-cost benchmarks: the kinds of steps that are measured."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness.bert_shapes import bert_shapes

#: The loss scale that gradients are multiplied by: the initial scale of Keras' wrapper. Float16 represents it exactly.
SCALE = 2.0**15

#: The norm that scripts for BERT clip to. The gradients here have a larger norm, except those of the shapes "tiny".
CLIP_NORM = 1.0

_CLIPPING = ("unclipped", "clipped")
_DTYPES = ("float32", "float16")
_OUTCOMES = ("good", "skipped")


class Cell(NamedTuple):
    """A kind of step.

    Attributes:
        shapes: The shapes of the weights, a key of `SHAPES`.
        mode: How the step is run; each benchmark has its own names.
        optimizer: The class of the inner optimizer.
        clipping: "clipped" for clipping by global norm, or "unclipped".
        dtype: The type of the gradients.
        outcome: "good" for a step that is applied, or "skipped" for a step that overflows.
    """

    shapes: str
    mode: str
    optimizer: str
    clipping: str = "unclipped"
    dtype: str = "float32"
    outcome: str = "good"

    @property
    def step(self) -> str:
        """A description of the step without its shapes and mode.

        Examples:
            >>> Cell("bert", "eager", "Adam", dtype="float16").step
            'Adam, float16'
        """
        usual = ("unclipped", "float32", "good")
        return ", ".join([self.optimizer, *(value for value in self[3:] if value not in usual)])

    def __str__(self) -> str:
        """Return the heading of this cell."""
        return f"{self.shapes}, {self.mode}, {self.step}"


#: The shapes of weights, by name. "bert" has 53 million values in 71 tensors. "small" has a dense layer's two tensors:
#: the time of a step is what a step costs whatever its size. "tiny" is for trying a command out.
SHAPES: dict[str, Sequence[tuple[int, ...]]] = {
    "bert": bert_shapes(),
    "many": [(1024,)] * 800,
    "few": [(1024,)] * 100,
    "small": [(8, 8), (8,)],
    "tiny": [(8, 4), (4,), (3,)],
}


def gradients(cell: Cell) -> list[np.ndarray]:
    """Return gradients in true magnitude (not scaled), all of them finite.

    The gradients of a scaled loss are these times `SCALE`. The product is exact, in float16 too, so that all contenders
    end at the same weights.

    Args:
        cell: The kind of step.

    Examples:
        >>> [grad.shape for grad in gradients(Cell("tiny", "eager", "SGD"))]
        [(8, 4), (4,), (3,)]
    """
    rng = np.random.default_rng(0)
    return [
        (rng.integers(-128, 128, shape, np.int8) / np.float32(4096)).astype(cell.dtype) for shape in SHAPES[cell.shapes]
    ]


def overflowed(grad: np.ndarray) -> np.ndarray:
    """Return a copy of a gradient whose last element is infinite.

    Args:
        grad: The gradient; it stays as it is.
    """
    grad = grad.copy()
    grad.flat[-1] = np.inf
    return grad


def parser(
    description: str, modes: Sequence[str], optimizers: Sequence[str], rounds: int, short: Sequence[Cell] = ()
) -> argparse.ArgumentParser:
    """Return the command line's parser, whose options choose what to measure.

    Args:
        description: The description of the benchmark.
        modes: The modes in which steps can be run.
        optimizers: The classes of inner optimizers.
        rounds: The default number of turns of every contender.
        short: The cells of the option `--short`; by default there is no such option.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", nargs="+", choices=SHAPES, help="shapes of the weights (default: all but tiny)")
    made.add_argument("--modes", nargs="+", choices=modes, default=modes, help="how steps are run (default: all)")
    made.add_argument("--optimizers", nargs="+", choices=optimizers, default=optimizers, help="(default: all)")
    # If none of these three options is given, `_chosen` chooses.
    made.add_argument("--clip", nargs="+", choices=_CLIPPING, help="with clipping by global norm, or without")
    made.add_argument("--dtypes", nargs="+", choices=_DTYPES, help="types of the gradients")
    made.add_argument("--outcomes", nargs="+", choices=_OUTCOMES, help="steps that are applied, or that overflow")
    made.set_defaults(short=None)
    if short:
        about = "measure the steps that matter most when code changes, without the steps of tf_keras: five minutes"
        made.add_argument("--short", action="store_const", const=short, help=about)
    made.add_argument("--rounds", type=int, default=rounds, help="turns of every contender (default: %(default)s)")
    made.add_argument("--json", type=Path, help="a file to write the figures to")
    either = made.add_mutually_exclusive_group()
    either.add_argument("--plot", type=Path, help="a file to draw them in; needs matplotlib")
    either.add_argument(
        "--baseline",
        type=_checkout,
        metavar="PATH",
        help="the root of another checkout of tfmp, whose steps are compared with the steps of this checkout's tfmp. "
        "Two processes take turns, one for each checkout; ratios above 1 mean that this checkout is slower",
    )
    made.add_argument(
        "--pairs",
        type=int,
        default=3,
        help="with --baseline, the number of pairs of processes for each cell; in each pair every contender has "
        "--rounds turns (default: %(default)s)",
    )
    return made


def _checkout(text: str) -> Path:
    root = Path(text).resolve()
    if not (root / "tfmp" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no tfmp/__init__.py: name the root of a checkout of tfmp.")
    return root


def of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells to measure.

    The default is a choice that takes about half an hour. With the shapes of BERT and of a small model it has plain
    steps of all optimizers, and steps of Adam that are clipped, in float16, or skipped. With many tensors it has plain
    steps of SGD and Adam. Each contender traces a step with 800 tensors for half a minute, and XLA would compile the
    whole step for more than ten minutes: within XLA, 100 tensors are used instead, and on replicas none.

    With --shapes, all named shapes have the same steps. With any of --clip, --dtypes and --outcomes, every combination
    of the named values is measured. With --short, the other options select from its cells.

    Args:
        options: The options, as `parser` parsed them.

    Examples:
        >>> options = parser("", ["eager"], ["SGD", "Adam"], 1).parse_args(["--shapes", "tiny"])
        >>> [cell.step for cell in of(options)]
        ['SGD', 'Adam', 'Adam, clipped', 'Adam, float16', 'Adam, skipped']
    """
    if options.short:
        return [cell for cell in options.short if _is_selected(cell, options)]
    where = list(itertools.product(options.shapes or ("bert", "many", "small"), options.modes))
    if options.shapes is None:
        where = [pair for pair in where if pair != ("many", "replicas")]
        where = [("few" if pair == ("many", "xla") else pair[0], pair[1]) for pair in where]
    if not (options.clip or options.dtypes or options.outcomes):
        varied = options.shapes or ("bert", "small")
        return [cell for pair in where for cell in _chosen(*pair, options.optimizers, pair[0] in varied)]
    kinds = itertools.product(
        options.optimizers,
        options.clip or _CLIPPING[:1],
        options.dtypes or _DTYPES[:1],
        options.outcomes or _OUTCOMES[:1],
    )
    return [Cell(*pair, *kind) for pair, kind in itertools.product(where, kinds)]


def _is_selected(cell: Cell, options: argparse.Namespace) -> bool:
    selected = (options.shapes, options.modes, options.optimizers, options.clip, options.dtypes, options.outcomes)
    return all(values is None or value in values for value, values in zip(cell, selected, strict=True))


def _chosen(shapes: str, mode: str, optimizers: Sequence[str], varied: bool) -> Iterator[Cell]:
    plain = [optimizer for optimizer in optimizers if varied or optimizer != "AdamW"]
    yield from (Cell(shapes, mode, optimizer) for optimizer in plain)
    if varied and "Adam" in optimizers:
        adam = Cell(shapes, mode, "Adam")
        yield from (
            adam._replace(clipping="clipped"),
            adam._replace(dtype="float16"),
            adam._replace(outcome="skipped"),
        )
