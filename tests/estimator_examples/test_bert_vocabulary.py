"""Tests of the WordPiece vocabulary."""

import itertools
import pathlib

import pytest

pytest.importorskip("tokenizers")

from estimator_examples.bert import corpus, pretraining_data, vocabulary


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return list(itertools.chain.from_iterable(corpus.read_documents([])[:20]))


@pytest.fixture(scope="module")
def pieces(sentences: list[str]) -> list[str]:
    return vocabulary.train_vocabulary(sentences, 500)


def test_special_tokens_have_the_ids_that_masking_expects(pieces: list[str]) -> None:
    assert pieces[: pretraining_data.SPECIAL_IDS] == vocabulary.SPECIAL_TOKENS
    assert pieces[pretraining_data.MASK_ID] == vocabulary.MASK
    assert pieces[pretraining_data.PAD_ID] == vocabulary.PAD


def test_the_vocabulary_has_the_size_asked_for(pieces: list[str]) -> None:
    assert len(pieces) == len(set(pieces)) == 500


def test_training_again_learns_the_same_pieces(sentences: list[str], pieces: list[str]) -> None:
    for _ in range(3):
        assert vocabulary.train_vocabulary(sentences, 500) == pieces


def test_words_of_the_text_have_no_unknown_pieces(sentences: list[str], pieces: list[str]) -> None:
    tokenizer = vocabulary.make_tokenizer(pieces)
    for sentence in sentences:
        encoding = tokenizer.encode(sentence)
        assert vocabulary.UNKNOWN not in encoding.tokens
        joined = "".join(token.removeprefix("##") for token in encoding.tokens)
        assert joined == tokenizer.normalizer.normalize_str(sentence).replace(" ", "")


def test_a_word_is_split_into_pieces_and_lower_cased() -> None:
    tokenizer = vocabulary.make_tokenizer([*vocabulary.SPECIAL_TOKENS, "over", "##flow", "!"])
    assert tokenizer.encode("OVERFLOW overflow!").tokens == ["over", "##flow"] * 2 + ["!"]


def test_the_saved_file_lists_the_pieces_by_id(tmp_path: pathlib.Path, pieces: list[str]) -> None:
    vocabulary.save_vocabulary(pieces, tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines() == pieces
