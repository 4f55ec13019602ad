"""The learning rate, against the published formulas."""

from typing import Any

import numpy as np
import published_formulas
import pytest
import tensorflow as tf

from tfmp import bert

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1

_KINDS: dict[str, dict[str, Any]] = {
    "adam": {},
    "lamb": {"power": 0.5, "start_rate": 0.5},
    "google": {"start_rate": 0.5},
}


def _rates(
    session: tf1.Session, steps: range, init_lr: float, train: int, warmup: int | None, **changes: Any
) -> list[float]:
    step = tf1.placeholder(tf.int64, [])
    rate = bert.warm_up_then_decay(step, init_lr, num_train_steps=train, num_warmup_steps=warmup, **changes)
    return [float(session.run(rate, {step: each})) for each in steps]


@pytest.mark.parametrize("warmup", [0, 10, 50])
@pytest.mark.parametrize("kind", _KINDS)
def test_the_rate_is_the_published_one(kind: str, warmup: int, session: tf1.Session) -> None:
    expected = [published_formulas.rate(step, 0.5, 100, warmup, kind) for step in range(120)]
    rates = _rates(session, range(120), 0.5, 100, warmup, **_KINDS[kind])
    np.testing.assert_allclose(rates, expected, rtol=2e-5, atol=1e-9)


def test_adam_decays_from_where_the_warm_up_ends(session: tf1.Session) -> None:
    assert _rates(session, range(9), 0.5, 8, 4) == [0.0, 0.125, 0.25, 0.375, 0.5, 0.375, 0.25, 0.125, 0.0]


def test_no_warm_up_may_be_none(session: tf1.Session) -> None:
    assert _rates(session, range(2), 0.5, 2, None) == [0.5, 0.25]


@pytest.mark.parametrize("warmup", [4, 8])
def test_a_warm_up_without_end_only_rises(warmup: int, session: tf1.Session) -> None:
    rates = _rates(session, range(warmup + 2), 0.5, 4, warmup)
    assert rates == [*(0.5 * step / warmup for step in range(warmup)), 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0.5, 0), "num_train_steps must be a whole number from 1"),
        ((0.5, 8, -1), "num_warmup_steps must be a whole number from 0"),
        ((float("nan"), 8), "init_lr must be finite"),
        ((-0.5, 8), r"init_lr must be at least 0, got -0\.5\."),
    ],
)
def test_a_bad_setting_of_the_schedule_is_refused(settings: tuple[Any, ...], message: str) -> None:
    init_lr, train, *warmup = settings
    with pytest.raises(ValueError, match=message):
        bert.warm_up_then_decay(
            tf.constant(0), init_lr, num_train_steps=train, num_warmup_steps=warmup[0] if warmup else 0
        )


def test_a_negative_start_of_the_decay_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start_rate must be at least 0, got -0\.5\."):
        bert.warm_up_then_decay(tf.constant(0), 0.5, num_train_steps=8, start_rate=-0.5)
