"""The cells of the step-cost benchmarks: which steps are measured."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness.bert_shapes import bert_shapes

#: The loss scale that gradients come with: Keras' first one. In float16 it is exact.
SCALE = 2.0**15

#: As scripts for BERT clip; the gradients here are larger.
CLIP_NORM = 1.0

_CLIPPING = ("unclipped", "clipped")
_DTYPES = ("float32", "float16")
_OUTCOMES = ("good", "skipped")


class Cell(NamedTuple):
    """A kind of step.

    Attributes:
        shapes: Those of the weights, a name in `SHAPES`.
        mode: How the step is run; each benchmark has its own names.
        optimizer: The class of the optimizer that is wrapped.
        clipping: "clipped", by global norm, or "unclipped".
        dtype: The gradients' type.
        outcome: "good", or "skipped" for a step that overflows.
    """

    shapes: str
    mode: str
    optimizer: str
    clipping: str = "unclipped"
    dtype: str = "float32"
    outcome: str = "good"

    @property
    def step(self) -> str:
        """What the step is, wherever it is run.

        Example:
            >>> Cell("bert", "eager", "Adam", dtype="float16").step
            'Adam, float16'
        """
        usual = ("unclipped", "float32", "good")
        return ", ".join([self.optimizer, *(value for value in self[3:] if value not in usual)])

    def __str__(self) -> str:
        """Return what a heading says."""
        return f"{self.shapes}, {self.mode}, {self.step}"


#: "bert" has 53 million values in 71 tensors; "tiny" is for a try.
SHAPES = {
    "bert": bert_shapes(),
    "small": [(1024,)] * 800,
    "few": [(1024,)] * 100,
    "tiny": [(8, 4), (4,), (3,)],
}


def gradients(cell: Cell) -> list[np.ndarray]:
    """Return gradients in true magnitude, all of them finite.

    Times `SCALE` they are what a scaled loss gives: exactly, in float16 too, so that all contenders end at the same
    weights.

    Args:
        cell: The kind of step.

    Example:
        >>> [grad.shape for grad in gradients(Cell("tiny", "eager", "SGD"))]
        [(8, 4), (4,), (3,)]
    """
    rng = np.random.default_rng(0)
    return [
        (rng.integers(-128, 128, shape, np.int8) / np.float32(4096)).astype(cell.dtype) for shape in SHAPES[cell.shapes]
    ]


def overflowed(grad: np.ndarray) -> np.ndarray:
    """Return a gradient with an infinity at its end.

    Args:
        grad: The gradient.
    """
    grad = grad.copy()
    grad.flat[-1] = np.inf
    return grad


def parser(description: str, modes: Sequence[str], optimizers: Sequence[str], rounds: int) -> argparse.ArgumentParser:
    """Return a parser of what to measure.

    Args:
        description: What the benchmark does.
        modes: How steps can be run.
        optimizers: What can be wrapped.
        rounds: Turns of every contender, unless said otherwise.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", nargs="+", choices=SHAPES, help="of the weights (default: bert and small)")
    made.add_argument("--modes", nargs="+", choices=modes, default=modes, help="how steps are run (default: all)")
    made.add_argument("--optimizers", nargs="+", choices=optimizers, default=optimizers, help="(default: all)")
    # Without any of these three: `_chosen`.
    made.add_argument("--clip", nargs="+", choices=_CLIPPING, help="by global norm, or not")
    made.add_argument("--dtypes", nargs="+", choices=_DTYPES, help="of the gradients")
    made.add_argument("--outcomes", nargs="+", choices=_OUTCOMES, help="steps that are applied, or that overflow")
    made.add_argument("--rounds", type=int, default=rounds, help="turns of every contender (default: %(default)s)")
    made.add_argument("--json", type=Path, help="a file to write the figures to")
    either = made.add_mutually_exclusive_group()
    either.add_argument("--plot", type=Path, help="a file to draw them in; needs matplotlib")
    either.add_argument(
        "--baseline",
        type=_checkout,
        metavar="PATH",
        help="the root of another checkout of tfmp: compare only tfmp's steps, those of this checkout with those of "
        "that one. Two processes take turns, one with each checkout's tfmp and both with this checkout's benchmark; "
        "ratios above 1 mean that this checkout is slower. The bare optimizer is the same in both processes: its ratio "
        "shows what is noise",
    )
    made.add_argument(
        "--pairs",
        type=int,
        default=3,
        help="pairs of processes for each cell that is compared with --baseline, each with --rounds turns "
        "(default: %(default)s)",
    )
    return made


def _checkout(text: str) -> Path:
    root = Path(text).resolve()
    if not (root / "tfmp" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no tfmp/__init__.py: name the root of a checkout of tfmp.")
    return root


def of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells to measure.

    By default a choice, which is run in less than half an hour: plain steps of all optimizers for BERT's shapes, with
    those of Adam that are clipped, in float16 or skipped; and plain steps of SGD and Adam for small tensors. 800 small
    tensors are traced for half a minute by each contender, and XLA compiles the whole step of them for more than ten:
    there, 100 take their place.

    With --shapes the choice is the same for all shapes that are named. With any of --clip, --dtypes and --outcomes it
    is every combination of what is named.

    Args:
        options: What a `parser` parsed.

    Example:
        >>> options = parser("", ["eager"], ["SGD", "Adam"], 1).parse_args(["--shapes", "tiny"])
        >>> [cell.step for cell in of(options)]
        ['SGD', 'Adam', 'Adam, clipped', 'Adam, float16', 'Adam, skipped']
    """
    where = list(itertools.product(options.shapes or ("bert", "small"), options.modes))
    if options.shapes is None:
        where = [("few" if pair == ("small", "xla") else pair[0], pair[1]) for pair in where]
    if not (options.clip or options.dtypes or options.outcomes):
        varied = options.shapes or ("bert",)
        return [cell for pair in where for cell in _chosen(*pair, options.optimizers, pair[0] in varied)]
    kinds = itertools.product(
        options.optimizers,
        options.clip or _CLIPPING[:1],
        options.dtypes or _DTYPES[:1],
        options.outcomes or _OUTCOMES[:1],
    )
    return [Cell(*pair, *kind) for pair, kind in itertools.product(where, kinds)]


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
