"""The methods that the wrappers of all optimizers of Keras have, tried with the legacy ones too."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from kerases import SCALE, installed

import tfmp

pytestmark = pytest.mark.essential


def _kinds() -> dict[str, Callable[[], Any]]:
    def kind(optimizers: ModuleType) -> Callable[[], Any]:
        return lambda: optimizers.SGD(0.5)

    kinds = {}
    for name, keras in installed().items():
        kinds[name] = kind(keras.optimizers)
        if keras.__version__.startswith("2."):
            kinds[f"{name}, legacy"] = kind(keras.optimizers.legacy)
    return kinds


_KINDS = _kinds()

_each_kind = pytest.mark.parametrize("kind", _KINDS)


@_each_kind
def test_settings_are_those_of_the_manager(kind: str) -> None:
    dynamic = tfmp.LossScaleOptimizer(_KINDS[kind](), initial_scale=SCALE, dynamic_growth_steps=5)
    assert (dynamic.initial_scale, dynamic.dynamic_growth_steps, dynamic.dynamic) == (SCALE, 5, True)
    fixed = tfmp.LossScaleOptimizer(_KINDS[kind](), tfmp.FixedLossScaleManager(8))
    assert (fixed.initial_scale, fixed.dynamic_growth_steps, fixed.dynamic) == (8, None, False)


@_each_kind
def test_settings_of_the_manager_cannot_be_changed(kind: str) -> None:
    opt = tfmp.LossScaleOptimizer(_KINDS[kind](), initial_scale=SCALE, dynamic_growth_steps=5)
    for name, value in {"initial_scale": 8.0, "dynamic_growth_steps": 3, "dynamic": False}.items():
        cure = rf"^{name} of this tfmp.LossScaleOptimizer cannot be changed, .*: make a new manager for {name}={value}"
        with pytest.raises(AttributeError, match=cure):
            setattr(opt, name, value)
    assert (opt.initial_scale, opt.dynamic_growth_steps, opt.dynamic) == (SCALE, 5, True)


@_each_kind
def test_errors_of_python_name_the_public_class(kind: str) -> None:
    with pytest.raises(
        TypeError, match=r"^LossScaleOptimizer\.__init__\(\) takes from 1 to 4 positional arguments but 5"
    ):
        tfmp.LossScaleOptimizer(_KINDS[kind](), "dynamic", False, 2000)
    opt = tfmp.LossScaleOptimizer(_KINDS[kind]())
    with pytest.raises(TypeError, match=r"^LossScaleOptimizer\.scale_loss\(\) missing 1 required positional argument"):
        opt.scale_loss()
    with pytest.raises(
        AttributeError, match=r"^a tfmp\.LossScaleOptimizer around an optimizer of Keras has no attribute"
    ):
        _ = opt.minimise
    assert not hasattr(opt, "minimise")
    # A property with an error of its own keeps it.
    with pytest.raises(AttributeError, match=r"apply is Keras 3's|has no loss_scale_factor"):
        _ = opt.loss_scale_factor if kind == "keras3" else opt.apply


@_each_kind
def test_losses_and_gradients_are_multiplied_and_divided_by_the_scale(kind: str) -> None:
    opt = tfmp.LossScaleOptimizer(_KINDS[kind](), tfmp.FixedLossScaleManager(SCALE))
    loss = tf.constant(0.5)
    assert [float(each) for each in (opt.scale_loss(loss), opt.get_scaled_loss(loss))] == [SCALE / 2] * 2
    assert float(opt.get_scaled_loss(lambda: loss)()) == SCALE / 2
    grad, missing = opt.get_unscaled_gradients([tf.constant(SCALE / 2, tf.float16), None])
    assert (float(grad), grad.dtype, missing) == (0.5, tf.float32, None)


@_each_kind
def test_step_unscales_what_is_still_scaled_and_a_window_is_one_step(kind: str) -> None:
    opt, weight = (
        tfmp.LossScaleOptimizer(_KINDS[kind](), tfmp.FixedLossScaleManager(SCALE), accumulation_steps=2),
        tf.Variable(4.0),
    )
    found = []
    for grad in (1.0, 3.0):
        opt.scale_loss(tf.constant(0.0))
        opt.apply_gradients([(tf.constant(grad * SCALE), weight)])
        found.append(float(weight))
    for grad in (1.0, 3.0):
        opt.get_scaled_loss(tf.constant(0.0))
        opt.apply_gradients(zip(opt.get_unscaled_gradients([tf.constant(grad * SCALE)]), [weight], strict=True))
        found.append(float(weight))
    assert found == [4, 3, 3, 2]
    assert int(opt.applied_steps) == 2


@_each_kind
def test_wrapper_continues_from_the_scale_of_another(kind: str) -> None:
    opt = tfmp.LossScaleOptimizer(_KINDS[kind]())
    opt._continue_at(SCALE, 7)
    assert (float(opt.loss_scale), opt.manager.state_dict()["good_steps"]) == (SCALE, 7)
