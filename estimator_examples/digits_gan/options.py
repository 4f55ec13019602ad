"""The command line of the example."""

import argparse
import pathlib
from collections.abc import Sequence

import tfmp
from estimator_examples import arguments

#: The compute types of a training. `float16` scales the loss, the others do not.
PRECISIONS = ("float32", "float16", "unscaled-float16")


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a wrong argument ends the program with an error message."""
    parser = _parser()
    options = parser.parse_args(argv)
    repeated = [name for name in PRECISIONS if options.precision.count(name) > 1]
    if repeated:
        parser.error(f"argument --precision: name each once, got {repeated[0]} twice.")
    return options


def scaler_for(precision: str, options: argparse.Namespace) -> tfmp.GradScaler:
    """Make the scaler of a training; except for `float16` it is disabled, and passes everything through."""
    return tfmp.GradScaler(options.init_scale, growth_interval=options.growth_interval, enabled=precision == "float16")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="digits_gan",
        usage="python -m estimator_examples.digits_gan [options]",
        description="Train a small GAN with gradient penalty, in float16 with one loss scale for two optimizers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        default=["float16"],
        help="what to compute in; several precisions are trained one after another, and compared",
    )
    parser.add_argument(
        "--iterations", type=arguments.positive_int, default=10_000, help="number of steps of the critic"
    )
    parser.add_argument(
        "--generator-every",
        type=arguments.positive_int,
        default=5,
        help="number of iterations between two steps of the generator",
    )
    parser.add_argument("--batch-size", type=arguments.positive_int, default=64, help="number of images per iteration")
    parser.add_argument("--learning-rate", type=arguments.positive, default=0.0005, help="learning rate of both Adams")
    parser.add_argument("--init-scale", type=arguments.loss_scale, default="2**24", help="initial loss scale")
    parser.add_argument(
        "--growth-interval",
        type=arguments.positive_int,
        default=500,
        help="iterations without overflow after which the scale doubles",
    )
    parser.add_argument("--seed", type=arguments.count, default=1, help="random seed of split, batches and weights")
    parser.add_argument(
        "--output-dir", type=pathlib.Path, default=pathlib.Path("digits_gan"), help="directory for the pictures"
    )
    return parser
