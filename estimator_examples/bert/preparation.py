"""The model directory: its data are made once, and later runs must have the same settings."""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Sequence

from estimator_examples.bert import console, pretraining_data, records, vocabulary
from estimator_examples.bert.corpus import Document, split_held_out
from estimator_examples.bert.options import Options

HELD_OUT_PASSES = 4

Settings = dict[str, str | int]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the data that were made from the text.

    Attributes:
        vocab_size: The number of word pieces in the vocabulary.
        training_examples: The number of examples for training.
        held_out_examples: The number of examples from documents that are not used for training.
    """

    vocab_size: int
    training_examples: int
    held_out_examples: int


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The paths and sizes of data that are ready for training."""

    training_path: str
    held_out_path: str
    limits: pretraining_data.Limits
    sizes: Sizes


def prepare(options: Options, documents: Sequence[Document]) -> Prepared:
    """Write the vocabulary and the examples to the model directory, unless an earlier run has written them.

    Args:
        options: The settings of the run.
        documents: The text.

    Returns:
        The paths and sizes of the data.

    Raises:
        ValueError: The directory was begun with other settings, or the examples do not fill one batch.
    """
    directory = options.model_dir / "data"
    path = options.model_dir / "settings.json"
    settings = _settings(options, documents)
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        _check_same(found["settings"], settings, options.model_dir)
        sizes = Sizes(**found["sizes"])
    else:
        directory.mkdir(parents=True, exist_ok=True)
        sizes = _write_data(directory, options, documents)
        # This file is written last, so that the next run repeats an interrupted preparation.
        content = {"settings": settings, "sizes": dataclasses.asdict(sizes)}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _check_enough(sizes, options)
    return Prepared(
        training_path=str(directory / "train.tfrecord"),
        held_out_path=str(directory / "held_out.tfrecord"),
        limits=_limits(options.seq_length, sizes.vocab_size),
        sizes=sizes,
    )


def _settings(options: Options, documents: Sequence[Document]) -> Settings:
    text = hashlib.sha256(json.dumps(list(documents)).encode()).hexdigest()
    return {
        "--precision": options.precision,
        # A checkpoint contains the state of a dynamic loss scale, but nothing of a fixed one.
        "loss scale": "dynamic" if options.dynamic else "fixed",
        "--seed": options.seed,
        "--seq_length": options.seq_length,
        "--vocab_size": options.vocab_size,
        "--hidden_size": options.hidden_size,
        "--num_layers": options.num_layers,
        "--num_heads": options.num_heads,
        "--dupe_factor": options.dupe_factor,
        "text of checksum": text[:12],
    }


def _check_same(found: Settings, wanted: Settings, model_dir: pathlib.Path) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(
                f"{model_dir} was begun with {name} {found.get(name)}, got {value}: keep to that, "
                "or choose another --model_dir."
            )


def _check_enough(sizes: Sizes, options: Options) -> None:
    if sizes.training_examples < options.batch_size:
        raise ValueError(
            f"the text gives {sizes.training_examples} examples, less than one batch of "
            f"{options.batch_size}: lower --batch_size, or choose another --model_dir and a higher "
            "--dupe_factor."
        )


def _write_data(directory: pathlib.Path, options: Options, documents: Sequence[Document]) -> Sizes:
    training, held_out = split_held_out(documents)
    # The vocabulary is not learned from the held-out text either.
    sentences = [sentence for document in training for sentence in document]
    pieces = vocabulary.train_vocabulary(sentences, options.vocab_size)
    vocabulary.save_vocabulary(pieces, directory / "vocab.txt")
    limits = _limits(options.seq_length, len(pieces))
    counts = []
    for name, part, passes in (
        ("train", training, options.dupe_factor),
        ("held_out", held_out, HELD_OUT_PASSES),
    ):
        examples = pretraining_data.make_examples(_ids(part, pieces), limits, passes, options.seed)
        progress = console.bar(examples, desc=f"writing {name} examples", leave=False)
        records.write_examples(progress, str(directory / f"{name}.tfrecord"))
        counts.append(len(examples))
    return Sizes(len(pieces), *counts)


def _ids(documents: Sequence[Document], pieces: Sequence[str]) -> list[list[list[int]]]:
    tokenizer = vocabulary.make_tokenizer(pieces)
    return [[tokenizer.encode(sentence).ids for sentence in document] for document in documents]


def _limits(seq_length: int, vocab_size: int) -> pretraining_data.Limits:
    fraction = pretraining_data.MASKED_FRACTION
    return pretraining_data.Limits(
        seq_length=seq_length,
        max_predictions=math.ceil(seq_length * fraction),
        vocab_size=vocab_size,
    )
