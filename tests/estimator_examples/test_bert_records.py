"""Tests of the TFRecord files and the input functions."""

import itertools
import pathlib

import numpy as np
import pytest

from estimator_examples.bert import pretraining_data, records

LIMITS = pretraining_data.Limits(seq_length=8, max_predictions=2, vocab_size=100)


def _example(i: int) -> dict[str, list[int]]:
    return {
        "input_ids": [i] * 8,
        "segment_ids": [0, 1] * 4,
        "masked_positions": [1, 2],
        "masked_ids": [i, i],
        "masked_weights": [1, 0],
        "random_next": [i % 2],
    }


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    path = str(tmp_path / "examples.tfrecord")
    records.write_examples([_example(i) for i in range(10)], path)
    return path


def test_evaluation_reads_every_example_once_in_order(path: str) -> None:
    batches = list(records.evaluation_input(path, LIMITS, 4)().as_numpy_iterator())
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 2]
    for name in _example(0):
        read = np.concatenate([batch[name] for batch in batches])
        np.testing.assert_array_equal(read, [_example(i)[name] for i in range(10)])
        assert read.dtype == np.int32


def _first_ids(path: str, seed: int, skip: int, count: int) -> list[list[int]]:
    dataset = records.training_input(path, LIMITS, 4, seed, skip)()
    return [batch["input_ids"][:, 0].tolist() for batch in dataset.take(count).as_numpy_iterator()]


def test_a_resumed_run_continues_after_the_batches_that_were_used(path: str) -> None:
    whole = _first_ids(path, seed=1, skip=0, count=9)
    assert _first_ids(path, seed=1, skip=4, count=5) == whole[4:]


def test_the_seed_decides_the_order(path: str) -> None:
    first = _first_ids(path, seed=1, skip=0, count=5)
    assert first == _first_ids(path, seed=1, skip=0, count=5)
    assert first != _first_ids(path, seed=2, skip=0, count=5)


def test_training_goes_through_all_examples_anew_each_time(path: str) -> None:
    ids = list(itertools.chain.from_iterable(_first_ids(path, seed=1, skip=0, count=5)))
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))
    assert ids[:10] != ids[10:]


def test_workers_share_the_examples(path: str) -> None:
    ids = []
    for rank in range(2):
        dataset = records.training_input(path, LIMITS, 4, seed=1, skip_batches=0, workers=2, rank=rank)()
        ids.append({i for batch in dataset.take(5).as_numpy_iterator() for i in batch["input_ids"][:, 0].tolist()})
    assert ids == [{0, 2, 4, 6, 8}, {1, 3, 5, 7, 9}]
