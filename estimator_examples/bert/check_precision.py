"""The command `python -m estimator_examples.bert.check_precision`: what float16 does to the model of the example."""

import dataclasses
import sys
from collections.abc import Sequence

from estimator_examples.bert import corpus, options, run_pretraining

NUM_BATCHES = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Print what `tfmp.check_precision` finds of the model, and draw it to `ranges.png` in the model directory.

    The weights are those of the last checkpoint in the model directory, or those at the start of a training.

    Args:
        argv: The command-line arguments, those of `run_pretraining`; None means those of the process.

    Returns:
        The exit status.
    """
    settings = options.parse_options(argv)
    try:
        documents = corpus.read_documents(settings.input)
        run_pretraining.check_packages()
        _check(settings, documents)
    except (ImportError, OSError, ValueError) as error:
        print(f"check_precision: error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(settings: options.Options, documents: Sequence[corpus.Document]) -> None:
    # These modules need the packages that `check_packages` has looked for.
    import tensorflow as tf

    import tfmp
    from estimator_examples.bert import modeling, preparation, records, training

    tf1 = tf.compat.v1
    prepared = preparation.prepare(settings, documents)
    dataset = records.evaluation_input(prepared.held_out_path, prepared.limits, settings.batch_size)()
    batches = [{name: values.numpy() for name, values in batch.items()} for batch in dataset.take(NUM_BATCHES)]
    whole = dataclasses.replace(training.model_config(settings, prepared), dropout=0.0, recompute=False)
    with tf.Graph().as_default(), tf1.Session() as session:
        features = {name: tf1.placeholder(tf.int32, [None, *values.shape[1:]]) for name, values in batches[0].items()}
        losses = {}
        for level in ("O0", "O2"):
            with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
                outputs = modeling.bert(features, dataclasses.replace(whole, precision=level))
            losses[level] = tf.add_n(modeling.mean_losses(outputs, features))
        session.run(tf1.global_variables_initializer())
        checkpoint = tf.train.latest_checkpoint(str(settings.model_dir))
        if checkpoint is not None:
            tf1.train.Saver(tf1.trainable_variables()).restore(session, checkpoint)
        report = tfmp.check_precision(
            losses["O0"],
            batches=[{features[name]: values for name, values in batch.items()} for batch in batches],
            in_float16=losses["O2"],
            session=session,
        )
    print(report)
    path = settings.model_dir / "ranges.png"
    report.plot(path)
    print(f"\nPicture: {path}")


if __name__ == "__main__":
    sys.exit(main())
