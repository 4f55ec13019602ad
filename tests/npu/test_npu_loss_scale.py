"""The managers and the optimizer of the NPU bridge: as tfmp's, with or without the overflow check."""

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from faults import FAULTS, REPLICA_FAULTS, Fault, course_of
from kit import checks
from kit.hosts import Host, V1Eager, V1Graph
from kit.keras_hosts import compiled
from kit.oracle import Rule
from scenarios import STRUCTURE

import tfmp
import tfmp.npu
from tfmp.npu import npu_loss_scale_manager as lsm_lib
from tfmp.npu import npu_loss_scale_optimizer as lso

pytestmark = pytest.mark.graph


class Noted(tf.compat.v1.train.GradientDescentOptimizer):
    """An optimizer with an additional attribute."""

    schedule = "linear"


def _sgd() -> Noted:
    return Noted(0.5)


# The code of public scripts. The imports above are theirs too, with tfmp.npu in place of the bridge's package.
def _of_script(opt: tf.compat.v1.train.Optimizer, **_: Any) -> tf.compat.v1.train.Optimizer:
    loss_scale_manager = lsm_lib.ExponentialUpdateLossScaleManager(
        init_loss_scale=8, incr_every_n_steps=2, decr_every_n_nan_or_inf=2, decr_ratio=0.5
    )
    return lso.NPULossScaleOptimizer(opt, loss_scale_manager, is_distributed=False)


def test_script_trains_as_tf_contrib_did() -> None:
    fault, rule = FAULTS["inf on every other step"], Rule(8, 2, 2)
    states = checks.train(V1Graph(STRUCTURE, rule, lambda: {"wrap": _of_script}), fault.steps)
    assert checks.violations(course_of(fault, rule), states, V1Graph(STRUCTURE, None)) == []


def _fixed(loss_scale: float, enabled: bool | None, opt: Any = lso.NPULossScaleOptimizer) -> dict[str, Any]:
    given = {} if enabled is None else {"enable_overflow_check": enabled}
    manager = lsm_lib.FixedLossScaleManager(loss_scale=loss_scale, **given)
    assert manager.get_enable_overflow_check() is (enabled is not False)
    return {"loss_scale_manager": manager, "wrap": opt}


def _outcome(host: Host, fault: Fault) -> tuple[int, int, bool]:
    """Return how many of two steps are applied and skipped if the second overflows, and if weights are finite."""
    state = checks.train(host, fault.steps[:2])[-1]
    assert state.steps == state.told["applied"]
    return state.told["applied"], state.told["skipped"], bool(np.isfinite(state.moving[0]).all())


@pytest.mark.parametrize(
    ("enabled", "opt", "is_applied"),
    [
        (None, lso.NPULossScaleOptimizer, False),
        (True, lso.NPULossScaleOptimizer, False),
        (False, lso.NPULossScaleOptimizer, True),
        (False, tfmp.LossScaleOptimizer, False),
    ],
)
def test_without_overflow_check_an_infinite_gradient_is_applied_by_the_optimizer_of_the_bridge_alone(
    enabled: bool | None, opt: Any, is_applied: bool
) -> None:
    host = V1Graph(STRUCTURE, Rule(), lambda: _fixed(1024, enabled, opt))
    assert _outcome(host, FAULTS["inf"]) == ((2, 0, False) if is_applied else (1, 1, True))


@pytest.mark.parametrize("trace", [None, compiled], ids=["eager", "function"])
@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("fault", ["inf on the second", "3e38 on both, whose sum overflows"])
def test_without_overflow_check_replicas_apply_every_step(
    two_replicas: tf.distribute.MirroredStrategy, fault: str, checked: bool, trace: Any
) -> None:
    if not tf.executing_eagerly():
        pytest.skip("graph mode is on")
    settings = {"strategy": two_replicas, "compiled": trace}
    host = V1Eager(STRUCTURE, Rule(), lambda: _fixed(1, checked), **settings)
    assert _outcome(host, REPLICA_FAULTS[fault]) == ((1, 1, True) if checked else (2, 0, False))


def test_managers_have_the_settings_of_tfmp_and_are_made_anew_from_their_configs() -> None:
    settings: dict[str, Any] = {"init_loss_scale": 8.0, "incr_every_n_steps": 2, "max_loss_scale": 64.0}
    with tf.Graph().as_default():
        manager = tfmp.npu.ExponentialUpdateLossScaleManager(**settings, enable_overflow_check=True)
        assert manager.get_enable_overflow_check()
        assert manager.get_config() == tfmp.ExponentialUpdateLossScaleManager(**settings).get_config()
        assert type(manager).from_config(manager.get_config()).get_config() == manager.get_config()
        fixed = tfmp.npu.FixedLossScaleManager(8, False)
        assert type(fixed).from_config(fixed.get_config()).get_enable_overflow_check() is False


def _is_distributed() -> None:
    w = tf.compat.v1.get_variable("w", initializer=1.0)
    _wrapped(_sgd(), is_distributed=True).minimize(w * 1.0)


def _wrapped(opt: Any = None, **settings: Any) -> lso.NPULossScaleOptimizer:
    return lso.NPULossScaleOptimizer(opt or _sgd(), lsm_lib.FixedLossScaleManager(8), **settings)


_UNCHECKED = "unchecked, the scale would only grow; leave it out"
_GROWING = tfmp.npu.ExponentialUpdateLossScaleManager
_FIXED = tfmp.npu.FixedLossScaleManager


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _GROWING(8, 2, enable_overflow_check=False), ValueError, _UNCHECKED),
        (lambda: _GROWING(8, 0), ValueError, "incr_every_n_steps must be a whole number"),
        (lambda: _FIXED(0.5), ValueError, "loss_scale must be a float32 number of at least 1, got 0.5"),
        (lambda: _FIXED(8, "no"), TypeError, "enable_overflow_check must be True or False, got 'no'"),
        (
            lambda: lso.NPULossScaleOptimizer(_sgd(), 8),
            TypeError,
            "loss_scale_manager must be a tfmp.LossScaleManager, got 8 of type int: for a const",
        ),
        (lambda: _wrapped("adam"), TypeError, "opt must be a tf.compat.v1.train.Optimizer, got 'adam'"),
        (lambda: _wrapped(_wrapped()), ValueError, "wrapping it again would scale the loss twice"),
        (_is_distributed, ValueError, "is_distributed=True, and nothing distributes: call hvd.init()"),
    ],
)
def test_bad_settings_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with tf.Graph().as_default(), pytest.raises(error, match=re.escape(message)):
        call()


def test_sparse_gradients_are_made_dense_on_request(session: tf.compat.v1.Session) -> None:
    del session
    w = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0])
    for dense in (False, True):
        optimizer = _wrapped(sparse_as_dense=dense)
        ((grad, _),) = optimizer.compute_gradients(tf.reduce_sum(tf.gather(w, [1])), [w])
        assert isinstance(grad, tf.IndexedSlices) is not dense


def test_unknown_attributes_are_those_of_the_wrapped_optimizer() -> None:
    with tf.Graph().as_default():
        optimizer = _wrapped()
        # Copies and unfinished objects do not ask for ever.
        assert copy.copy(optimizer)._opt is optimizer._opt
    assert isinstance(optimizer, tfmp.LossScaleOptimizer)
    assert (optimizer.schedule, optimizer._learning_rate, optimizer.get_name()) == ("linear", 0.5, "GradientDescent")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = optimizer.no_such_name
    unfinished = lso.NPULossScaleOptimizer.__new__(lso.NPULossScaleOptimizer)
    with pytest.raises(AttributeError, match="'NPULossScaleOptimizer' object has no attribute 'schedule'"):
        _ = unfinished.schedule


def test_checkpoint_does_not_take_it_for_the_wrapped_optimizer(session: tf.compat.v1.Session) -> None:
    inner = _sgd()
    tf.train.Checkpoint(optimizer=inner)
    optimizer = _wrapped(inner)
    with session.as_default(), pytest.raises(NotImplementedError, match=r"a tf\.train\.Checkpoint cannot hold this"):
        tf.train.Checkpoint(optimizer=optimizer).save("unused")
