"""Tests of sentence pairs and masking."""

import collections
import random

import pytest

from estimator_examples.bert import pretraining_data
from estimator_examples.bert.pretraining_data import CLS_ID, MASK_ID, SEP_ID, SPECIAL_IDS

VOCAB_SIZE = 1000
LIMITS = pretraining_data.Limits(seq_length=32, max_predictions=5, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def documents() -> list[list[list[int]]]:
    # Every document has its own token ids, so that a token shows from which document it comes.
    return [
        [[SPECIAL_IDS + 100 * d + (7 * s + t) % 100 for t in range(3 + s % 9)] for s in range(20)] for d in range(8)
    ]


@pytest.fixture(scope="module")
def examples(documents: list[list[list[int]]]) -> list[dict[str, list[int]]]:
    return pretraining_data.make_examples(documents, LIMITS, duplicates=20, seed=1)


def _original(example: dict[str, list[int]]) -> list[int]:
    tokens = list(example["input_ids"])
    for position, label, weight in zip(
        example["masked_positions"],
        example["masked_ids"],
        example["masked_weights"],
        strict=True,
    ):
        if weight:
            tokens[position] = label
    return tokens


def test_every_example_has_the_sizes_of_the_limits(examples: list[dict[str, list[int]]]) -> None:
    sizes = {
        "input_ids": 32,
        "segment_ids": 32,
        "masked_positions": 5,
        "masked_ids": 5,
        "masked_weights": 5,
        "random_next": 1,
    }
    for example in examples:
        assert {name: len(values) for name, values in example.items()} == sizes


def test_a_pair_stands_between_special_tokens(examples: list[dict[str, list[int]]]) -> None:
    for example in examples:
        tokens = _original(example)
        length = max(i for i, token in enumerate(tokens) if token) + 1
        ends = [i for i, token in enumerate(tokens) if token == SEP_ID]
        assert (tokens[0], len(ends), ends[-1]) == (CLS_ID, 2, length - 1)
        segments = [0] * (ends[0] + 1) + [1] * (ends[1] - ends[0])
        assert example["segment_ids"] == segments + [0] * (32 - length)


def test_a_random_second_part_comes_from_another_document(
    examples: list[dict[str, list[int]]],
) -> None:
    for example in examples:
        tokens = _original(example)
        end = tokens.index(SEP_ID)
        first, second = ((tokens[i] - SPECIAL_IDS) // 100 for i in (1, end + 1))
        assert (first != second) == bool(example["random_next"][0])


def test_a_next_part_follows_in_its_document(documents: list[list[list[int]]]) -> None:
    pairs = pretraining_data.sentence_pairs(documents, 0, 200, random.Random(3))
    following = [pair for pair in pairs if not pair.random_next]
    text = [token for sentence in documents[0] for token in sentence]
    for pair in following:
        assert pair.second[0] in text


def test_about_half_of_the_second_parts_are_random(examples: list[dict[str, list[int]]]) -> None:
    share = sum(example["random_next"][0] for example in examples) / len(examples)
    assert 0.45 < share < 0.65


def test_masking_follows_the_80_10_10_rule() -> None:
    rng = random.Random(0)
    tokens = [CLS_ID, *range(SPECIAL_IDS, 25), SEP_ID]
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(4000):
        masked = pretraining_data.mask_tokens(tokens, LIMITS, rng)
        for position, label in zip(masked.positions, masked.labels, strict=True):
            now = masked.input_ids[position]
            outcomes["mask" if now == MASK_ID else "kept" if now == label else "random"] += 1
    total = sum(outcomes.values())
    assert outcomes["mask"] / total == pytest.approx(0.8, abs=0.02)
    assert outcomes["random"] / total == pytest.approx(0.1, abs=0.02)
    assert outcomes["kept"] / total == pytest.approx(0.1, abs=0.02)


def test_masked_labels_give_the_tokens_back_and_spare_special_ones() -> None:
    rng = random.Random(0)
    tokens = [CLS_ID, *range(SPECIAL_IDS, 25), SEP_ID, 30, 31, SEP_ID]
    for _ in range(200):
        masked = pretraining_data.mask_tokens(tokens, LIMITS, rng)
        restored = list(masked.input_ids)
        for position, label in zip(masked.positions, masked.labels, strict=True):
            assert label >= SPECIAL_IDS
            restored[position] = label
        assert restored == tokens
        assert masked.positions == sorted(set(masked.positions))


@pytest.mark.parametrize(("ordinary", "expected"), [(1, 1), (10, 2), (20, 3), (200, 5)])
def test_about_15_percent_are_masked_within_the_limit(ordinary: int, expected: int) -> None:
    tokens = [CLS_ID, *[9] * ordinary, SEP_ID]
    masked = pretraining_data.mask_tokens(tokens, LIMITS, random.Random(0))
    assert len(masked.positions) == expected


def test_the_seed_decides_the_examples(documents: list[list[list[int]]], examples: list[dict[str, list[int]]]) -> None:
    def make(seed: int) -> list[dict[str, list[int]]]:
        return pretraining_data.make_examples(documents, LIMITS, duplicates=20, seed=seed)

    assert make(1) == examples
    assert make(2) != examples
