"""Arguments that the wrapper refuses, in every Keras."""

import re
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from kerases import for_every_keras, kernel_and_bias, optimizer, take_step, values, wrap

import tfmp


def _manager() -> tfmp.LossScaleManager:
    return tfmp.FixedLossScaleManager(8)


@for_every_keras()
def test_wrapping_keras_own_wrapper_is_refused(keras: ModuleType) -> None:
    with pytest.raises(
        ValueError, match=r"a LossScaleOptimizer already: .* or call tfmp\.LossScaleOptimizer\.from_keras"
    ):
        wrap(keras.mixed_precision.LossScaleOptimizer(optimizer(keras)))


@for_every_keras()
def test_wrapping_twice_is_refused(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match="scale the loss twice"):
        wrap(wrap(optimizer(keras)))


@for_every_keras()
def test_class_in_place_of_an_optimizer_is_refused(keras: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"^opt is the class SGD: pass an object of it, SGD\(\.\.\.\)\.$"):
        wrap(keras.optimizers.SGD)


@pytest.mark.parametrize("bad", [None, True, 2 + 0j])
@for_every_keras()
def test_object_that_is_not_a_manager_is_refused(keras: ModuleType, bad: Any) -> None:
    with pytest.raises(TypeError, match=r'a tfmp\.LossScaleManager, a name such as "dynamic", or a dict, got [^:]*\.$'):
        tfmp.LossScaleOptimizer(optimizer(keras), bad)


@for_every_keras()
def test_class_in_place_of_a_manager_is_refused(keras: ModuleType) -> None:
    with pytest.raises(
        TypeError, match=r"is the class FixedLossScaleManager: pass an object of it, FixedLossScaleManag"
    ):
        tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager)


@for_every_keras()
def test_positional_initial_scale_and_growth_steps_are_refused(keras: ModuleType) -> None:
    # In Keras 3's own wrapper these two positions are initial_scale and dynamic_growth_steps.
    with pytest.raises(TypeError, match=r"got 32768\.0: write initial_scale=32768\.0 for a dynamic scale"):
        tfmp.LossScaleOptimizer(optimizer(keras), 2.0**15, 2000)


@for_every_keras()
def test_object_that_is_not_a_detector_is_refused(keras: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"must be a tfmp\.OverflowDetector"):
        tfmp.LossScaleOptimizer(optimizer(keras), _manager(), overflow_detector=65504)


@pytest.mark.parametrize(
    "manager", [_manager, lambda: tfmp.ExponentialUpdateLossScaleManager(8, 2)], ids=["fixed", "exponential"]
)
@for_every_keras()
def test_manager_of_another_optimizer_is_refused(keras: ModuleType, manager: Any) -> None:
    shared = manager()
    tfmp.LossScaleOptimizer(optimizer(keras), shared)
    with pytest.raises(ValueError, match="in another Keras optimizer already: make a manager for each"):
        tfmp.LossScaleOptimizer(optimizer(keras), shared)


@for_every_keras()
def test_is_distributed_without_a_strategy_is_refused(keras: ModuleType) -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), _manager(), is_distributed=True)
    with pytest.raises(ValueError, match=r"is_distributed=True, and nothing distributes: call hvd\.init"):
        take_step(opt, kernel_and_bias(keras), [tf.ones([2, 2]), tf.ones([2])])


@for_every_keras()
def test_integer_loss_is_refused(keras: ModuleType) -> None:
    opt = wrap(optimizer(keras))
    for scale in (opt.scale_loss, opt.get_scaled_loss):
        with pytest.raises(TypeError, match="the loss must be of a floating-point type, got int32"):
            scale(tf.constant(1))


@for_every_keras()
def test_from_keras_refuses_an_optimizer_that_is_not_wrapped(keras: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"got .*SGD.* wrap any other by tfmp\.LossScaleOptimizer"):
        tfmp.LossScaleOptimizer.from_keras(optimizer(keras))


@for_every_keras()
def test_from_keras_refuses_a_wrapper_of_tfmp(keras: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"a tfmp\.LossScaleOptimizer already: use it as it is"):
        tfmp.LossScaleOptimizer.from_keras(wrap(optimizer(keras)))


@pytest.mark.graph
@for_every_keras()
def test_graph_mode_is_refused(keras: ModuleType) -> None:
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="need TensorFlow 2's behaviour, which is disabled"),
    ):
        wrap(optimizer(keras))


def _methods_that_take_lists(keras: ModuleType, opt: Any, variables: list[Any]) -> dict[str, tuple[list[Any], Any]]:
    """Return the methods that take lists, by name, each with a valid list."""
    grads = [tf.ones([2, 2]), tf.ones([2])]
    pairs = list(zip(grads, variables, strict=True))
    methods = {
        "get_unscaled_gradients": (grads, opt.get_unscaled_gradients),
        "apply_gradients": (pairs, opt.apply_gradients),
        "minimize": (
            variables,
            lambda given: opt.minimize(lambda: tf.add_n(list(map(tf.reduce_sum, variables))), given),
        ),
        "build": (variables, opt.build),
        "exclude_from_weight_decay": (variables, opt.exclude_from_weight_decay),
        "exclude_from_weight_decay by name": (["kernel"], lambda given: opt.exclude_from_weight_decay(var_names=given)),
        "finalize_variable_values": (variables, opt.finalize_variable_values),
    }
    if keras.__version__.startswith("3."):
        methods["apply"] = (grads, lambda given: opt.apply(given, variables))
        methods["apply to variables"] = (variables, lambda given: opt.apply(grads, given))
    else:
        methods["compute_gradients"] = (
            variables,
            lambda given: opt.compute_gradients(lambda: tf.add_n(list(map(tf.reduce_sum, variables))), given),
        )
        methods["aggregate_gradients"] = (pairs, opt.aggregate_gradients)
    return methods


def _trained(keras: ModuleType, name: str, form: Any, built: bool) -> Any:
    opt, variables = wrap(optimizer(keras, momentum=0.5, weight_decay=0.25)), kernel_and_bias(keras)
    if built:
        opt.build(variables)
    given, take = _methods_that_take_lists(keras, opt, variables)[name]
    found = take(form(given))
    if not built or "exclude" in name:
        take_step(opt, variables, [tf.ones([2, 2]), tf.ones([2])])
    numbers = [value.numpy().tolist() for value in tf.nest.flatten(found) if hasattr(value, "numpy")]
    return numbers, values(variables), len(opt.variables)


@for_every_keras()
def test_generator_is_accepted_in_place_of_a_list(keras: ModuleType) -> None:
    for name in _methods_that_take_lists(keras, wrap(optimizer(keras)), kernel_and_bias(keras)):
        # Keras requires variables to be excluded before `build`.
        built = name != "build" and "exclude" not in name
        expected = _trained(keras, name, list, built)
        for form in (iter, tuple, lambda given: dict(enumerate(given)).values()):
            assert _trained(keras, name, form, built) == expected, name
    opt = wrap(optimizer(keras))
    opt.build(kernel_and_bias(keras))
    opt.set_weights(value for value in [variable.numpy() for variable in opt.variables])


@for_every_keras()
def test_argument_that_is_not_a_list_is_refused_with_its_value_and_advice(keras: ModuleType) -> None:
    opt, variables = wrap(optimizer(keras)), kernel_and_bias(keras)
    opt.build(variables)
    before = values(variables)
    for given, take in _methods_that_take_lists(keras, opt, variables).values():
        for wrong in (given[0], dict(enumerate(given)), [given], "grads", zip(variables, given, strict=False)):
            with pytest.raises(TypeError, match=r"must be .*(, got |, and it holds ).*: (pass|write) "):
                take(wrong)
    with pytest.raises(TypeError, match="weights must be a list of values, got 'ab' of type str: pass one array"):
        opt.set_weights("ab")
    assert values(variables) == before


@pytest.mark.parametrize("bad", ["x", "False", 1, None])
@for_every_keras()
def test_word_or_number_in_place_of_a_bool_is_refused(keras: ModuleType, bad: Any) -> None:
    names, inners = ["is_distributed", "dynamic"], [optimizer(keras)]
    if keras.__version__.startswith("2."):
        names.append("iterations_include_skipped_steps")
        inners.append(keras.optimizers.legacy.SGD(0.5))
    for inner in inners:
        for name in names:
            with pytest.raises(TypeError, match=f"{name} must be True or False, got {bad!r}"):
                tfmp.LossScaleOptimizer(inner, **{name: bad})


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("settings", [{}, {"jit_compile": True}, {"accumulation_steps": 2}], ids=str)
@for_every_keras()
def test_variable_that_the_optimizer_was_not_built_with_is_refused_as_keras_does(
    keras: ModuleType, settings: dict[str, Any], compiled: bool, name: str
) -> None:
    def error_of(opt: Any) -> Exception:
        known, unknown = (tf.Variable([1.0], name=each) for each in ("known", "unknown"))
        opt.build([known])

        def step() -> None:
            grads = [tf.constant([8.0]), tf.constant([8.0])]
            if isinstance(opt, tfmp.LossScaleOptimizer):
                grads = opt.get_unscaled_gradients(grads)
            opt.apply_gradients(zip(grads, [known, unknown], strict=True))

        with pytest.raises((KeyError, ValueError), match="unknown:0") as found:
            (tf.function(step, autograph=False) if compiled else step)()
        if isinstance(opt, tfmp.LossScaleOptimizer):
            assert (values([known, unknown]), int(opt.attempted_steps)) == ([[1.0], [1.0]], 0)
        return found.value

    of_keras = error_of(optimizer(keras, name))
    ours = error_of(tfmp.LossScaleOptimizer(optimizer(keras, name), _manager(), **settings))
    assert type(ours) is type(of_keras)
    assert _advice(ours) == _advice(of_keras)


def _advice(error: Exception) -> str:
    # Keras shows the variable, and graphs add where it is.
    return next(each for each in re.split(r"(?<=\.) ", str(error)) if each.startswith(("This opt", "This usually")))
