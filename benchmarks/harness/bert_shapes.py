"""The shapes of BERT's weights, which benchmarks use as an example of a large model."""


def bert_shapes(hidden: int = 768, layers: int = 4, vocabulary: int = 30522) -> list[tuple[int, ...]]:
    """Return the shapes of BERT's weights.

    Args:
        hidden: The number of units in a hidden layer.
        layers: The number of layers; BERT-base has 12.
        vocabulary: The number of tokens in the vocabulary.

    Examples:
        >>> import math
        >>> sum(map(math.prod, bert_shapes(layers=12)))
        109482240
    """
    norm = [(hidden,), (hidden,)]
    square = [(hidden, hidden), (hidden,)]
    feed_forward = [(hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,)]
    embeddings = [(vocabulary, hidden), (512, hidden), (2, hidden), *norm]
    return [*embeddings, *(layers * [*(4 * square), *norm, *feed_forward, *norm]), *square]
