"""Pre-training examples for BERT: pairs of sentences with masked words."""

import dataclasses
import random
from collections.abc import Iterator, Sequence

SPECIAL_IDS = 5
PAD_ID, UNKNOWN_ID, CLS_ID, SEP_ID, MASK_ID = range(SPECIAL_IDS)
MASKED_FRACTION = 0.15
# [CLS] first [SEP] second [SEP]
SPECIALS_PER_PAIR = 3

TokenDocument = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The sizes that every example is cut or padded to.

    Attributes:
        seq_length: The number of tokens in an example, including special tokens.
        max_predictions: The largest number of masked tokens in an example.
        vocab_size: The size of the vocabulary; random replacements have ids below it.
    """

    seq_length: int
    max_predictions: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two sequences of tokens, and whether the second was drawn from another document."""

    first: list[int]
    second: list[int]
    random_next: bool


@dataclasses.dataclass(frozen=True)
class Masked:
    """A token sequence with masked tokens, their positions, and the original tokens at these positions."""

    input_ids: list[int]
    positions: list[int]
    labels: list[int]


def make_examples(
    documents: Sequence[TokenDocument], limits: Limits, duplicates: int, seed: int
) -> list[dict[str, list[int]]]:
    """Make examples from documents.

    Args:
        documents: The token ids, by document and sentence.
        limits: The sizes of an example.
        duplicates: The number of passes over the documents. Each pass draws other pairs and other masks.
        seed: The random seed; the same seed gives the same examples.

    Returns:
        The shuffled examples. Each maps names to lists of integers; a list has the same length in all examples.
    """
    rng = random.Random(seed)
    examples = []
    for _ in range(duplicates):
        for index in range(len(documents)):
            for pair in sentence_pairs(documents, index, limits.seq_length, rng):
                examples.append(_example(pair, limits, rng))
    rng.shuffle(examples)
    return examples


def sentence_pairs(
    documents: Sequence[TokenDocument], index: int, seq_length: int, rng: random.Random
) -> Iterator[Pair]:
    """Yield the pairs of one document, in order; the second part follows the first, or is from another document.

    Half of the second parts start at a random sentence of another document, and so does the second part after a
    document's last sentence. After such a pair, the next pair starts where the first part ended.
    """
    document = documents[index]
    budget = seq_length - SPECIALS_PER_PAIR
    at = 0
    while at < len(document):
        first, at = _take(document, at, rng.randint(budget // 4, budget - budget // 4))
        room = budget - len(first)
        random_next = at == len(document) or rng.random() < 0.5
        if random_next:
            second = _from_elsewhere(documents, index, room, rng)
        else:
            second, at = _take(document, at, room)
        if first and second:
            yield Pair(first, second, random_next)


def mask_tokens(tokens: Sequence[int], limits: Limits, rng: random.Random) -> Masked:
    """Choose some ordinary tokens to predict: 80% become [MASK], 10% become a random token, and 10% stay as they are.

    Args:
        tokens: The ids of a whole pair. Special tokens are never chosen.
        limits: The sizes of an example, which limit the number of chosen tokens.
        rng: The random generator.

    Returns:
        The masked tokens, with ascending positions.
    """
    candidates = [i for i, token in enumerate(tokens) if token >= SPECIAL_IDS]
    wanted = min(limits.max_predictions, max(1, round(len(candidates) * MASKED_FRACTION)))
    positions = sorted(rng.sample(candidates, min(wanted, len(candidates))))
    masked = list(tokens)
    for position in positions:
        masked[position] = _replacement(masked[position], limits.vocab_size, rng)
    return Masked(masked, positions, [tokens[i] for i in positions])


def _replacement(token: int, vocab_size: int, rng: random.Random) -> int:
    chance = rng.random()
    if chance < 0.8:
        return MASK_ID
    return rng.randrange(SPECIAL_IDS, vocab_size) if chance < 0.9 else token


def _take(document: TokenDocument, at: int, room: int) -> tuple[list[int], int]:
    taken: list[int] = []
    while at < len(document) and len(taken) < room:
        taken.extend(document[at])
        at += 1
    return taken[:room], at


def _from_elsewhere(documents: Sequence[TokenDocument], index: int, room: int, rng: random.Random) -> list[int]:
    # A shift of at least 1 past the document's own index gives every other document with the same chance.
    other = documents[(index + rng.randrange(1, len(documents))) % len(documents)]
    return _take(other, rng.randrange(len(other)), room)[0]


def _example(pair: Pair, limits: Limits, rng: random.Random) -> dict[str, list[int]]:
    tokens = [CLS_ID, *pair.first, SEP_ID, *pair.second, SEP_ID]
    segments = [0] * (len(pair.first) + 2) + [1] * (len(pair.second) + 1)
    masked = mask_tokens(tokens, limits, rng)
    return {
        "input_ids": _padded(masked.input_ids, limits.seq_length),
        "segment_ids": _padded(segments, limits.seq_length),
        "masked_positions": _padded(masked.positions, limits.max_predictions),
        "masked_ids": _padded(masked.labels, limits.max_predictions),
        "masked_weights": _padded([1] * len(masked.positions), limits.max_predictions),
        "random_next": [int(pair.random_next)],
    }


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]
