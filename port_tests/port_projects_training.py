"""Trains a small model of a migrated project, in the process that this file is run in.

    python port_projects_training.py PROJECT LEVEL --result FILE [--steps N] [--seed N] [--idle N]

The process is started in the directory that the project's modules are imported from. The project's own code builds the
model, the loss and the train op; this file gives the configuration, one batch of random data, and the level of
precision that the code runs at. Weights and random ops have the same seeds at each level.
"""

import argparse
import hashlib
import importlib
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import tfmp

_VOCABULARY = 64
_BATCH, _LENGTH, _PREDICTIONS = 8, 16, 3
#: The settings of models like BERT. Without dropout, because the numbers that it draws depend on the type.
_BERT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
}
_RATE = 1e-3
#: BERT's Adam does not correct its moments, so that its first steps are three times as long.
_BERTS_RATE = 3e-4
_WARMUP = 4
#: A training ends after so many runs that applied no step.
_PATIENCE = 60


class Finished(Exception):  # noqa: N818 - it is no error
    """The training has applied all its steps, or it applies none any more."""


class Recorder:
    """Runs a train op step by step, and records what each run did.

    Args:
        steps: The number of steps to apply.
        idle: The number of runs at the start that only compute the loss.
    """

    def __init__(self, steps: int, idle: int) -> None:
        self._steps = steps
        self._idle = idle
        self.losses: list[float] = []
        self.skipped: list[float] = []
        self.changed_by_skipped: list[str] = []
        self.products: list[str] = []

    def run(self, fetch: Callable[..., Any], fetches: list[Any], feeds: Mapping[Any, Any] | None = None) -> list[Any]:
        """Run a step, and return the values of the fetches.

        Args:
            fetch: The method `run` of the training's session.
            fetches: The tensors to fetch; the first of them is the loss, and the last one is the train op.
            feeds: The values to feed.

        Raises:
            Finished: This was the last run.
        """
        if self._idle:
            self._idle -= 1
            return [*fetch(fetches[:-1], feeds), None]
        self.products = self.products or _types_of_products(tf.get_default_graph())
        before, values = _step_and_values(fetch)
        fetched = fetch(fetches, feeds)
        after, new_values = _step_and_values(fetch)
        if after > before:
            self.losses.append(float(fetched[0]))
        else:
            self.skipped.append(float(fetched[0]))
            self.changed_by_skipped += [name for name, value in values.items() if new_values[name] != value]
        if len(self.losses) == self._steps or len(self.skipped) == _PATIENCE:
            raise Finished
        return list(fetched)


def bert(recorder: Recorder, rng: np.random.Generator, directory: Path) -> None:
    """Pre-train Google's BERT with its own `optimization.py`."""
    script = importlib.import_module("run_pretraining")
    config = importlib.import_module("modeling").BertConfig.from_dict(_BERT)
    _train_model_fn(
        recorder, script.model_fn_builder(config, None, _BERTS_RATE, 100, _WARMUP, False, False), _masked(rng)
    )


def albert(recorder: Recorder, rng: np.random.Generator, directory: Path) -> None:
    """Pre-train ALBERT with LAMB, which is the optimizer of its authors."""
    script = importlib.import_module("albert.run_pretraining")
    config = importlib.import_module("albert.modeling").AlbertConfig.from_dict({**_BERT, "embedding_size": 16})
    build = script.model_fn_builder(config, None, _RATE, 100, _WARMUP, False, False, "lamb", 1.0, 0)
    _train_model_fn(recorder, build, _masked(rng))


def electra(recorder: Recorder, rng: np.random.Generator, directory: Path) -> None:
    """Pre-train ELECTRA's generator and discriminator with its own `model/optimization.py`."""
    script = importlib.import_module("run_pretraining")
    words = [f"word{index}" for index in range(_VOCABULARY - 4)]
    (directory / "vocab.txt").write_text("\n".join(["[PAD]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    config = importlib.import_module("configure_pretraining").PretrainingConfig(
        "tiny",
        str(directory),
        model_hparam_overrides=_BERT,
        embedding_size=16,
        generator_hidden_size=0.5,
        vocab_size=_VOCABULARY,
        max_seq_length=_LENGTH,
        learning_rate=_BERTS_RATE,
        num_train_steps=100,
        num_warmup_steps=_WARMUP,
    )
    ids = _ids(rng, 4)
    features = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids)}
    _train_model_fn(recorder, script.model_fn_builder(config), features)


def xlnet(recorder: Recorder, rng: np.random.Generator, directory: Path) -> None:
    """Pre-train XLNet by its own `train_gpu.train`, with weight decay and a memory."""
    # Its reader of text needs this package; the training does not.
    sys.modules["sentencepiece"] = types.ModuleType("sentencepiece")
    script = importlib.import_module("train_gpu")
    shape = (_BATCH, _LENGTH, _LENGTH)
    targets = np.stack([rng.permutation(_LENGTH)[:_PREDICTIONS] for _ in range(_BATCH)])
    ids = _ids(rng)
    batch = {
        "input_k": ids,
        "input_q": (targets[:, :, None] == np.arange(_LENGTH)).any(1).astype(np.float32),
        "seg_id": (np.arange(_LENGTH) >= _LENGTH // 2)[None].repeat(_BATCH, 0).astype(np.int32),
        "perm_mask": (rng.random(shape) < 0.5).astype(np.float32),
        "target": np.take_along_axis(ids, targets, 1),
        "target_mask": np.ones((_BATCH, _PREDICTIONS), np.float32),
        "target_mapping": (targets[:, :, None] == np.arange(_LENGTH)).astype(np.float32),
    }
    options = {
        "num_predict": _PREDICTIONS,
        "seq_len": _LENGTH,
        "reuse_len": _LENGTH // 2,
        "n_token": _VOCABULARY,
        "learning_rate": _BERTS_RATE,
        "weight_decay": 0.01,
        "model_dir": directory,
        "ff_activation": "gelu",
        "untie_r": True,
        # With two directions, its code compares a tensor with 0, which is never equal in TensorFlow 1.
        "bi_data": False,
    }
    _train_in_session(recorder, script, options, batch, lambda: script.train("/gpu:0"))


def transformer_xl(recorder: Recorder, rng: np.random.Generator, directory: Path) -> None:
    """Train Transformer-XL by its own `train_gpu.train`, with a memory and the adaptive softmax."""
    script = importlib.import_module("train_gpu")
    ids = _ids(rng)
    options = {"tgt_len": _LENGTH, "d_embed": 32, "dropout": 0.0, "dropatt": 0.0, "model_dir": directory}
    _train_in_session(
        recorder, script, options, (ids, np.roll(ids, -1, 1)), lambda: script.train(_VOCABULARY, [16, 32], "/gpu:0")
    )


def gpt2(recorder: Recorder, rng: np.random.Generator, directory: Path) -> None:
    """Train GPT-2's model with Adam: its repository has no training."""
    model = importlib.import_module("model")
    settings = model.default_hparams()
    vars(settings).update(n_vocab=_VOCABULARY, n_ctx=_LENGTH, n_embd=32, n_head=4, n_layer=2)
    tokens = tf.constant(_ids(rng))
    logits = model.model(hparams=settings, X=tokens)["logits"]
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tokens[:, 1:], logits=logits[:, :-1]))
    opt = tfmp.LossScaleOptimizer(
        tf.train.AdamOptimizer(_RATE), tfmp.ExponentialUpdateLossScaleManager(2**32, 1000, 1, decr_ratio=0.5)
    )
    _train(recorder, loss, opt.minimize(loss, tf.train.get_or_create_global_step()))


TRAININGS: Mapping[str, Callable[[Recorder, np.random.Generator, Path], None]] = {
    each.__name__: each for each in (bert, albert, electra, xlnet, transformer_xl, gpt2)
}


def main() -> None:
    """Train a project at a level, and write what happened as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=TRAININGS)
    parser.add_argument("level")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--idle", type=int, default=0, help="runs at the start that only compute the loss")
    asked = parser.parse_args()
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    _seed_random_ops(asked.seed)
    recorder = Recorder(asked.steps, asked.idle)
    try:
        with tf.Graph().as_default(), tfmp.precision(asked.level):
            TRAININGS[asked.project](recorder, np.random.default_rng(asked.seed), asked.result.parent)
    except Finished:
        asked.result.write_text(json.dumps({k: v for k, v in vars(recorder).items() if not k.startswith("_")}))


def _seed_random_ops(seed: int) -> None:
    """Seed each random op by its place among the random ops, since levels differ in the number of other ops."""
    module = importlib.import_module("tensorflow.python.framework.random_seed")
    made = iter(range(1, 1 << 30))
    module.get_seed = lambda op_seed: (seed, next(made))  # type: ignore[attr-defined] # TensorFlow has no public way


def _ids(rng: np.random.Generator, lowest: int = 0) -> np.ndarray:
    return rng.integers(lowest, _VOCABULARY, (_BATCH, _LENGTH)).astype(np.int32)


def _masked(rng: np.random.Generator) -> dict[str, np.ndarray]:
    ids = _ids(rng, 1)
    positions = np.stack([np.sort(rng.permutation(_LENGTH)[:_PREDICTIONS]) for _ in range(_BATCH)]).astype(np.int32)
    answers = np.take_along_axis(ids, positions, 1)
    np.put_along_axis(ids, positions, 0, 1)
    mask = np.ones_like(ids)
    mask[::2, -4:] = 0
    return {
        "input_ids": ids,
        "input_mask": mask,
        "segment_ids": np.zeros_like(ids),
        "masked_lm_positions": positions,
        "masked_lm_ids": answers,
        "masked_lm_weights": np.ones(positions.shape, np.float32),
        "next_sentence_labels": rng.integers(0, 2, (_BATCH, 1)).astype(np.int32),
    }


def _train_model_fn(recorder: Recorder, model_fn: Callable[..., Any], batch: Mapping[str, np.ndarray]) -> None:
    """Train the model function of an Estimator."""
    features = {name: tf.constant(value) for name, value in batch.items()}
    spec = model_fn(features, None, tf.estimator.ModeKeys.TRAIN, {})
    _train(recorder, spec.loss, spec.train_op)


def _train(recorder: Recorder, loss: tf.Tensor, train_op: tf.Operation) -> None:
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        while True:
            recorder.run(session.run, [loss, train_op])


def _train_in_session(
    recorder: Recorder, script: Any, options: Mapping[str, Any], batch: Any, train: Callable[[], None]
) -> None:
    """Run a script's own loop, whose sessions record each run. XLNet's and Transformer-XL's have the same loop."""
    sizes = {"n_layer": 2, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "mem_len": _LENGTH // 2}
    common = {"train_batch_size": _BATCH, "num_core_per_host": 1, "learning_rate": _RATE, "warmup_steps": _WARMUP}
    flags = {**sizes, **common, "train_steps": 100, "save_steps": 1000, **options}
    script.FLAGS(["train_gpu.py", *(f"--{name}={value}" for name, value in flags.items())])
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    script.data_utils.get_input_fn = lambda **_: (lambda params: dataset, {"num_batch": 100})

    plain = tf.Session

    class RecordedSession(plain):  # type: ignore[misc, valid-type] # TensorFlow has no types
        def run(self, fetches: Any, feed_dict: Any = None, **options: Any) -> Any:
            # The loop fetches six tensors; the last of them is the train op.
            if isinstance(fetches, list) and len(fetches) == 6:
                return recorder.run(lambda *what: plain.run(self, *what), fetches, feed_dict)
            return super().run(fetches, feed_dict, **options)

    script.tf.Session = RecordedSession
    train()


def _step_and_values(fetch: Callable[..., Any]) -> tuple[int, dict[str, str]]:
    """Return the global step, and a digest of each variable that a skipped step must not change."""
    variables = {each.op.name: each for each in tf.global_variables() if each.op.name not in _OF_MANAGERS}
    values = fetch(variables)
    digests = {name: hashlib.sha256(np.asarray(value).tobytes()).hexdigest() for name, value in values.items()}
    return int(fetch(tf.train.get_global_step())), digests


_OF_MANAGERS = ("loss_scale", "good_steps", "bad_steps")


def _types_of_products(graph: tf.Graph) -> list[str]:
    """Return the type of each matrix product of the graph, gradients included."""
    products = [each for each in graph.get_operations() if each.type in {"MatMul", "BatchMatMulV2", "Einsum"}]
    return [each.outputs[0].dtype.name for each in products]


if __name__ == "__main__":
    main()
