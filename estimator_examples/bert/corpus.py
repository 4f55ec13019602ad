"""Reads text files, or the manual that comes with Python, as documents of sentences."""

import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

SENTENCES_PER_DOCUMENT = 40
MIN_DOCUMENTS = 4
LINES_PER_SENTENCE = 5
SENTENCE_ENDS = (
    "A sentence ends at a blank line. It also ends at .!?: (or such a mark of another script) if a digit, a quote, a "
    "bracket, or a letter that is not lower-case follows. A text with fewer than one such end in "
    f"{LINES_PER_SENTENCE} lines is read as one sentence per line."
)

Document = list[str]

_PARAGRAPH_BREAK = re.compile(r"\n\s*\n|\n\W+\n")
# Full-width punctuation is not followed by a space.
_SENTENCE_END = re.compile(r"(?<=[.!?:؟۔।])\s+|(?<=[。！？])\s*")  # noqa: RUF001 - no look-alikes: other scripts
_OPENING = tuple("\"'(«„「¿¡")
_WHITESPACE = re.compile(r"\s+")
_WORD = re.compile(r"\w")


def read_documents(paths: Sequence[str]) -> list[Document]:
    """Read text files, or the manual that comes with Python if no files are given.

    A long text is cut into documents of at most 40 sentences. So a single file also gives several documents, and
    next-sentence prediction can draw its wrong answers from another one. A repeated sentence is kept only once, so that
    the training does not see a held-out sentence.

    Args:
        paths: The paths of UTF-8 text files; if empty, `pydoc_data.topics` is read.

    Returns:
        The documents in the order of the text; each is a list of sentences.

    Raises:
        ValueError: A file is missing, empty or not UTF-8, or the text is too short.
    """
    texts = [_read_text(path) for path in paths] if paths else _python_manual()
    seen: set[str] = set()
    documents = [
        document for text in texts for document in _cut(_unseen(sentences(text), seen), SENTENCES_PER_DOCUMENT)
    ]
    if len(documents) < MIN_DOCUMENTS:
        raise ValueError(
            f"the input holds {len(seen)} different sentences, which is too little text: "
            f"{(MIN_DOCUMENTS - 1) * SENTENCES_PER_DOCUMENT + 2} in one file are enough. {SENTENCE_ENDS} "
            "Add files to --input."
        )
    return documents


def sentences(text: str) -> list[str]:
    r"""Return the sentences of a text; `SENTENCE_ENDS` describes in words where a sentence ends.

    Examples:
        >>> sentences("Title\n*****\nOne, i.e. a. Two\nlines.\n\nThree")
        ['Title', 'One, i.e. a.', 'Two lines.', 'Three']
        >>> sentences("one line\n" * 5 + "one more")
        ['one line', 'one line', 'one line', 'one line', 'one line', 'one more']
    """
    prose = _worded(part for paragraph in _PARAGRAPH_BREAK.split(text) for part in _split(paragraph))
    lines = _worded(text.splitlines())
    return lines if len(prose) * LINES_PER_SENTENCE < len(lines) else prose


def split_held_out(documents: Sequence[Document], every: int = 10) -> tuple[list[Document], list[Document]]:
    """Split documents into a training part and a held-out part for evaluation.

    Returns:
        The training documents and the held-out documents. One of `every` documents is held out, but at least two,
        because next-sentence prediction needs a second document.
    """
    every = max(2, min(every, len(documents) // 2))
    held_out = [document for i, document in enumerate(documents) if i % every == every - 1]
    training = [document for i, document in enumerate(documents) if i % every != every - 1]
    return training, held_out


def _read_text(path: str) -> str:
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}.") from error
    if not _WORD.search(text):
        raise ValueError(f"{path} holds no text.")
    return text


def _python_manual() -> list[str]:
    from pydoc_data import topics

    return [topics.topics[name] for name in sorted(topics.topics)]


def _split(paragraph: str) -> Iterator[str]:
    start = 0
    for end in _SENTENCE_END.finditer(paragraph):
        following = paragraph[end.end() : end.end() + 1]
        if following in _OPENING or (following.isalnum() and not following.islower()):
            yield paragraph[start : end.end()]
            start = end.end()
    yield paragraph[start:]


def _worded(parts: Iterable[str]) -> list[str]:
    return [_WHITESPACE.sub(" ", part).strip() for part in parts if _WORD.search(part)]


def _unseen(parts: Iterable[str], seen: set[str]) -> Iterator[str]:
    for part in parts:
        if part not in seen:
            seen.add(part)
            yield part


def _cut(parts: Iterable[str], length: int) -> list[Document]:
    everything = list(parts)
    pieces = [everything[i : i + length] for i in range(0, len(everything), length)]
    # A single sentence has no next sentence.
    return [piece for piece in pieces if len(piece) > 1]
