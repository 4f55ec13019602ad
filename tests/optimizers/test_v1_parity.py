"""Comparison with runs of tf.contrib.mixed_precision that were recorded on TensorFlow 1.15."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

pytestmark = [pytest.mark.graph]

_RECORDINGS = Path(__file__).parent.parent / "recordings"
_CASES = json.loads(gzip.decompress((_RECORDINGS / "contrib_oracle.json.gz").read_bytes()))["cases"]
_CONFIGURATIONS = [("opt", "api", "y_grad"), ("kind", "opt"), ("kind", "api"), ("kind", "y_grad"), ("gs0", "y_grad")]
_STEPS = 60
_WEIGHTS = {"rtol": 2e-5, "atol": 1e-6}
_OPTIMIZERS = {
    "gd": lambda: tf1.train.GradientDescentOptimizer(0.125),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.125, 0.9),
    "adam": lambda: tf1.train.AdamOptimizer(0.01),
}


def _floats(text: str, *shape: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)


def _manager(settings: dict[str, Any]) -> tfmp.LossScaleManager:
    settings = dict(settings)
    kind = {"exponential": tfmp.ExponentialUpdateLossScaleManager, "fixed": tfmp.FixedLossScaleManager}
    return kind[settings.pop("type")](**settings)


class Replay:
    """A recorded run, rebuilt with tfmp."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        dtype = tf.as_dtype(case["loss_dtype"])
        self.x = tf1.get_variable("x", initializer=np.float32(case["x0"]))
        self.y = tf1.get_variable("y", initializer=np.float32(case["y0"]))
        self.px = tf1.placeholder(tf.float32, [3])
        self.py = tf1.placeholder(tf.float32, [len(case["idx"]) if case["idx"] else 4, 2])
        rows = tf.gather(self.y, case["idx"]) if case["y_grad"] == "indexed" else self.y
        loss = tf.reduce_sum(tf.cast(self.x, dtype) * tf.cast(self.px, dtype))
        if case["y_grad"] in ("dense", "indexed"):
            loss += tf.reduce_sum(tf.cast(rows, dtype) * tf.cast(self.py, dtype))
        self.global_step = None
        if case["gs0"] is not None:
            self.global_step = tf1.get_variable("global_step", initializer=np.int64(case["gs0"]), trainable=False)
        self.manager = _manager(case["manager"])
        self.opt = tfmp.LossScaleOptimizer(
            _OPTIMIZERS[case["opt"]](), self.manager, sparse_as_dense=case["y_grad"] == "indexed"
        )
        self.train_op = self._train_op(loss)

    def _train_op(self, loss: tf.Tensor) -> tf.Operation:
        case = self.case
        in_loss = [self.x] if case["y_grad"] in ("none", "indexed_direct") else [self.x, self.y]
        if case["api"] == "minimize":
            return self.opt.minimize(loss, self.global_step, var_list=in_loss)
        grads_and_vars = self.opt.compute_gradients(loss, in_loss)
        if case["y_grad"] == "indexed_direct":
            grads_and_vars.append((tf.IndexedSlices(self.py, tf.constant(case["idx"]), tf.constant([4, 2])), self.y))
        if case["api"] == "compute_clip_apply":
            grads_and_vars = [
                (grad if isinstance(grad, tf.IndexedSlices) else tf.clip_by_value(grad, -1.0, 1.0), variable)
                for grad, variable in grads_and_vars
            ]
        return self.opt.apply_gradients(grads_and_vars, self.global_step)

    def feeds(self, step: int) -> dict[tf.Tensor, np.ndarray]:
        px = np.float32(self.case["cx"][step]) / 4
        py = np.float32(self.case["cy"][step] if self.case["cy"] else np.zeros([4, 2])) / 4
        for bad_step, name, index, value in self.case["bad"]:
            if bad_step == step:
                (px if name == "x" else py).flat[index] = float(value)
        return {self.px: px, self.py: py}

    def run(self) -> dict[str, list[Any]]:
        """Run all steps; return the watched values after each."""
        watched = {
            "x": self.x,
            "y": self.y,
            "scale": self.manager.get_loss_scale(),
            "finite": self.opt.last_step_finite,
        }
        if isinstance(self.manager, tfmp.ExponentialUpdateLossScaleManager):
            watched |= {"good": "good_steps:0", "bad_steps": "bad_steps:0"}
        if self.global_step is not None:
            watched["gs"] = self.global_step
        seen: dict[str, list[Any]] = {name: [] for name in watched}
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for step in range(_STEPS):
                session.run(self.train_op, self.feeds(step))
                for name, value in session.run(watched).items():
                    seen[name].append(value)
            self.final_slots = {name: session.run(self._slot(name)) for name in self.case["final_slots"]}
        return seen

    def _slot(self, name: str) -> tf.Variable:
        return next(variable for variable in tf1.global_variables() if variable.name == name)


def _id(case: dict[str, Any]) -> str:
    return "-".join(str(case[key]) for key in ("id", "kind", "opt", "api", "y_grad"))


def _first_of_each_configuration() -> list[dict[str, Any]]:
    first = {(keys, *(case[key] for key in keys)): case for case in reversed(_CASES) for keys in _CONFIGURATIONS}
    kept = {case["id"] for case in first.values()}
    return [case for case in _CASES if case["id"] in kept]


# All cases run on TensorFlow 2.15, the only version here with tf.estimator, with the behaviour of TensorFlow 1, as they
# were recorded. Elsewhere a third of them runs, which contains each configuration.
_AS_RECORDED = hasattr(tf, "estimator") and not tf1.executing_eagerly_outside_functions()
_REPEATED = _CASES if _AS_RECORDED else _first_of_each_configuration()


def test_recording_contains_every_case() -> None:
    assert len(_CASES) == 134
    assert len(_first_of_each_configuration()) == 46
    assert all(len(case["finite"]) == _STEPS for case in _CASES)


# The cases of kind fp16: tf.contrib multiplied a float16 loss by the scale in float16, where 2**16 is infinite, and
# unscaled in float16, where the reciprocal of 2**25 is 0. tfmp does both in float32; tests/core/gradients has tests
# where the results differ. These runs have equal results nevertheless, because their loss itself is float16. The
# gradient with respect to the loss is then the scale as a float16 number. From 65520 on it is infinite, whatever the
# type of the product, and the step is skipped.
@pytest.mark.parametrize("case", _REPEATED, ids=_id)
def test_recorded_run_is_repeated(case: dict[str, Any]) -> None:
    with tf.Graph().as_default():
        replay = Replay(case)
        seen = replay.run()
    assert "".join(str(int(finite)) for finite in seen["finite"]) == case["finite"]
    if "scale" in case:
        np.testing.assert_array_equal(seen["scale"], _floats(case["scale"], _STEPS))
        assert [int(good) for good in seen["good"]] == case["good"]
        assert [int(bad) for bad in seen["bad_steps"]] == case["bad_steps"]
    if case["gs0"] is not None:
        assert [int(step) for step in seen["gs"]] == case["gs"]
    np.testing.assert_allclose(seen["x"], _floats(case["x"], _STEPS, 3), **_WEIGHTS)
    np.testing.assert_allclose(seen["y"], _floats(case["y"], _STEPS, 4, 2), **_WEIGHTS)
    for name, (shape, values) in case["final_slots"].items():
        np.testing.assert_allclose(replay.final_slots[name], _floats(values, *shape), **_WEIGHTS)
