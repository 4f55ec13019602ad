"""TFRecord files of pre-training examples, which are written once and read as batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf

from estimator_examples.bert.pretraining_data import Limits

Features = dict[str, tf.Tensor]

SHUFFLE_BUFFER = 10_000


def write_examples(examples: Iterable[Mapping[str, Sequence[int]]], path: str) -> None:
    """Write examples to a TFRecord file.

    Args:
        examples: The examples; each maps names to lists of integers, and becomes one `tf.train.Example`.
        path: The file to write.
    """
    with tf.io.TFRecordWriter(path) as writer:
        for example in examples:
            features = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=values)) for name, values in example.items()
            }
            record = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(record.SerializeToString())


def training_input(
    path: str, limits: Limits, batch_size: int, seed: int, skip_batches: int, workers: int = 1, rank: int = 0
) -> Callable[[], tf.data.Dataset]:
    """Make the input function of a training run.

    Args:
        path: A file that `write_examples` wrote.
        limits: The sizes of the examples in the file.
        batch_size: The number of examples per batch.
        seed: The random seed of the order. The same seed gives the same batches in the same order.
        skip_batches: The number of batches that an earlier run has used already.
        workers: The number of workers that share the examples.
        rank: The number of this worker, from 0.

    Returns:
        An input function for Estimator, without arguments; its dataset never ends.
    """

    def input_fn() -> tf.data.Dataset:
        dataset = tf.data.TFRecordDataset(path).shard(workers, rank)
        dataset = dataset.shuffle(SHUFFLE_BUFFER, seed=seed).repeat()
        dataset = dataset.batch(batch_size, drop_remainder=True).skip(skip_batches)
        return dataset.map(lambda batch: _parse(batch, limits)).prefetch(2)

    return input_fn


def evaluation_input(path: str, limits: Limits, batch_size: int) -> Callable[[], tf.data.Dataset]:
    """Make the input function of an evaluation, which reads every example once, in the order of the file."""

    def input_fn() -> tf.data.Dataset:
        dataset = tf.data.TFRecordDataset(path).batch(batch_size)
        return dataset.map(lambda batch: _parse(batch, limits)).prefetch(2)

    return input_fn


def _parse(batch: tf.Tensor, limits: Limits) -> Features:
    sizes = {
        "input_ids": limits.seq_length,
        "segment_ids": limits.seq_length,
        "masked_positions": limits.max_predictions,
        "masked_ids": limits.max_predictions,
        "masked_weights": limits.max_predictions,
        "random_next": 1,
    }
    parsed = tf.io.parse_example(batch, {name: tf.io.FixedLenFeature([size], tf.int64) for name, size in sizes.items()})
    return {name: tf.cast(value, tf.int32) for name, value in parsed.items()}
