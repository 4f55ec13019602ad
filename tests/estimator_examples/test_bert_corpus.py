"""Tests of reading text as documents of sentences."""

import itertools
import pathlib

import pytest

from estimator_examples.bert import corpus


def _write(path: pathlib.Path, sentences: range) -> str:
    path.write_text(" ".join(f"Sentence {i} is here." for i in sentences), encoding="utf-8")
    return str(path)


def test_the_manual_of_python_is_the_default_text() -> None:
    documents = corpus.read_documents([])
    sentences = list(itertools.chain.from_iterable(documents))
    assert len(documents) > 50
    assert any("Assert statements are a convenient way" in sentence for sentence in sentences)


def test_a_blank_line_or_an_underline_ends_a_sentence() -> None:
    text = "Title\n*****\n\nOne line\nand another. A second sentence\n\nand no more"
    expected = ["Title", "One line and another.", "A second sentence", "and no more"]
    assert corpus.sentences(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Это первое. Вот второе! «И третье».",
        "Primero. ¿Segundo? Ése es el tercero.",
        "これは一つ目。二つ目です。三つ目。",
        "यह पहला है। यह दूसरा है। यह तीसरा है।",
    ],
)
def test_sentences_of_other_scripts_are_separated(text: str) -> None:
    assert len(corpus.sentences(text)) == 3


def test_a_lower_case_letter_does_not_begin_a_sentence() -> None:
    assert corpus.sentences("Usw. usf. и т. д. в одном.") == ["Usw. usf. и т. д. в одном."]


def test_lines_without_capitals_are_sentences() -> None:
    lines = [f"sentence {i} is on a line of its own ." for i in range(20)]
    documents = "\n\n".join("\n".join(lines[i : i + 10]) for i in (0, 10))
    assert corpus.sentences(documents) == lines


def test_wrapped_prose_is_not_cut_at_its_lines() -> None:
    text = "A sentence\nmay go on over\nseveral lines\nof a text.\n" * 10
    assert corpus.sentences(text) == ["A sentence may go on over several lines of a text."] * 10


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_text(" ".join(f"Sentence {i}." for i in range(130)), encoding="utf-8-sig")
    assert corpus.read_documents([str(path)])[0][0] == "Sentence 0."


def test_a_long_file_becomes_several_documents(tmp_path: pathlib.Path) -> None:
    documents = corpus.read_documents([_write(tmp_path / "long.txt", range(200))])
    assert [len(document) for document in documents] == [40] * 5
    assert documents[0][:2] == ["Sentence 0 is here.", "Sentence 1 is here."]


def test_a_repeated_sentence_is_kept_once(tmp_path: pathlib.Path) -> None:
    first = _write(tmp_path / "first.txt", range(120))
    second = _write(tmp_path / "second.txt", range(100, 160))
    kept = list(itertools.chain.from_iterable(corpus.read_documents([first, second])))
    assert len(kept) == len(set(kept)) == 160


@pytest.mark.parametrize("count", [4, 5, 11, 100])
def test_at_least_two_documents_are_held_out_and_not_trained_on(count: int) -> None:
    documents = [[f"{i} one", f"{i} two"] for i in range(count)]
    training, held_out = corpus.split_held_out(documents)
    assert len(training) >= 2
    assert len(held_out) >= 2
    assert sorted(training + held_out) == sorted(documents)


def test_a_file_that_cannot_be_used_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n ")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    for name, message in (
        ("missing.txt", "cannot read .*missing.txt: No such file"),
        ("empty.txt", "empty.txt holds no text"),
        ("latin.txt", "latin.txt is not UTF-8 text"),
        (".", "cannot read .*: Is a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            corpus.read_documents([str(tmp_path / name)])


def test_the_error_for_too_little_text_says_how_much_is_enough(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"holds 80 different sentences.* 122 in one file are enough"):
        corpus.read_documents([_write(tmp_path / "short.txt", range(80))])
    corpus.read_documents([_write(tmp_path / "enough.txt", range(122))])


def test_the_error_for_a_single_sentence_says_where_a_sentence_ends(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"holds 1 different sentences.*A sentence ends at a blank line"):
        corpus.read_documents([_write(tmp_path / "one.txt", range(1))])
