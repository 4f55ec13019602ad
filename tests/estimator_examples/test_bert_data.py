"""The data of the BERT example: text as sentences, word pieces, masked pairs, and batches in the order of a seed."""

import collections
import itertools
import pathlib
import random

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from estimator_examples.bert import corpus, pretraining_data, records, vocabulary
from estimator_examples.bert.pretraining_data import CLS_ID, MASK_ID, SEP_ID, SPECIAL_IDS

LIMITS = pretraining_data.Limits(seq_length=32, max_predictions=5, vocab_size=1000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A blank line or an underline ends a sentence.
        (
            "Title\n*****\n\nOne line\nand another. A second sentence\n\nand no more",
            ["Title", "One line and another.", "A second sentence", "and no more"],
        ),
        ("Это первое. Вот второе! «И третье».", 3),
        ("Primero. ¿Segundo? Ése es el tercero.", 3),
        ("これは一つ目。二つ目です。三つ目。", 3),
        ("यह पहला है। यह दूसरा है। यह तीसरा है।", 3),
        # A lower-case letter does not begin a sentence.
        ("Usw. usf. и т. д. в одном.", 1),
        # Lines without capitals are sentences; wrapped prose is not cut at its lines.
        ("\n".join(f"sentence {i} is on a line of its own ." for i in range(20)), 20),
        (
            "A sentence\nmay go on over\nseveral lines\nof a text.\n" * 10,
            ["A sentence may go on over several lines of a text."] * 10,
        ),
    ],
)
def test_text_is_split_into_sentences(text: str, expected: list[str] | int) -> None:
    sentences = corpus.sentences(text)
    assert (len(sentences) if isinstance(expected, int) else sentences) == expected


def test_files_become_documents_of_different_sentences(tmp_path: pathlib.Path) -> None:
    # By default the text is the manual of Python.
    manual = corpus.read_documents([])
    assert len(manual) > 50
    assert any("Assert statements are a convenient way" in sentence for each in manual for sentence in each)
    for name, numbers in (("first", range(120)), ("second", range(100, 200))):
        text = " ".join(f"Sentence {i} is here." for i in numbers)
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    documents = corpus.read_documents([str(tmp_path / "first"), str(tmp_path / "second")])
    kept = list(itertools.chain.from_iterable(documents))
    # A repeated sentence is kept once, and a byte order mark is not part of the text.
    assert kept == [f"Sentence {i} is here." for i in range(200)]
    training, held_out = corpus.split_held_out(documents)
    assert min(len(training), len(held_out)) >= 2
    assert sorted(training + held_out) == sorted(documents)


def test_the_vocabulary_covers_its_text_and_is_learned_alike_again(tmp_path: pathlib.Path) -> None:
    sentences = list(itertools.chain.from_iterable(corpus.read_documents([])[:20]))
    pieces = vocabulary.train_vocabulary(sentences, 500)
    assert vocabulary.train_vocabulary(sentences, 500) == pieces
    assert len(pieces) == len(set(pieces)) == 500
    # Masking expects the special tokens at these ids.
    assert pieces[:SPECIAL_IDS] == vocabulary.SPECIAL_TOKENS
    assert (pieces[MASK_ID], pieces[pretraining_data.PAD_ID]) == (vocabulary.MASK, vocabulary.PAD)
    tokenizer = vocabulary.make_tokenizer(pieces)
    for sentence in sentences:
        encoding = tokenizer.encode(sentence)
        assert vocabulary.UNKNOWN not in encoding.tokens
        joined = "".join(token.removeprefix("##") for token in encoding.tokens)
        assert joined == tokenizer.normalizer.normalize_str(sentence).replace(" ", "")
    vocabulary.save_vocabulary(pieces, tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines() == pieces


def test_pairs_stand_between_special_tokens_and_half_of_them_follow_in_the_text() -> None:
    # Every document has its own token ids, so that a token shows from which document it comes.
    documents = [
        [[SPECIAL_IDS + 100 * d + (7 * s + t) % 100 for t in range(3 + s % 9)] for s in range(20)] for d in range(8)
    ]
    examples = pretraining_data.make_examples(documents, LIMITS, duplicates=20, seed=1)
    assert pretraining_data.make_examples(documents, LIMITS, duplicates=20, seed=1) == examples
    assert pretraining_data.make_examples(documents, LIMITS, duplicates=20, seed=2) != examples
    assert 0.45 < sum(example["random_next"][0] for example in examples) / len(examples) < 0.65
    sizes = {"input_ids": 32, "segment_ids": 32, "random_next": 1}
    sizes |= dict.fromkeys(("masked_positions", "masked_ids", "masked_weights"), 5)
    for example in examples:
        assert {name: len(values) for name, values in example.items()} == sizes
        tokens = list(example["input_ids"])
        masked = (example[f"masked_{name}"] for name in ("positions", "ids", "weights"))
        for position, label, weight in zip(*masked, strict=True):
            tokens[position] = label if weight else tokens[position]
        length = max(i for i, token in enumerate(tokens) if token) + 1
        first_end, *others = [i for i, token in enumerate(tokens) if token == SEP_ID]
        assert (tokens[0], others) == (CLS_ID, [length - 1])
        assert example["segment_ids"] == [0] * (first_end + 1) + [1] * (length - 1 - first_end) + [0] * (32 - length)
        # A random second part comes from another document.
        first, second = ((tokens[i] - SPECIAL_IDS) // 100 for i in (1, first_end + 1))
        assert (first != second) == bool(example["random_next"][0])


def test_15_percent_are_masked_by_the_80_10_10_rule() -> None:
    rng = random.Random(0)
    tokens = [CLS_ID, *range(SPECIAL_IDS, 25), SEP_ID, 30, 31, SEP_ID]
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(4000):
        masked = pretraining_data.mask_tokens(tokens, LIMITS, rng)
        restored = list(masked.input_ids)
        for position, label in zip(masked.positions, masked.labels, strict=True):
            now, restored[position] = restored[position], label
            assert label >= SPECIAL_IDS
            outcomes["mask" if now == MASK_ID else "kept" if now == label else "random"] += 1
        assert restored == tokens
        assert masked.positions == sorted(set(masked.positions))
    shares = [outcomes[name] / sum(outcomes.values()) for name in ("mask", "random", "kept")]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    for ordinary, expected in [(1, 1), (10, 2), (20, 3), (200, 5)]:
        masked = pretraining_data.mask_tokens([CLS_ID, *[9] * ordinary, SEP_ID], LIMITS, rng)
        assert len(masked.positions) == expected


def test_batches_come_in_the_order_of_the_seed_and_workers_share_them(tmp_path: pathlib.Path) -> None:
    limits = pretraining_data.Limits(seq_length=8, max_predictions=2, vocab_size=100)
    examples = [
        {
            "input_ids": [i] * 8,
            "segment_ids": [0, 1] * 4,
            "masked_positions": [1, 2],
            "masked_ids": [i, i],
            "masked_weights": [1, 0],
            "random_next": [i % 2],
        }
        for i in range(10)
    ]
    path = str(tmp_path / "examples.tfrecord")
    records.write_examples(examples, path)
    # Evaluation reads every example once, in order.
    batches = list(records.evaluation_input(path, limits, 4)().as_numpy_iterator())
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 2]
    for name in examples[0]:
        read = np.concatenate([batch[name] for batch in batches])
        assert read.dtype == np.int32
        np.testing.assert_array_equal(read, [example[name] for example in examples])

    def first_ids(seed: int, skip: int, count: int, **worker: int) -> list[list[int]]:
        dataset = records.training_input(path, limits, 4, seed, skip, **worker)()
        return [batch["input_ids"][:, 0].tolist() for batch in dataset.take(count).as_numpy_iterator()]

    whole = first_ids(1, 0, 9)
    # A resumed run continues after the batches that were used.
    assert first_ids(1, 4, 5) == whole[4:]
    assert first_ids(2, 0, 9) != whole
    # Each time it goes through all examples anew.
    ids = list(itertools.chain.from_iterable(whole[:5]))
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))
    assert ids[:10] != ids[10:]
    shared = [{i for batch in first_ids(1, 0, 5, workers=2, rank=rank) for i in batch} for rank in range(2)]
    assert shared == [{0, 2, 4, 6, 8}, {1, 3, 5, 7, 9}]
