"""A WordPiece vocabulary, learned from the corpus with the `tokenizers` package."""

import pathlib
from collections.abc import Sequence

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_TOKENS = [PAD, UNKNOWN, CLS, SEP, MASK]


def train_vocabulary(sentences: Sequence[str], vocab_size: int) -> list[str]:
    """Learn lower-cased word pieces from the text.

    Args:
        sentences: The text to learn the pieces from.
        vocab_size: The largest number of pieces, including special tokens. Every character of the text becomes a piece,
            so the vocabulary is larger than a very small number.

    Returns:
        The pieces in the order of their ids. The special tokens come first; the id of `[PAD]` is 0.
    """
    tokenizer = _tokenizer(models.WordPiece(unk_token=UNKNOWN))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        # The trainer numbers "##x" pieces in the order of a randomly seeded hash map, and breaks ties by these numbers.
        # Listing the pieces here fixes the numbers; otherwise each run would learn another vocabulary.
        special_tokens=SPECIAL_TOKENS + [f"##{letter}" for letter in _letters(tokenizer, sentences)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def make_tokenizer(pieces: Sequence[str]) -> tokenizers.Tokenizer:
    """Make a tokenizer from a list of pieces.

    Examples:
        >>> make_tokenizer([*SPECIAL_TOKENS, "loss", "scal", "##e"]).encode("Loss scale").tokens
        ['loss', 'scal', '##e']
    """
    ids = {piece: i for i, piece in enumerate(pieces)}
    return _tokenizer(models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=100))


def save_vocabulary(pieces: Sequence[str], path: pathlib.Path) -> None:
    """Write one piece per line, so that the line number is the id, as in BERT's own `vocab.txt`."""
    path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")


def _tokenizer(model: models.WordPiece) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _letters(tokenizer: tokenizers.Tokenizer, sentences: Sequence[str]) -> list[str]:
    words = (
        word
        for sentence in sentences
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(sentence))
    )
    return sorted({letter for word in words for letter in word[1:]})
