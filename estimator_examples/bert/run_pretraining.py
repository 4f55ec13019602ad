"""The command `python -m estimator_examples.bert.run_pretraining`."""

import importlib.util
import logging
import sys
import time
from collections.abc import Sequence

from estimator_examples.bert import corpus, options

_PACKAGES = ("tokenizers", "matplotlib", "tqdm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example.

    Args:
        argv: The command-line arguments; None means those of the process.

    Returns:
        The exit status.
    """
    settings = options.parse_options(argv)
    try:
        # These checks come before all slow operations, so that a mistake in the arguments is reported at once.
        documents = corpus.read_documents(settings.input)
        check_packages()
    except (ValueError, ImportError) as error:
        return _fail(error, 2)
    try:
        return _pretrain(settings, documents)
    except OSError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print(
            f"Interrupted. The same command continues from the last checkpoint in {settings.model_dir}, "
            "or begins anew if there is none."
        )
        return 130


def check_packages() -> None:
    """Import TensorFlow, and check that the packages and the Estimator that the example needs are installed.

    Raises:
        ImportError: A package or Estimator is missing; the message says how to install it.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"this example needs {', '.join(missing)}: install tfmp with its extra, "
            "e.g. `pip install '.[examples]'` from the clone."
        )
    import tensorflow as tf

    if not hasattr(tf, "estimator"):
        raise ImportError(
            f"this example needs tf.estimator, which TensorFlow {tf.__version__} does not have: "
            "TensorFlow 2.15 is the last that does (pip install tensorflow==2.15.1)."
        )


def _pretrain(settings: options.Options, documents: Sequence[corpus.Document]) -> int:
    # These modules need the packages that `check_packages` has looked for.
    import tensorflow as tf

    from estimator_examples.bert import console, history, hooks, preparation, report, training, workers

    started = time.monotonic()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    try:
        worker = workers.WORKERS[settings.distribute]()
        prepared = preparation.prepare(worker.with_own_directory(settings), documents)
    except (ImportError, ValueError) as error:
        return _fail(error, 2)
    logger = logging.getLogger("tfmp")
    logger.setLevel(logging.WARNING if worker.rank else logging.INFO)
    try:
        if worker.rank:
            training.follow(settings, prepared, worker)
            return 0
        with console.logs_as_lines(logger, tf.get_logger()):
            summary = training.run(settings, prepared, worker)
    except (
        history.HistoryError,
        hooks.TooManySkippedStepsError,
        tf.estimator.NanLossDuringTrainingError,
    ) as error:
        return _fail(error, 1)
    console.say(f"Done in {time.monotonic() - started:.0f} s\n\n{report.summary_text(summary)}")
    return 0


def _fail(error: Exception, status: int) -> int:
    print(f"run_pretraining: error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
