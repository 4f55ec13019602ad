"""The arguments, properties and configurations of Keras' own wrapper, which tfmp's wrapper accepts in every Keras."""

import inspect
import pydoc
import re
from types import ModuleType
from typing import Any

import keras as keras_of_tensorflow
import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, gradients, kernel_and_bias, optimizer, skip_before, take_step, values, wrap

import tfmp

pytestmark = pytest.mark.essential

_KERAS_3 = keras_of_tensorflow.__version__.startswith("3.")


def _rule(opt: Any) -> list[float]:
    config = opt.get_config()["loss_scale_manager"]["config"]
    names = ("init_loss_scale", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")
    return [config[name] for name in names]


@for_every_keras()
def test_default_follows_the_rule_of_keras_own_wrapper(keras: ModuleType) -> None:
    for settings in [[], ["dynamic"]]:
        opt = tfmp.LossScaleOptimizer(optimizer(keras), *settings)
        assert _rule(opt) == [2**15, 2000, 1, 2, 0.5]
        assert (opt.initial_scale, opt.dynamic_growth_steps) == (2**15, 2000)


@for_every_keras()
def test_arguments_of_keras_own_wrapper_are_accepted_and_readable(keras: ModuleType) -> None:
    opt = tfmp.LossScaleOptimizer(
        inner_optimizer=optimizer(keras), initial_scale=64, dynamic_growth_steps=2, name="mine"
    )
    assert _rule(opt) == [64, 2, 1, 2, 0.5]
    variables = kernel_and_bias(keras)
    for _ in range(2):
        take_step(opt, variables, gradients(0))
    assert float(opt.loss_scale) == 128
    assert (opt.initial_scale, opt.dynamic_growth_steps, opt.name) == (64, 2, "mine")


@for_every_keras()
def test_settings_of_a_fixed_scale_are_readable(keras: ModuleType) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(512))
    assert opt.get_config()["loss_scale_manager"]["class_name"] == "FixedLossScaleManager"
    assert (float(opt.loss_scale), opt.initial_scale, opt.dynamic_growth_steps) == (512, 512, None)


@pytest.mark.parametrize(
    ("scale", "shown"),
    [
        (512, "512"),
        (2.0**15, r"32768\.0"),
        (np.float32(8), "number"),
        (np.array(8.0), "number"),
        (tf.constant(8.0), "number"),
        (tf.Variable(8.0), "number"),
    ],
    ids=["int", "float", "NumPy number", "array", "tensor", "variable"],
)
@for_every_keras()
def test_number_in_place_of_the_manager_is_refused_with_both_ways_to_write_it(
    keras: ModuleType, scale: Any, shown: str
) -> None:
    # The second argument of Keras 3's own wrapper is the first scale of a dynamic one.
    inners = [optimizer(keras)]
    if keras.__version__.startswith("2."):
        inners.append(keras.optimizers.legacy.SGD(0.5))
    cure = rf"write initial_scale={shown} for a dynamic .*, or tfmp\.FixedLossScaleManager\({shown}\) for a fixed"
    for inner in inners:
        with pytest.raises(TypeError, match=f"got .*: {cure}"):
            tfmp.LossScaleOptimizer(inner, scale)
        with pytest.raises(TypeError, match=cure):
            tfmp.LossScaleOptimizer(inner, loss_scale_manager=scale, initial_scale=8)


def test_tf1_front_end_accepts_the_same_descriptions_of_a_manager() -> None:
    inner = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    assert [float(tfmp.LossScaleOptimizer(inner, *spec).loss_scale) for spec in ([], ["dynamic"], [512])] == [
        2**15,
        2**15,
        512,
    ]


class _Eight(tfmp.LossScaleManager):
    def get_loss_scale(self) -> tf.Tensor:
        return tf.constant(8.0)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        del finite_grads
        return tf.no_op()


@for_every_keras()
def test_settings_of_keras_own_wrapper_are_unavailable_with_a_custom_manager(keras: ModuleType) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), _Eight())
    assert opt.dynamic
    with pytest.raises(AttributeError, match=r"a _Eight does not follow the rule of Keras' own wrapper"):
        _ = opt.dynamic_growth_steps
    assert repr(opt) == "<tfmp.LossScaleOptimizer(SGD, <_Eight()>): applied_steps=0, skipped_steps=0>"


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        # The second argument of Keras 2's own wrapper is `dynamic`, a boolean.
        ([True], {}, r'a tfmp\.LossScaleManager, a name such as "dynamic", or a dict, got True\.'),
        ([None], {}, r'a name such as "dynamic", or a dict, got None\.'),
        (["log_max"], {"initial_scale": 8}, r"loss_scale_manager='log_max' decides the scale by settings of its own"),
        (["quick"], {}, r"the mode of a loss scale is one of dynamic, .*got 'quick'"),
        ([], {"initial_scale": 0.5}, r"initial_scale must be .* at least 1, got 0.5"),
        ([], {"dynamic_growth_steps": 0}, r"dynamic_growth_steps must be a whole number from 1"),
    ],
)
@for_every_keras()
def test_arguments_that_do_not_describe_a_manager_are_refused(
    keras: ModuleType, arguments: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tfmp.LossScaleOptimizer(optimizer(keras), *arguments, **settings)


@for_every_keras("keras2", "tf_keras")
def test_keras_2_arguments_for_a_fixed_scale_are_accepted(keras: ModuleType) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), dynamic=False, initial_scale=256)
    assert (float(opt.loss_scale), opt.dynamic, opt.dynamic_growth_steps) == (256, False, None)
    with pytest.raises(ValueError, match=r"write tfmp\.LossScaleOptimizer\(optimizer, tfmp\.Fixed"):
        tfmp.LossScaleOptimizer(optimizer(keras), dynamic=False)
    with pytest.raises(ValueError, match="pass it as initial_scale, without"):
        tfmp.LossScaleOptimizer(optimizer(keras), dynamic=False, initial_scale=8, dynamic_growth_steps=5)
    with pytest.raises(AttributeError, match=r"read the state of the loss-scale manager instead"):
        _ = opt.dynamic_counter


@for_every_keras()
def test_public_class_makes_an_optimizer_from_its_config(keras: ModuleType) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras, "Adam"), tfmp.LogMaxLossScaleManager(), name="mine")
    again = tfmp.LossScaleOptimizer.from_config(opt.get_config())
    assert type(again) is type(opt)
    assert again.get_config() == opt.get_config()


@for_every_keras()
def test_public_class_makes_an_optimizer_from_the_config_of_keras_own_wrapper(keras: ModuleType) -> None:
    settings = [{"initial_scale": 64.0, "dynamic_growth_steps": 3}]
    if keras.__version__.startswith("2."):
        settings.append({"initial_scale": 64.0, "dynamic": False})
    for each in settings:
        own = keras.mixed_precision.LossScaleOptimizer(optimizer(keras, "Adam"), **each)
        opt = tfmp.LossScaleOptimizer.from_config(own.get_config())
        assert type(opt) is type(wrap(optimizer(keras)))
        assert (float(opt.loss_scale), opt.dynamic_growth_steps) == (64, each.get("dynamic_growth_steps"))
        assert opt.inner_optimizer.get_config() == own.inner_optimizer.get_config()


@for_every_keras()
def test_keras_own_wrapper_refuses_to_wrap_tfmps(keras: ModuleType) -> None:
    skip_before((3, 10), keras, "its wrapper does not touch the optimizer that it wraps")
    opt = wrap(optimizer(keras))
    with pytest.raises((TypeError, ValueError), match=r"scaled twice|already wrapped by a LossScaleOptimizer"):
        keras.mixed_precision.LossScaleOptimizer(opt)


@pytest.mark.skipif(not _KERAS_3, reason="Keras 2 has no loss_scale_factor")
def test_loss_scale_factor_of_the_inner_optimizer_is_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    keras = keras_of_tensorflow
    opt, plain = wrap(optimizer(keras, loss_scale_factor=8.0)), optimizer(keras)
    variables, plain_variables = kernel_and_bias(keras), kernel_and_bias(keras)
    take_step(opt, variables, gradients(0))
    take_step(plain, plain_variables, gradients(0))
    assert values(variables) == values(plain_variables)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    assert warning.startswith("loss_scale_factor=8.0 of the inner optimizer is turned off")
    with pytest.raises(AttributeError, match="has no loss_scale_factor"):
        _ = opt.loss_scale_factor


def test_signature_and_help_of_the_public_class_show_arguments_and_methods() -> None:
    parameters = inspect.signature(tfmp.LossScaleOptimizer).parameters
    assert list(parameters)[:3] == ["opt", "loss_scale_manager", "is_distributed"]
    assert {"inner_optimizer", "initial_scale", "name", "accumulation_steps"} <= set(parameters)
    text = pydoc.plain(pydoc.render_doc(tfmp.LossScaleOptimizer))
    for method in ("minimize", "compute_gradients", "apply_gradients", "scale_loss", "get_unscaled_gradients"):
        # Python 3.13 and later break long signatures into lines.
        assert re.search(rf"^ \|  {method}\(\s*(\|\s+)?self", text, re.MULTILINE), method


@for_every_keras()
def test_public_class_documents_all_arguments_of_the_front_ends(keras: ModuleType) -> None:
    documented = set(inspect.signature(tfmp.LossScaleOptimizer).parameters)
    for opt in (wrap(optimizer(keras)), wrap(tf.compat.v1.train.GradientDescentOptimizer(0.5))):
        taken = inspect.signature(type(opt).__init__).parameters
        # `others` are refused.
        assert set(taken) - {"self", "others"} <= documented


@for_every_keras()
def test_repr_shows_settings_and_state(keras: ModuleType) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), initial_scale=64, overflow_drops="micro_batch")
    opt.get_unscaled_gradients([tf.constant(np.inf)])
    opt.apply_gradients(zip(gradients(0, np.inf), kernel_and_bias(keras), strict=True))
    manager = (
        "<ExponentialUpdateLossScaleManager(init_loss_scale=64.0, incr_every_n_steps=2000, decr_every_n_nan_or_inf=1, "
        "decr_ratio=0.5): loss_scale=32.0, good_steps=0, bad_steps=0>"
    )
    assert repr(opt) == (
        f"<tfmp.LossScaleOptimizer(SGD, overflow_drops='micro_batch', {manager}): applied_steps=0, skipped_steps=1>"
    )


def test_repr_in_a_graph_shows_only_settings() -> None:
    with tf.Graph().as_default():
        opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), 8, sparse_as_dense=True)
        assert repr(opt) == (
            "<tfmp.LossScaleOptimizer(AdamOptimizer, sparse_as_dense=True, <FixedLossScaleManager(loss_scale=8.0)>)>"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"foo": True, "bar": 3}, r"around an optimizer of Keras has no arguments: `foo`, `bar`\."),
        (
            {"use_ema": True},
            r"on the `inner_optimizer`, got use_ema=True: .*LossScaleOptimizer\(SGD\(\.\.\., use_ema=True",
        ),
        ({"clipnorm": 1.0, "momentum": 0.5}, r"on the `inner_optimizer`, got clipnorm=1\.0, momentum=0\.5"),
        ({"learning_rate": 0.5}, r"on the `inner_optimizer`, got learning_rate=0\.5"),
    ],
)
@for_every_keras()
def test_unknown_arguments_are_refused_and_those_of_the_inner_optimizer_sent_there(
    keras: ModuleType, arguments: dict[str, Any], message: str
) -> None:
    inner = optimizer(keras)
    with pytest.raises(ValueError, match=message):
        tfmp.LossScaleOptimizer(inner, **arguments)
    tfmp.LossScaleOptimizer(inner, use_ema=False, clipnorm=None)


@for_every_keras("keras3")
def test_arguments_for_a_fixed_scale_are_explained(keras: ModuleType) -> None:
    tfmp.LossScaleOptimizer(optimizer(keras), dynamic=True)
    for argument in ({"dynamic": False}, {"loss_scale_factor": 8.0}):
        with pytest.raises(ValueError, match=r"tfmp\.FixedLossScaleManager\(scale\)\) for a fixed scale"):
            tfmp.LossScaleOptimizer(optimizer(keras), **argument)
