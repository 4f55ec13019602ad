"""What Keras' own wrapper has, tfmp's has too, in every Keras: arguments, properties, methods, configurations."""

import copy
import importlib
import inspect
import math
import pickle
import pydoc
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import kerases
import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, for_every_keras, gradients, kernel_and_bias, optimizer, take_step, values, variable, wrap

import tfmp

for_every_keras2 = for_every_keras("keras2", "tf_keras")


def _settings(opt: Any) -> tuple[Any, ...]:
    return float(opt.loss_scale), opt.initial_scale, opt.dynamic_growth_steps, opt.dynamic


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (2**15, 2**15, 2000, True)),
        ({"loss_scale_manager": "dynamic"}, (2**15, 2**15, 2000, True)),
        ({"initial_scale": 64, "dynamic_growth_steps": 2}, (64, 64, 2, True)),
        ({"dynamic": True, "initial_scale": 8}, (8, 8, 2000, True)),
        ({"dynamic": False, "initial_scale": 8}, (8, 8, None, False)),
        ({"loss_scale_manager": tfmp.FixedLossScaleManager(512)}, (512, 512, None, False)),
    ],
    ids=str,
)
@kerases.for_every_kind
def test_arguments_and_settings_are_those_of_keras_own_wrapper(
    keras: ModuleType, optimizers: ModuleType, arguments: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    is_keras_3 = keras.__version__.startswith("3.")
    if is_keras_3 and arguments.get("dynamic") is False:
        pytest.skip("Keras 3's own wrapper has no fixed scale")
    arguments = {name: copy.deepcopy(value) for name, value in arguments.items()}
    opt = tfmp.LossScaleOptimizer(inner_optimizer=optimizers.SGD(0.5), **arguments)
    assert _settings(opt) == expected
    types = [each.dtype.name for each in (opt.loss_scale, opt.last_step_finite, opt.applied_steps, opt.skipped_steps)]
    assert types == ["float32", "bool", "int64", "int64"]
    if opt.dynamic:
        rule = opt.manager.get_config()
        assert [rule[name] for name in ("decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")] == [1, 2, 0.5]
    if not is_keras_3 and "loss_scale_manager" not in arguments:
        assert _settings(keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(0.5), **arguments)) == expected
    for name, value in {"initial_scale": 4.0, "dynamic_growth_steps": 3, "dynamic": not opt.dynamic}.items():
        cure = rf"^{name} of this tfmp.LossScaleOptimizer cannot be changed, .*: make a new manager for {name}={value}"
        with pytest.raises(AttributeError, match=cure):
            setattr(opt, name, value)
    assert _settings(opt) == expected


def test_tf1_front_end_accepts_the_same_descriptions_of_a_manager() -> None:
    inner = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    scales = [float(tfmp.LossScaleOptimizer(inner, *spec).loss_scale) for spec in ([], ["dynamic"], [512])]
    assert scales == [2**15, 2**15, 512]


@for_every_keras()
def test_repr_shows_settings_and_state_and_a_custom_manager_has_no_rule_to_show(keras: ModuleType) -> None:
    custom = tfmp.LossScaleOptimizer(optimizer(keras), kerases.Halving())
    assert custom.dynamic
    with pytest.raises(AttributeError, match=r"a Halving does not follow the rule of Keras' own wrapper"):
        _ = custom.dynamic_growth_steps
    assert repr(custom) == "<tfmp.LossScaleOptimizer(SGD, <Halving()>): applied_steps=0, skipped_steps=0>"
    opt = tfmp.LossScaleOptimizer(optimizer(keras), initial_scale=64, overflow_drops="micro_batch")
    take_step(opt, kernel_and_bias(keras), gradients(0, np.inf))
    manager = (
        "<ExponentialUpdateLossScaleManager(init_loss_scale=64.0, incr_every_n_steps=2000, decr_every_n_nan_or_inf=1, "
        "decr_ratio=0.5): loss_scale=32.0, good_steps=0, bad_steps=0>"
    )
    assert repr(opt) == (
        f"<tfmp.LossScaleOptimizer(SGD, overflow_drops='micro_batch', {manager}): applied_steps=0, skipped_steps=1>"
    )
    with tf.Graph().as_default():
        of_graph = tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), 8, sparse_as_dense=True)
        assert repr(of_graph) == (
            "<tfmp.LossScaleOptimizer(AdamOptimizer, sparse_as_dense=True, <FixedLossScaleManager(loss_scale=8.0)>)>"
        )


@kerases.for_every_kind
def test_every_argument_that_a_front_end_takes_is_documented(keras: ModuleType, optimizers: ModuleType) -> None:
    documented = {*inspect.signature(tfmp.LossScaleOptimizer).parameters}
    assert [name for name in documented if f"{name}: " not in tfmp.LossScaleOptimizer.__doc__] == []
    for inner in (optimizers.SGD(0.5), tf.compat.v1.train.GradientDescentOptimizer(0.5)):
        classes = [each for each in type(tfmp.LossScaleOptimizer(inner)).__mro__ if each.__module__.startswith("tfmp.")]
        specs = [inspect.getfullargspec(vars(each)["__init__"]) for each in classes if "__init__" in vars(each)]
        taken = {name for spec in specs for name in (*spec.args, *spec.kwonlyargs)} - {"self"}
        assert {"opt", "inner_optimizer"} <= taken <= documented


def test_signature_and_help_of_the_public_class_show_arguments_and_methods() -> None:
    documented = list(inspect.signature(tfmp.LossScaleOptimizer).parameters)
    assert documented[:3] == ["opt", "loss_scale_manager", "is_distributed"]
    text = pydoc.plain(pydoc.render_doc(tfmp.LossScaleOptimizer))
    for method in ("minimize", "compute_gradients", "apply_gradients", "scale_loss", "get_unscaled_gradients"):
        # Python 3.13 and later break long signatures into lines.
        assert re.search(rf"^ \|  {method}\(\s*(\|\s+)?self", text, re.MULTILINE), method


#: The public names of Keras 3's own wrapper that work on the inner optimizer or on `variables`, so that its own methods
#: are correct here. All others are overridden.
_INHERITED_3 = {
    *("add_optimizer_variables", "add_variable", "add_variable_from_reference", "assign", "assign_add", "assign_sub"),
    *("check_finite", "learning_rate", "update_step", "variables"),
}
#: In Keras 2 the base class implements `lr` by overridden names. The others are for authors of optimizers: they make or
#: update variables of the wrapper itself.
_INHERITED_2 = {"add_variable", "add_variable_from_reference", "lr", "update_step"}


@for_every_keras()
def test_every_public_name_of_keras_own_wrapper_is_overridden_or_known_to_be_inherited(keras: ModuleType) -> None:
    is_keras_3, own = keras.__version__.startswith("3."), keras.mixed_precision.LossScaleOptimizer
    bases = [own] if is_keras_3 else [own, keras.optimizers.Optimizer]
    made, ours = own(optimizer(keras)), wrap(optimizer(keras))
    assert isinstance(ours, own)
    for name in (name for name in dir(type(made)) if not name.startswith("_")):
        if name in (_INHERITED_3 if is_keras_3 else _INHERITED_2):
            assert getattr(type(ours), name) is getattr(bases[-1], name), name
        else:
            assert getattr(type(ours), name) not in [getattr(base, name, None) for base in bases], name
    if is_keras_3:
        with pytest.raises(NotImplementedError, match="not for the TensorFlow backend"):
            ours.stateless_apply([], [], [])


@for_every_keras("keras3")
def test_scale_and_counter_are_read_and_set_as_in_keras_3s_own_wrapper(keras: ModuleType, tmp_path: Path) -> None:
    found = []
    for wrapper in (keras.optimizers.LossScaleOptimizer, tfmp.LossScaleOptimizer):
        opt, seen, variables = wrapper(optimizer(keras), initial_scale=8, dynamic_growth_steps=3), [], []
        variables = kernel_and_bias(keras)
        opt.build(variables)
        for step, last in enumerate([None, None, None, math.inf, None]):
            if step == 2:
                opt.dynamic_scale.assign(64)
            opt.scale_loss(tf.constant(0.0))
            opt.apply(gradients(0, last), variables)
            seen.append([float(opt.dynamic_scale), int(opt.step_counter), float(opt.dynamic_scale.numpy())])
        found.append(seen)
    assert found[0] == found[1] == [[8, 1, 8], [8, 2, 8], [128, 0, 128], [64, 0, 64], [64, 1, 64]]
    opt.dynamic_scale = 32
    assert [float(each) for each in (opt.dynamic_scale, opt.loss_scale, opt.manager.get_loss_scale())] == [32] * 3

    @tf.function
    def doubled() -> tf.Tensor:
        opt.dynamic_scale.assign(2 * opt.dynamic_scale)
        return opt.dynamic_scale + 0.0

    assert [float(doubled()) for _ in range(3)] == [64, 128, 256]
    assert float(opt.loss_scale) == 256
    # The names are in no checkpoint: there, that of Keras' own wrapper has another meaning.
    names = [name for name, _ in tf.train.list_variables(tf.train.Checkpoint(opt=opt).save(tmp_path / "checkpoint"))]
    assert not any("dynamic_scale" in name or "step_counter" in name for name in names)


@for_every_keras("keras3")
def test_scale_that_a_manager_does_not_let_one_set_is_readable(keras: ModuleType) -> None:
    for manager in (tfmp.FixedLossScaleManager(2**15), tfmp.LogMaxLossScaleManager()):
        opt = tfmp.LossScaleOptimizer(optimizer(keras), manager)
        with pytest.raises(NotImplementedError, match=r"cannot be set: use a tfmp\.ExponentialUpdateLossScaleManager"):
            opt.dynamic_scale = 8.0
        assert float(opt.dynamic_scale) == float(opt.loss_scale) == 2**15
    assert int(opt.step_counter) == 0


@for_every_keras()
def test_attributes_are_those_of_the_inner_optimizer(keras: ModuleType) -> None:
    inner = optimizer(keras, use_ema=True, ema_momentum=0.5)
    opt, (weight, _) = tfmp.LossScaleOptimizer(inner, initial_scale=8, name="mine"), kernel_and_bias(keras)
    assert (opt.inner_optimizer is inner, opt.name, opt.iterations is inner.iterations) == (True, "mine", True)
    opt.learning_rate = 0.25
    assert float(inner.learning_rate.numpy()) == float(opt.learning_rate.numpy()) == 0.25
    opt.learning_rate.assign(0.125)
    assert float(inner.learning_rate.numpy()) == 0.125
    take_step(opt, [weight], [8 * tf.ones([2, 2])])
    assert (weight.numpy().tolist(), int(opt.iterations)) == ([[0, 1], [2, 3]], 1)
    if keras.__version__.startswith("2."):
        opt.lr, opt.use_ema, opt.ema_momentum = 0.75, False, 0.25
        assert opt.lr is inner.learning_rate
        assert (float(inner.learning_rate), inner.use_ema, inner.ema_momentum) == (0.75, False, 0.25)
        opt = wrap(optimizer(keras))
        opt.iterations = tf.Variable(5, dtype=tf.int64)
        take_step(opt, kernel_and_bias(keras), gradients(0))
        assert int(opt.inner_optimizer.iterations) == int(opt.iterations) == 6
    # Not all of the inner optimizer's attributes are those of the wrapper.
    with pytest.raises(AttributeError):
        _ = opt.momentum


@pytest.mark.parametrize("by", ["var_list", "var_names"])
@for_every_keras()
def test_variables_are_excluded_from_the_inner_optimizers_weight_decay(keras: ModuleType, by: str) -> None:
    variables = kernel_and_bias(keras)
    opt = wrap(optimizer(keras, weight_decay=0.5))
    opt.exclude_from_weight_decay(**{by: {"var_list": variables[1:], "var_names": ["bias"]}[by]})
    take_step(opt, variables, [tf.zeros([2, 2]), tf.zeros([2])])
    assert values(variables) == [[[0.75, 1.5], [2.25, 3]], [5, 6]]


@for_every_keras()
def test_variables_hold_the_state_then_those_of_the_inner_optimizer_and_can_be_set(keras: ModuleType) -> None:
    opts = [wrap(optimizer(keras, "Adam")) for _ in range(2)]
    for seed, opt in enumerate(opts):
        variables = kernel_and_bias(keras)
        for bad in (None, np.inf, None)[seed:]:
            take_step(opt, variables, gradients(seed, last=bad))
    names, of_inner = [each.name.split(":")[0] for each in opt.variables], opt.inner_optimizer.variables
    own = len(names) - len(of_inner)
    counts = ["applied_steps", "skipped_steps", "consecutive_skipped_steps", "last_step_applied"]
    assert names[:own][-7:] == ["loss_scale", "good_steps", "bad_steps", *counts]
    assert [id(each) for each in opt.variables[own:]] == [id(each) for each in of_inner]
    assert values(opts[1].variables) != values(opts[0].variables)
    opts[1].set_weights(each.numpy() for each in opts[0].variables)
    assert values(opts[1].variables) == values(opts[0].variables)
    assert float(opts[1].loss_scale) == SCALE / 2


@for_every_keras()
def test_copy_shares_the_inner_optimizer_if_a_copy_of_keras_own_wrapper_does(keras: ModuleType) -> None:
    stock, opt = keras.mixed_precision.LossScaleOptimizer(optimizer(keras)), wrap(optimizer(keras))
    copied = copy.copy(opt)
    shares_inner = copied.inner_optimizer is opt.inner_optimizer
    assert shares_inner is (copy.copy(stock).inner_optimizer is stock.inner_optimizer)
    take_step(copied, kernel_and_bias(keras), gradients(0))
    assert (type(copied), int(opt.iterations), int(opt.applied_steps)) == (type(opt), shares_inner, shares_inner)
    if keras.__version__.startswith("2."):
        return
    take_step(opt, kernel_and_bias(keras), gradients(0, last=np.inf))
    for deep in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert deep.get_config() == opt.get_config()
        assert (float(deep.loss_scale), int(deep.skipped_steps)) == (SCALE / 2, 1)
        take_step(deep, kernel_and_bias(keras), gradients(0, last=np.inf))
        assert (float(deep.loss_scale), float(opt.loss_scale)) == (SCALE / 4, SCALE / 2)


@pytest.mark.parametrize("arguments", [{"dynamic_growth_steps": 3}, {"dynamic": False}], ids=str)
@kerases.for_every_kind
def test_public_class_makes_an_optimizer_from_the_config_of_keras_own_wrapper(
    keras: ModuleType, optimizers: ModuleType, arguments: dict[str, Any]
) -> None:
    if keras.__version__.startswith("3.") and "dynamic" in arguments:
        pytest.skip("Keras 3's own wrapper has no fixed scale")
    own = keras.mixed_precision.LossScaleOptimizer(optimizers.Adam(0.5), initial_scale=64.0, **arguments)
    opt = tfmp.LossScaleOptimizer.from_config(own.get_config())
    assert type(opt) is type(wrap(optimizers.SGD(0.5)))
    assert (float(opt.loss_scale), opt.dynamic_growth_steps) == (64, arguments.get("dynamic_growth_steps"))
    assert opt.inner_optimizer.get_config() == own.inner_optimizer.get_config()
    again = tfmp.LossScaleOptimizer.from_config(opt.get_config())
    assert (type(again), again.get_config()) == (type(opt), opt.get_config())


@for_every_keras2
def test_saved_configuration_names_the_class_where_keras_finds_it_without_tfmp(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    saved = keras.saving.serialize_keras_object(opt)
    assert getattr(importlib.import_module(saved["module"]), saved["class_name"]) is type(opt)


@for_every_keras("keras3")
def test_loss_scale_factor_of_the_inner_optimizer_is_turned_off(
    keras: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    opt, variables = wrap(optimizer(keras, loss_scale_factor=8.0)), [variable(keras, [1, 2])]
    take_step(opt, variables, [tf.constant([1.0, 2.0])])
    assert values(variables) == [[0.5, 1]]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    assert warning.startswith("loss_scale_factor=8.0 of the inner optimizer is turned off")


@for_every_keras2
def test_name_of_the_call_is_the_scope_of_the_inner_optimizers_ops_and_variables_may_be_a_function(
    keras: ModuleType,
) -> None:
    weight, opt = variable(keras, [1, 2]), wrap(optimizer(keras))

    @tf.function
    def step() -> None:
        opt.apply_gradients(opt.compute_gradients(lambda: tf.reduce_sum(weight), [weight]), name="mine")

    graph = step.get_concrete_function().graph.as_graph_def()
    assert any("mine" in node.name for function in graph.library.function for node in function.node_def)
    opt.minimize(lambda: tf.reduce_sum(weight), lambda: [weight])
    assert opt.apply_gradients([(tf.zeros([2]), weight)]) is opt.iterations
    assert weight.numpy().tolist() == [0.5, 1.5]


@kerases.for_every_kind
def test_private_name_of_the_wrapped_optimizer_that_public_code_reads_is_in_no_file(
    keras: ModuleType, optimizers: ModuleType, tmp_path: Path
) -> None:
    if keras.__version__.startswith("3."):
        pytest.skip("Keras 3's own wrapper has not got it")
    inner, legacy = optimizers.SGD(0.5), optimizers is not keras.optimizers
    assert keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(0.5))._optimizer
    model = kerases.linear_model(keras, tfmp.LossScaleOptimizer(inner, initial_scale=8))
    assert model.optimizer._optimizer is model.optimizer.inner_optimizer is inner
    model.fit(np.ones([4, 1]), np.ones([4, 1]), verbose=0)
    path = tf.train.Checkpoint(opt=model.optimizer).save(tmp_path / "checkpoint")
    names = {name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE") for name, _ in tf.train.list_variables(path)}
    if legacy:
        keys = ["iter", "learning_rate", "decay", "momentum"]
        keys += ["loss_scale/current_loss_scale", "loss_scale/good_steps"]
        keys += [f"loss_scale_manager/state/values/{name}" for name in ("loss_scale", "good_steps", "bad_steps")]
    else:
        keys = ["_iterations", "_learning_rate", "_variables/1", *(f"_variables/state_{index}" for index in range(8))]
    assert names - {"_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter"} == {f"opt/{key}" for key in keys}
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5") as file:
        groups = [] if legacy else ["_loss_scale_state", "inner_optimizer", "vars"]
        assert sorted(file.get("optimizer", ())) == groups
    with pytest.raises(AttributeError, match="setter"):
        model.optimizer._optimizer = optimizer(keras)
