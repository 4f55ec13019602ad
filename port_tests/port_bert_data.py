"""Writes the inputs of a tiny BERT's training: the model's configuration, records, and a checkpoint to resume from."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

#: The model's configuration, with the names of BERT's configuration files. Without dropout the loss falls more evenly.
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
}

SEQ_LENGTH = 16

#: The number of masked tokens in a sequence.
PREDICTIONS = 3

_MASK = 3

#: The ids of the tokens in the text. They are so few that a model learns them in tens of steps.
_WORDS = range(4, 12)


def write_config(path: Path) -> None:
    """Write the model's configuration as JSON.

    Args:
        path: The file to write.
    """
    path.write_text(json.dumps(CONFIG, indent=1) + "\n")


def write_records(path: Path, count: int) -> None:
    """Write sequences with masked tokens; the features have the names that scripts for BERT read.

    Args:
        path: The file of TFRecords to write.
        count: The number of sequences.
    """
    rng = np.random.default_rng(0)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(count):
            writer.write(_example(rng).SerializeToString())


def trainable_shapes(config: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the trainable variables of BERT's pre-training, in TensorFlow 1 and later.

    Args:
        config: The model's configuration.

    Examples:
        >>> shapes = trainable_shapes(CONFIG)
        >>> len(shapes), shapes["bert/embeddings/word_embeddings"]
        (46, (64, 32))
    """
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    transform = "cls/predictions/transform"
    return {
        "bert/embeddings/word_embeddings": (vocabulary, width),
        "bert/embeddings/token_type_embeddings": (config["type_vocab_size"], width),
        "bert/embeddings/position_embeddings": (config["max_position_embeddings"], width),
        **_layer_norm("bert/embeddings", width),
        **dict(item for layer in range(config["num_hidden_layers"]) for item in _layer(layer, config)),
        **_dense("bert/pooler/dense", width, width),
        **_dense(f"{transform}/dense", width, width),
        **_layer_norm(transform, width),
        "cls/predictions/output_bias": (vocabulary,),
        "cls/seq_relationship/output_weights": (2, width),
        "cls/seq_relationship/output_bias": (2,),
    }


def trained_values(step: int, config: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the values in a checkpoint of TensorFlow 1.15 after float32 steps: weights, Adam's moments and the step.

    Args:
        step: The number of applied steps.
        config: The model's configuration.

    Examples:
        >>> len(trained_values(20, CONFIG))
        139
    """
    rng = np.random.default_rng(1)
    values = {"global_step": np.asarray(step, np.int64)}
    for name, shape in trainable_shapes(config).items():
        values[name] = _weights(name, shape, rng)
        # The module that counts applied steps compares the first moments with 0 at its first run.
        values[f"{name}/adam_m"] = np.zeros(shape, np.float32)
        values[f"{name}/adam_v"] = np.full(shape, 1e-4, np.float32)
    return values


def scaling_values(loss_scale: float, good_steps: int) -> dict[str, np.ndarray]:
    """Return the values that loss scaling with an exponential manager adds to a checkpoint.

    Args:
        loss_scale: The loss scale.
        good_steps: The number of finite steps in a row.
    """
    return {
        "loss_scale": np.asarray(loss_scale, np.float32),
        "good_steps": np.asarray(good_steps, np.int32),
        "bad_steps": np.asarray(0, np.int32),
    }


def accumulation_values(config: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the values that NVIDIA's accumulation adds to a checkpoint that was written between two windows.

    Args:
        config: The model's configuration.
    """
    sums = {f"{name}/accum": np.zeros(shape, np.float32) for name, shape in trainable_shapes(config).items()}
    return {"local_step": np.asarray(0, np.int32), "batch_finite": np.asarray(True), **sums}


def write_checkpoint(directory: Path, values: Mapping[str, np.ndarray]) -> None:
    """Write a name-based checkpoint, which becomes the latest checkpoint of a directory.

    Args:
        directory: The directory; it is created if it does not exist.
        values: The variables' values; one of them is `global_step`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    prefix = str(directory / f"model.ckpt-{values['global_step']}")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tensors = [tf.constant(value) for value in values.values()]
        whole = [""] * len(values)
        save = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=list(values), shape_and_slices=whole, tensors=tensors)
        session.run(save)
    tf.compat.v1.train.update_checkpoint_state(str(directory), prefix)


def _example(rng: np.random.Generator) -> tf.train.Example:
    ids = rng.choice(_WORDS, SEQ_LENGTH)
    positions = np.sort(rng.choice(SEQ_LENGTH, PREDICTIONS, replace=False))
    masked, ids[positions] = ids[positions], _MASK
    # The label for next-sentence prediction is made up: it tells in which half of the ids the first token is.
    label = int(ids[0] >= np.mean(_WORDS))
    integers = {
        "input_ids": ids,
        "input_mask": np.ones_like(ids),
        "segment_ids": np.arange(SEQ_LENGTH) >= SEQ_LENGTH // 2,
        "masked_lm_positions": positions,
        "masked_lm_ids": masked,
        "next_sentence_labels": [label],
    }
    features = {
        name: tf.train.Feature(int64_list=tf.train.Int64List(value=map(int, value))) for name, value in integers.items()
    }
    weights = tf.train.FloatList(value=[1.0] * PREDICTIONS)
    features["masked_lm_weights"] = tf.train.Feature(float_list=weights)
    return tf.train.Example(features=tf.train.Features(feature=features))


def _layer(index: int, config: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    scope, width, inner = f"bert/encoder/layer_{index}", config["hidden_size"], config["intermediate_size"]
    for name in ("query", "key", "value"):
        yield from _dense(f"{scope}/attention/self/{name}", width, width).items()
    yield from _dense(f"{scope}/attention/output/dense", width, width).items()
    yield from _layer_norm(f"{scope}/attention/output", width).items()
    yield from _dense(f"{scope}/intermediate/dense", width, inner).items()
    yield from _dense(f"{scope}/output/dense", inner, width).items()
    yield from _layer_norm(f"{scope}/output", width).items()


def _dense(scope: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{scope}/kernel": (inputs, outputs), f"{scope}/bias": (outputs,)}


def _layer_norm(scope: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{scope}/LayerNorm/beta": (width,), f"{scope}/LayerNorm/gamma": (width,)}


def _weights(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("gamma"):
        return np.ones(shape, np.float32)
    if name.endswith(("beta", "bias")):
        return np.zeros(shape, np.float32)
    return rng.normal(0, CONFIG["initializer_range"], shape).astype(np.float32)
