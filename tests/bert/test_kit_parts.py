"""The kit's learning rate, layer normalization and rate of examples."""

from typing import Any

import numpy as np
import published_formulas
import pytest
import tensorflow as tf

import tfmp
from tfmp import bert

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1

_KINDS: dict[str, dict[str, Any]] = {
    "adam": {},
    "lamb": {"power": 0.5, "start_rate": 0.5},
    "google": {"start_rate": 0.5},
}


def _rates(session: tf1.Session, steps: int, train: int, warmup: int | None, **changes: Any) -> list[float]:
    step = tf1.placeholder(tf.int64, [])
    rate = bert.warm_up_then_decay(step, 0.5, num_train_steps=train, num_warmup_steps=warmup, **changes)
    return [float(session.run(rate, {step: each})) for each in range(steps)]


@pytest.mark.parametrize("warmup", [0, 10, 50])
@pytest.mark.parametrize("kind", _KINDS)
def test_the_rate_is_the_published_one(kind: str, warmup: int, session: tf1.Session) -> None:
    expected = [published_formulas.rate(step, 0.5, 100, warmup, kind) for step in range(120)]
    np.testing.assert_allclose(_rates(session, 120, 100, warmup, **_KINDS[kind]), expected, rtol=2e-5, atol=1e-9)


def test_no_warm_up_may_be_none(session: tf1.Session) -> None:
    assert _rates(session, 2, 2, None) == [0.5, 0.25]


@pytest.mark.parametrize("warmup", [4, 8])
def test_a_warm_up_without_end_only_rises(warmup: int, session: tf1.Session) -> None:
    assert _rates(session, warmup + 2, 4, warmup) == [*(0.5 * step / warmup for step in range(warmup)), 0.0, 0.0]


@pytest.mark.parametrize(("dtype", "epsilon"), [("float32", 1e-12), ("float16", 1e-3)])
@pytest.mark.parametrize("axes", [(-1, -1), (1, -1), (1, 1)])
def test_layers_are_normalized_by_mean_and_variance(
    axes: tuple[int, int], dtype: str, epsilon: float, session: tf1.Session
) -> None:
    values = np.random.default_rng(0).normal(3.0, 0.25, size=(2, 4, 5)).astype(dtype)
    normalized = bert.layer_norm(tf.constant(values), axes[0], begin_params_axis=axes[1])
    beta, gamma = tf1.trainable_variables()
    assert normalized.dtype == dtype
    assert beta.shape == values.shape[axes[1] :]
    wide = values.astype(np.float64)
    over = tuple(range(axes[0] % 3, 3))
    mean, variance = wide.mean(over, keepdims=True), wide.var(over, keepdims=True)
    expected = 2.0 * (wide - mean) / np.sqrt(variance + epsilon) + 0.5
    session.run([each.assign(tf.fill(each.shape, tf.cast(to, dtype))) for each, to in ((beta, 0.5), (gamma, 2.0))])
    np.testing.assert_allclose(session.run(normalized), expected, atol=1e-4 if dtype == "float32" else 5e-3)


def test_squares_that_overflow_float16_do_not_matter(session: tf1.Session) -> None:
    normalized = bert.layer_norm(tf.constant([[-1000.0, 1000.0]], tf.float16))
    session.run(tf1.global_variables_initializer())
    assert session.run(normalized).tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize(("level", "epsilon"), [("O1", 1e-12), ("O2", 1e-3), ("O1-bfloat16", 1e-12)])
def test_small_activations_are_normalized_at_o1_as_in_float32(level: str, epsilon: float, session: tf1.Session) -> None:
    with tfmp.precision(level) as precision:
        half = tf.matmul(precision.cast(tf.constant([[0.0, 1.0]])), precision.cast(tf.eye(2) * 2.0**-5))
        normalized = bert.layer_norm(half)
    assert half.dtype == normalized.dtype
    assert half.dtype in (tf.float16, tf.bfloat16)
    session.run(tf1.global_variables_initializer())
    expected = 2.0**-6 / np.sqrt(2.0**-12 + epsilon)
    # 8 bits of bfloat16
    assert session.run(tf.cast(normalized, tf.float32)).tolist() == [pytest.approx([-expected, expected], rel=2**-8)]


def test_variables_of_layer_norm_have_the_names_of_contrib_and_may_be_stored_in_float32(session: tf1.Session) -> None:
    del session
    for scope in (None, None, "output"):
        bert.layer_norm(tf.ones([2, 3]), scope=scope)
    names = [variable.op.name for variable in tf1.trainable_variables()]
    scopes = ("LayerNorm", "LayerNorm_1", "output")
    assert names == [f"{scope}/{name}" for scope in scopes for name in ("beta", "gamma")]
    with tf1.variable_scope("bert", custom_getter=tfmp.float32_variable_storage_getter):
        assert bert.layer_norm(tf.ones([2, 3], tf.float16)).dtype == tf.float16
    assert [variable.dtype.base_dtype for variable in tf1.trainable_variables()[-2:]] == [tf.float32] * 2


@pytest.mark.parametrize(
    ("settings", "runs", "applied"),
    [
        # Runs at the start and after checkpoints are left out.
        (
            {"global_step": 100, "steps_per_checkpoint": 4, "left_out": 2},
            [(9.0 if step in (101, 102, 105, 106) else 0.5, step) for step in range(101, 109)],
            16,
        ),
        # Windows are left out as a whole.
        ({"runs_per_step": 4, "left_out": 1}, [(9.0 if run < 4 else 0.5, (run + 1) // 4) for run in range(8)], 16),
        # So is the first, which a run resumed in its middle, and which ends early.
        ({"runs_per_step": 4, "left_out": 1}, [(9.0, 0), (9.0, 1), *[(0.5, 1)] * 3, (0.5, 2)], 16),
        # A step of a window counts all its examples.
        ({"runs_per_step": 2, "left_out": 0}, [(0.5, step) for step in (0, 1, 1, 2, 2, 2)], 2 * 2 * 8 / 3),
        # A window that has not ended is not counted.
        ({"runs_per_step": 2, "left_out": 0}, [(0.5, 0), (0.5, 1), (9.0, 1)], 16),
        # Of three runs two are skipped: NVIDIA's script, which leaves out steps by number, reports a negative rate.
        ({"steps_per_checkpoint": 100}, [(0.5, (run + 1) // 3) for run in range(30)], 16 / 3),
        ({}, [], 0),
        ({}, [(1.0, 1)], 0),
    ],
)
def test_throughput_counts_windows_that_are_not_left_out(
    settings: dict[str, int], runs: list[tuple[float, int]], applied: float
) -> None:
    throughput = bert.Throughput(8, **settings)
    for seconds, step in runs:
        throughput.add(seconds, step)
    assert (throughput.attempted, throughput.applied) == (16 if applied else 0, pytest.approx(applied))
