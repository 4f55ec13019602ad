"""The command-line options of the pre-training."""

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Sequence

from estimator_examples import arguments
from estimator_examples.bert import corpus


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of a run; the fields are named like the options of the command line."""

    model_dir: pathlib.Path
    input: tuple[str, ...]
    precision: str
    loss_scale: float
    init_loss_scale: float
    incr_every_n_steps: int
    max_consecutive_skips: int
    num_train_steps: int
    num_warmup_steps: int
    learning_rate: float
    weight_decay: float
    clip_norm: float
    batch_size: int
    dropout: float
    seed: int
    seq_length: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    recompute: bool
    dupe_factor: int
    log_every: int
    save_checkpoints_steps: int
    distribute: str
    aggregation_dtype: str | None

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale is dynamic, so that it adapts to the gradients."""
        return self.precision != "O0" and self.loss_scale == 0

    @property
    def fixed_loss_scale(self) -> float | None:
        """The fixed loss scale; None if the scale is dynamic. It is 1 in float32, which needs no scaling."""
        if self.precision == "O0":
            return 1.0
        return None if self.dynamic else self.loss_scale

    @property
    def loss_scaling(self) -> str:
        """How the loss is scaled, in words."""
        return "dynamic loss scale" if self.dynamic else f"fixed loss scale {self.fixed_loss_scale:.10g}"


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="run_pretraining",
        usage="python -m estimator_examples.bert.run_pretraining [options]",
        description="Pre-train a small BERT in float16 with tf.estimator and tfmp's loss scaling.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_files(parser)
    _add_precision(parser)
    _add_training(parser)
    _add_model(parser)
    _add_workers(parser)
    return parser


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line; a wrong argument ends the program with an error message.

    Args:
        argv: The arguments; None means those of the process.

    Returns:
        The settings, which were checked to be consistent.
    """
    parser = make_parser()
    values = vars(parser.parse_args(argv))
    values["input"] = tuple(values.get("input", ()))
    values.setdefault("num_warmup_steps", values["num_train_steps"] // 10)
    values.setdefault("aggregation_dtype", None)
    options = Options(**values)
    problem = _disagreement(options) or _disagreement_on_workers(options)
    if problem:
        parser.error(problem)
    return options


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument(
        "--model_dir",
        type=pathlib.Path,
        default=pathlib.Path("bert_model"),
        help="directory for data, checkpoints, summary and picture; a run continues the training that it finds there",
    )
    group.add_argument(
        "--input",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="UTF-8 text files to learn from; by default the manual that comes with Python is used. "
        f"{corpus.SENTENCE_ENDS}",
    )


def _add_precision(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("precision")
    group.add_argument(
        "--precision",
        choices=("O0", "O1", "O2", "O3"),
        default="O2",
        help="O0: float32. O1: float16 by tfmp.autocast, where that is safe. O2: float16 activations, float32 weights. "
        "O3: float16 weights too",
    )
    group.add_argument(
        "--loss_scale",
        type=arguments.loss_scale_or_zero,
        default=0.0,
        help="a fixed loss scale of 1 or more, such as 2**15; 0 for a dynamic one; not for O0",
    )
    group.add_argument(
        "--init_loss_scale",
        type=arguments.loss_scale,
        default="2**32",
        help="the value at which a dynamic loss scale starts in a new directory",
    )
    group.add_argument(
        "--incr_every_n_steps",
        type=arguments.positive_int,
        default=100,
        help="number of finite steps after which a dynamic loss scale doubles; long trainings use 1000 or 2000",
    )
    group.add_argument(
        "--max_consecutive_skips",
        type=arguments.positive_int,
        # Two skipped steps halve the scale, so 256 skipped steps reduce the largest float32 scale to 1.
        default=260,
        help="number of skipped steps in a row at which the run ends with an error",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--num_train_steps",
        type=arguments.positive_int,
        default=1200,
        help="number of applied steps, including those of earlier runs in the directory",
    )
    group.add_argument(
        "--num_warmup_steps",
        type=arguments.count,
        default=argparse.SUPPRESS,
        help="number of steps in which the learning rate rises; by default a tenth of all steps",
    )
    group.add_argument("--learning_rate", type=arguments.positive, default=1e-3, help="peak learning rate")
    group.add_argument(
        "--weight_decay", type=arguments.fraction, default=0.01, help="weight decay of kernels; biases do not decay"
    )
    group.add_argument("--clip_norm", type=arguments.positive, default=1.0, help="largest global norm of the gradients")
    group.add_argument(
        "--batch_size", type=arguments.positive_int, default=32, help="number of examples per worker and step"
    )
    group.add_argument("--dropout", type=arguments.fraction, default=0.1, help="share of activations that are dropped")
    group.add_argument("--seed", type=arguments.count, default=1, help="random seed of data, masks and weights")
    group.add_argument("--log_every", type=arguments.positive_int, default=50, help="number of steps between two lines")
    group.add_argument(
        "--save_checkpoints_steps",
        type=arguments.positive_int,
        default=200,
        help="number of steps between two checkpoints",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and data")
    group.add_argument("--seq_length", type=arguments.positive_int, default=64, help="number of tokens per example")
    group.add_argument("--vocab_size", type=arguments.positive_int, default=2000, help="largest number of word pieces")
    group.add_argument("--hidden_size", type=arguments.positive_int, default=128, help="width of the layers")
    group.add_argument("--num_layers", type=arguments.positive_int, default=2, help="number of Transformer layers")
    group.add_argument(
        "--num_heads", type=arguments.positive_int, default=4, help="number of attention heads per layer"
    )
    group.add_argument(
        "--recompute",
        action="store_true",
        help="compute each Transformer layer again for the gradients instead of keeping its activations",
    )
    group.add_argument(
        "--dupe_factor",
        type=arguments.positive_int,
        default=10,
        help="number of passes over the text, each with other masks",
    )


def _add_workers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workers")
    group.add_argument(
        "--distribute",
        choices=("none", "horovod", "tf_config"),
        default="none",
        help="what connects several processes that train together: horovodrun, or the variable TF_CONFIG",
    )
    group.add_argument(
        "--aggregation_dtype",
        choices=("float16",),
        default=argparse.SUPPRESS,
        help="the type in which gradients are sent between Horovod's workers; by default float32",
    )


def _disagreement(options: Options) -> str | None:
    if options.precision == "O0" and options.loss_scale:
        return f"float32 needs no loss scale, got {options.loss_scale:.10g}: leave out --loss_scale."
    if options.num_warmup_steps >= options.num_train_steps:
        return (
            "--num_warmup_steps must be less than --num_train_steps, "
            f"got {options.num_warmup_steps} and {options.num_train_steps}."
        )
    if options.hidden_size % options.num_heads:
        return f"--hidden_size must be a multiple of --num_heads, got {options.hidden_size} and {options.num_heads}."
    if options.seq_length < 16:
        return f"--seq_length must be 16 or more, got {options.seq_length}."
    # Unlike the methods of pathlib, these functions do not raise an error for a path that cannot be accessed.
    if os.path.exists(options.model_dir) and not os.path.isdir(options.model_dir):
        return f"--model_dir must be a directory, {options.model_dir} is a file."
    return None


def _disagreement_on_workers(options: Options) -> str | None:
    if options.aggregation_dtype and options.distribute != "horovod":
        return f"--aggregation_dtype is for --distribute horovod, got --distribute {options.distribute}."
    return None
