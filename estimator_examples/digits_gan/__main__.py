"""The command `python -m estimator_examples.digits_gan`."""

import argparse
import random
import sys
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from estimator_examples import digits_session
from estimator_examples.digits_gan import options, report, training

_LINES = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a summary, and write pictures to the output directory.

    Args:
        argv: The command-line arguments; None means those of the process.

    Returns:
        The exit status.
    """
    settings = options.parse_options(argv)
    try:
        run(settings)
    except (ImportError, ValueError) as error:
        return _fail(error, 2)
    except OSError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("Interrupted: there is no summary.", file=sys.stderr)
        return 130
    return 0


def run(settings: argparse.Namespace) -> list[report.Outcome]:
    """Train in each precision, print the summary and draw the pictures.

    All trainings start from the same weights and use the same batches.

    Raises:
        ImportError: A package is missing; the message says how to install it.
        ValueError: The training images do not fill a batch.
        OSError: The output directory cannot be written to.
    """
    check_packages()
    from estimator_examples.digits_gan import picture

    real, test = (
        digits.images.reshape(len(digits.images), -1)
        for digits in digits_session.load_digits(settings.seed, settings.batch_size)
    )
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    outcomes = [train(precision, settings, real, test) for precision in settings.precision]
    print(f"\n{report.summary_text(outcomes, real, test)}")
    for outcome in outcomes:
        path = settings.output_dir / f"{outcome.precision}.png"
        picture.draw(outcome, test, path)
        print(f"  picture: {path}")
    return outcomes


def check_packages() -> None:
    """Check that the packages for the progress bar and the pictures are installed.

    This is called before the training, because the pictures are drawn after it.

    Raises:
        ImportError: A package is missing; the message says how to install it.
    """
    try:
        import matplotlib  # noqa: F401 - only whether it is there
        import tqdm  # noqa: F401 - the same
    except ImportError as error:
        raise ImportError(
            "this example needs matplotlib and tqdm: install tfmp with its extra, "
            f"e.g. `pip install '.[examples]'` from the clone ({error})."
        ) from error


def train(precision: str, settings: argparse.Namespace, real: np.ndarray, test: np.ndarray) -> report.Outcome:
    """Train in one precision, and print the progress."""
    import tqdm

    # Layers without a seed draw one with Python's `random`.
    random.seed(settings.seed)
    tf.random.set_seed(settings.seed)
    scaler = options.scaler_for(precision, settings)
    dtype = "float32" if precision == "float32" else "mixed_float16"
    gan = training.Gan(dtype, scaler, settings.learning_rate)
    draws = training.Draws(real, settings.batch_size, settings.seed)
    every = max(1, settings.iterations // _LINES)
    records = []
    started = time.monotonic()
    steps = training.train(gan, draws, settings.iterations, settings.generator_every)
    # With disable=None, the bar is shown on a terminal only.
    for record in tqdm.tqdm(steps, precision, settings.iterations, unit="iteration", disable=None):
        records.append(record)
        if len(records) % every == 0:
            tqdm.tqdm.write(_line(precision, len(records), record))
    return report.outcome_of(precision, gan, records, test, time.monotonic() - started)


def _line(precision: str, iteration: int, record: training.Record) -> str:
    return (
        f"{precision} {iteration}: Wasserstein estimate {record.estimate:.3f}, penalty {record.penalty:.4f}, "
        f"loss scale {report.scale_text(record.loss_scale)}, "
        f"steps {record.critic_steps} and {record.generator_steps}"
    )


def _fail(error: Exception, status: int) -> int:
    print(f"digits_gan: error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
