"""Trains the kit's model in processes that Horovod connects, and prints the states after each run.

Each process is fed gradients of its own. The trainings run with TensorFlow 1's behaviour, which a ported script turns
on; one training for each way to share gradients also runs with TensorFlow 2's behaviour.

PYTHONPATH=. horovodrun -np 2 python tests/bert/bert_kit_workers.py
"""

import importlib
import json
from collections.abc import Iterator
from typing import Any

import kit_models
import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

WORKERS = 2

_WINDOWS: dict[str, Any] = {"manual_fp16": True, "num_accumulation_steps": 2}

#: The two ways to share gradients: they are reduced before they are accumulated, or after.
WAYS: dict[str, dict[str, Any]] = {"before": _WINDOWS, "after": {**_WINDOWS, "allreduce_post_accumulation": True}}

#: The settings of the trainings, by name: the two ways to share gradients, and one training for each other mode.
ROWS: dict[str, dict[str, Any]] = {
    **WAYS,
    "fp32": {"num_accumulation_steps": 2, "allreduce_post_accumulation": True},
    "use_fp16": {"use_fp16": True, "num_accumulation_steps": 2},
    "lamb": {**_WINDOWS, "optimizer_type": "lamb"},
    "one_run_a_step": {"manual_fp16": True},
    "clipped": {**_WINDOWS, "clip_norm": 1.0},
}

#: Each process clips its own gradients, so that no training of one process on their mean gives the same. Gradients are
#: sent in float32, and therefore exactly.
CLIPPED_APART: dict[str, Any] = {**ROWS["fp32"], "clip_norm": 1.0}


def inputs() -> list[list[list[np.ndarray]]]:
    """Return the gradients of each worker for eight runs; in the fourth run, those of the second worker overflow."""
    fed = [kit_models.random_grads(8, seed=rank) for rank in range(WORKERS)]
    fed[1][3] = kit_models.overflowing(fed[1][3])
    return fed


def states(fed: list[list[np.ndarray]], **settings: Any) -> Iterator[dict[str, Any]]:
    """Train on gradients, and yield after each run the fetched values and all variables but the sums of gradients."""
    names = ["step_update:0", "update_step:0"] if "num_accumulation_steps" in settings else ["step_update:0"]
    with tf.Graph().as_default(), tf1.Session() as session:
        model = _model(**settings)
        # The ops are made once: after each new op, the session would prepare the graph again.
        reads = kit_models.reads()
        session.run(tf1.global_variables_initializer())
        for grads in fed:
            fetched = model.run(session, grads, *names)
            # The name of a manager's resource variable repeats the variable's own name.
            kept = {
                name.removesuffix("/value"): value.tolist()
                for name, value in session.run(reads).items()
                if "accum" not in name and name != "batch_finite"
            }
            yield {"fetched": fetched, **kept}


def _model(**settings: Any) -> kit_models.Model:
    # By default nothing is clipped. Then one process that trains on the mean of the workers' gradients gives the same.
    return kit_models.Model(**{"init_loss_scale": 2.0**10, "clip_norm": 1e6, **settings})


def _small_gradients(hvd: Any, settings: dict[str, Any]) -> dict[str, float]:
    """Return the first moment after a step whose gradient underflows in float16, and its average sent unscaled."""
    with tf.Graph().as_default(), tf1.Session() as session:
        model = _model(hvd=hvd, **settings)
        unscaled = hvd.allreduce(model.grads["bert/bias"], compression=hvd.Compression.fp16, name="unscaled")
        session.run(tf1.global_variables_initializer())
        grads = [np.full_like(value, 2.0**-28) for value in kit_models.START.values()]
        for _ in range(2):
            model.run(session, grads)
        arrived = session.run(unscaled, {model.grads["bert/bias"]: grads[1]})
        moments = kit_models.state(session)["bert/bias/adam_m"]
        return {"moment": float(moments[0]), "unscaled": float(arrived[0])}


def _main() -> None:
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.init()
    fed = inputs()[hvd.rank()]

    def tell_states(behaviour: str, rows: dict[str, dict[str, Any]]) -> None:
        for row, settings in rows.items():
            for state in states(fed, hvd=hvd, **settings):
                _tell(f"{hvd.rank()} {behaviour}/{row}", state)

    tell_states("v2", WAYS)
    tf1.disable_v2_behavior()
    tell_states("v1", {**ROWS, "clipped_apart": CLIPPED_APART})
    for way, settings in WAYS.items():
        _tell(f"{hvd.rank()} small/{way}", _small_gradients(hvd, settings))


def _tell(name: str, value: Any) -> None:
    print("STATE", name, json.dumps(value), flush=True)  # noqa: T201 - a command line prints


if __name__ == "__main__":
    _main()
