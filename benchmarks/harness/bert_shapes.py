"""The shapes of BERT's weights, as benchmarks take them for those of a large model."""


def bert_shapes(hidden: int = 768, layers: int = 4, vocabulary: int = 30522) -> list[tuple[int, ...]]:
    """Return the shapes of BERT's weights.

    Args:
        hidden: Units of a hidden layer.
        layers: Layers; BERT-base has 12.
        vocabulary: Tokens.

    Example:
        >>> import math
        >>> sum(map(math.prod, bert_shapes(layers=12)))
        109482240
    """
    norm = [(hidden,), (hidden,)]
    square = [(hidden, hidden), (hidden,)]
    feed_forward = [(hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,)]
    embeddings = [(vocabulary, hidden), (512, hidden), (2, hidden), *norm]
    return [*embeddings, *(layers * [*(4 * square), *norm, *feed_forward, *norm]), *square]
