"""Updates that XLA compiles in a function: when there are any, and that they train as without a wrapper."""

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    compiled_calls,
    for_every_keras,
    kernel_and_bias,
    num_programs,
    operations,
    optimizer,
    values,
    variable,
    wrap,
)
from pairs import SHAPES, Pair, apply, many_gradients, many_variables
from stand_ins import run_horovod

import tfmp

_keras_3_alone = for_every_keras("keras3")


@pytest.mark.parametrize(
    ("name", "options", "way"),
    [
        # Of these the update of a row whose gradient is zero, as of those that a program adds, differs.
        *((name, {}, "function") for name in ("SGD", "Adam", "Ftrl", "Muon", "ScheduleFreeAdamW", "MultiOptimizer")),
        ("SGD", {"global_clipnorm": 0.5}, "function"),
        ("Adam", {}, "eager"),
    ],
    ids=str,
)
@for_every_keras()
def test_sparse_gradients_of_any_number_of_rows_train_as_without_a_wrapper(
    keras: ModuleType, name: str, options: dict[str, Any], way: str
) -> None:
    # The gradient of the other one, which is alike, is dense.
    pair = Pair(
        lambda: optimizer(keras, name, **options), lambda: [variable(keras, np.ones([3, 2]), each) for each in "ab"]
    )
    traced = []

    def grads(rows: tf.Tensor, indices: tf.Tensor) -> list[Any]:
        return [tf.IndexedSlices(rows, indices, tf.constant([3, 2])), tf.ones([3, 2])]

    def step(*rows_and_indices: tf.Tensor) -> None:
        traced.append(1)
        pair.apply(grads(*rows_and_indices))

    specs = [tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)]
    run = tf.function(step, input_signature=specs) if way == "function" else step
    # XLA would compile again for every other number of rows.
    for indices in ([1, 1, 0], [2], [0, 1], [1, 1, 1, 2, 0]):
        rows = tf.constant(np.arange(2.0 * len(indices), dtype=np.float32).reshape(-1, 2) / 8)
        run(rows, tf.constant(indices))
        pair.apply_bare(grads(rows, tf.constant(indices)))
        pair.assert_alike()
    assert len(traced) == (1 if way == "function" else 4)


#: Settings, a gradient, whether the script unscales it, and what the step subtracts; None if it is what Keras' does.
_CLIPPED: list[tuple[dict[str, float], list[float], bool, Any]] = [
    # The check has summed the squares already, in a wider type: those of these gradients overflow float32.
    ({"global_clipnorm": 1.0}, [3e28, -4e28], False, [0.6, -0.8]),
    ({"global_clipnorm": 1.0}, [1e20, 1e20], True, [0.5**0.5, 0.5**0.5]),
    ({"global_clipnorm": 2.5}, [3.0, 4.0], False, [1.5, 2.0]),
    ({"global_clipnorm": 10.0}, [3.0, 4.0], False, [3.0, 4.0]),
    # Norms that Keras ignores.
    ({"global_clipnorm": -1.0, "clipvalue": 0.5}, [6.0, 8.0], False, None),
    ({"clipnorm": -1.0, "global_clipnorm": 5.0, "clipvalue": 0.5}, [6.0, 8.0], False, None),
]


@pytest.mark.parametrize(("settings", "grad", "unscales", "moved"), _CLIPPED)
@_keras_3_alone
def test_program_clips_as_the_optimizer_clips(
    keras: ModuleType, settings: dict[str, Any], grad: list[float], unscales: bool, moved: Any
) -> None:
    def make() -> Any:
        made = optimizer(keras, learning_rate=1.0)
        for name, value in settings.items():
            setattr(made, name, value)
        return made

    pair = Pair(make, lambda: [variable(keras, [0, 0])])

    def step() -> None:
        grads = [SCALE * tf.constant(grad)]
        pair.opt.apply(pair.opt.get_unscaled_gradients(grads) if unscales else grads)

    tf.function(step)()
    pair.apply_bare([tf.constant(grad)])
    expected = pair.bare_variables[0].numpy() if moved is None else -np.float32(moved)
    np.testing.assert_allclose(pair.variables[0].numpy(), expected, rtol=1e-6)
    assert int(pair.inner.iterations) == 1
    assert {name: getattr(pair.inner, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("name", "options", "shapes", "programs", "calls"),
    [
        # A program for two kernels, which is called twice, and for one kernel, a bias, and the last.
        *(("Adam", {name: True}, SHAPES, 4, 7) for name in ("amsgrad", "clipnorm", "global_clipnorm")),
        # A program for all, where one must see all.
        ("Adam", {"use_ema": True}, SHAPES, 1, 1),
        ("Nadam", {}, SHAPES, 1, 1),
        # Programs that update 1; 1 and 1 and 1; 2 and 2; four times 4 and 1; four times 1; 2 and 2 variables: about the
        # root of the number of those that are alike.
        ("SGD", {}, [[1]], 1, 1),
        ("SGD", {}, [[1]] * 3, 1, 3),
        ("SGD", {}, [[1]] * 4, 1, 2),
        ("SGD", {}, [[1]] * 17, 2, 5),
        ("SGD", {}, [[2**18]] * 4, 1, 4),
        ("SGD", {}, [[0]] * 4, 1, 2),
    ],
)
@for_every_keras()
def test_one_program_updates_all_variables_that_are_alike_some_in_each_call(
    keras: ModuleType, name: str, options: dict[str, Any], shapes: list[Any], programs: int, calls: int
) -> None:
    pair = Pair(lambda: optimizer(keras, name, **options), lambda: _of_shapes(*shapes)(keras))
    found = compiled_calls(pair.apply, [tf.ones(shape) for shape in shapes])
    assert (len({*found}), len(found)) == (programs, calls)


@pytest.mark.parametrize("differs", ["decay", "constraint"])
@for_every_keras()
def test_variables_that_differ_in_more_than_their_shape_share_no_program(keras: ModuleType, differs: str) -> None:
    def decaying() -> Any:
        made = optimizer(keras, "AdamW", weight_decay=0.5)
        if differs == "decay":
            made.exclude_from_weight_decay(var_names=["w2", "w4"])
        return made

    pair = Pair(decaying, lambda: many_variables(keras))
    if differs == "constraint":
        if keras.__version__.startswith("2."):
            pytest.skip("variables of TensorFlow get it when they are made")
        pair.variables[3].constraint = pair.bare_variables[3].constraint = keras.constraints.NonNeg()
    step = tf.function(pair.apply)
    for seed in range(3):
        step(many_gradients(seed))
        pair.apply_bare(many_gradients(seed))
    pair.assert_alike()


@for_every_keras()
def test_variables_without_gradients_or_left_out_are_left_alone(keras: ModuleType) -> None:
    pair, grads = Pair(lambda: optimizer(keras), lambda: many_variables(keras)), [None, *many_gradients(0)[1:]]
    with pytest.warns(UserWarning, match="Gradients do not exist") if hasattr(pair.opt, "apply") else nullcontext():
        tf.function(pair.apply)(grads)
        pair.apply_bare(grads)
    pair.assert_alike()
    tf.function(lambda: apply(pair.opt, pair.variables[1:2], [tf.ones([3])]))()
    pair.bare.apply_gradients([(tf.ones([3]), pair.bare_variables[1])])
    pair.assert_alike()


@pytest.mark.parametrize(("compiled", "place", "shape"), [(True, 0, [4]), (True, 2, [1, 4]), (False, 0, [])])
@pytest.mark.parametrize("name", ["Adam", "SGD"])
@for_every_keras()
def test_gradient_of_another_shape_than_its_variable_does_what_it_does_without_a_wrapper(
    keras: ModuleType, name: str, shape: list[int], place: int, compiled: bool
) -> None:
    grads = [tf.fill(shape if index == place else [4, 4], index + 1.0) for index in range(4)]
    pair = Pair(lambda: optimizer(keras, name), lambda: [variable(keras, np.ones([4, 4])) for _ in grads])
    step = tf.function(pair.apply) if compiled else pair.apply
    if name == "SGD" and keras.__version__.startswith("3."):
        # This optimizer does not broadcast.
        for each in (step, pair.apply_bare):
            with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"must be equal|Cannot update"):
                each(grads)
        return
    for _ in range(3):
        step(grads)
        pair.apply_bare(grads)
    pair.assert_alike()


@pytest.mark.parametrize(
    ("rounding", "dtype"), [("stochastic", "float32"), ("stochastic", "bfloat16"), ("nearest", "float32")]
)
@_keras_3_alone
def test_half_precision_state_is_rounded_as_without_sharing(keras: ModuleType, rounding: str, dtype: str) -> None:
    # Float32 computes exactly on these, and bfloat16 must round them.
    rng = np.random.default_rng(0)
    fed = [[tf.constant(rng.integers(-2048, 2048, each) / 1024, tf.float32) for each in SHAPES] for _ in range(3)]

    def trained(*, jit_compile: bool) -> tuple[list[Any], list[Any]]:
        inner = optimizer(keras, "SGD", learning_rate=0.5, momentum=0.5)
        half = tfmp.half_state(inner, momentum="bfloat16", rounding=rounding, seed=3)
        opt = tfmp.LossScaleOptimizer(half, tfmp.FixedLossScaleManager(SCALE), jit_compile=jit_compile)
        variables = [variable(keras, np.zeros(shape), dtype=dtype) for shape in SHAPES]
        opt.build(variables)

        def step(grads: list[Any]) -> None:
            apply(opt, variables, grads)

        # A weight in half precision is rounded by numbers that follow from its place: it shares no program.
        assert not jit_compile or num_programs(step, fed[0]) == (4 if dtype == "float32" else 1)
        run = tf.function(step)
        for grads in fed:
            run(grads)
        return values(variables), values(half.variables)

    (weights, slots), (expected, expected_slots) = trained(jit_compile=True), trained(jit_compile=False)
    assert slots == expected_slots
    # XLA of TensorFlow 2.16 applies the momentum as it is before it is rounded to the nearest.
    may_differ = rounding == "nearest" and tf.__version__ < "2.17"
    for weight, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=0, atol=2**-6 if may_differ else 0)


@_keras_3_alone
def test_function_that_is_traced_again_uses_changed_settings(keras: ModuleType) -> None:
    schedule = keras.optimizers.schedules.PolynomialDecay
    inner = keras.optimizers.SGD(schedule(1.0, 10, 1.0), clipvalue=1.0)
    (weight,) = variables = [variable(keras, [0.0])]
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(1), jit_compile=True)
    opt.build(variables)
    for clipvalue, rate, expected in [(1.0, 1.0, -1), (3.0, 1.0, -3), (np.float64(2.0), 0.5, -1)]:
        inner.clipvalue, opt.learning_rate = clipvalue, schedule(rate, 10, rate)
        weight.assign([0.0])
        tf.function(lambda: opt.apply([tf.constant([4.0])], variables))()
        assert values(variables) == [[expected]]


def _large(keras: ModuleType, constraint: Any = None) -> list[Any]:
    layer = keras.layers.Dense(1024, use_bias=False, kernel_initializer="ones", kernel_constraint=constraint)
    layer.build([None, 1024])
    return [layer.kernel]


def _of_shapes(*shapes: list[int]) -> Callable[[ModuleType], list[Any]]:
    return lambda keras: [variable(keras, np.zeros(shape), f"w{place}") for place, shape in enumerate(shapes)]


def _on_two_devices(keras: ModuleType) -> list[Any]:
    variables = []
    for device in tf.config.list_logical_devices("CPU")[:2]:
        with tf.device(device.name):
            variables += _of_shapes([2**20])(keras)
    assert len(variables) == 2
    return variables


def _programs_of_step(opt: Any, variables: list[Any]) -> list[str]:
    opt.build(variables)
    grads = [tf.ones(each.shape) for each in variables]
    return compiled_calls(lambda: opt.apply_gradients(zip(opt.get_unscaled_gradients(grads), variables, strict=True)))


def _own(base: type, call: Any = lambda self, value: value) -> Any:
    return type("Own", (base,), {"__call__": call})


#: Whether the update is compiled: the optimizer, the variables, and the setting. A user's code may do what XLA cannot
#: compile, such as printing; averages that overwrite the variables are a conditional, which would copy them.
_CONDITIONS: dict[str, tuple[bool, Callable[[ModuleType], Any], Callable[[ModuleType], list[Any]], Any]] = {
    "large": (True, lambda k: optimizer(k, "Adam"), _large, "auto"),
    "schedule": (True, lambda k: k.optimizers.SGD(k.optimizers.schedules.CosineDecay(0.1, 10)), _large, "auto"),
    "small": (False, optimizer, kernel_and_bias, "auto"),
    "almost large": (False, optimizer, _of_shapes([2**20 - 1]), "auto"),
    "65 of 2**14 values": (True, optimizer, _of_shapes(*([2**14 + more] for more in range(65))), "auto"),
    "129 of 2**13 values": (False, optimizer, _of_shapes(*([2**13 + more] for more in range(129))), "auto"),
    # They take programs for eight, and for four, three, and one.
    "64 alike": (True, optimizer, _of_shapes(*[[]] * 64), "auto"),
    "59 alike": (False, optimizer, _of_shapes(*[[]] * 59, *([more] for more in range(1, 6))), "auto"),
    "two devices": (False, optimizer, _on_two_devices, "auto"),
    "jit_compile=True": (True, optimizer, kernel_and_bias, True),
    "jit_compile=False": (False, optimizer, _large, False),
    "own schedule": (
        False,
        lambda k: k.optimizers.SGD(_own(k.optimizers.schedules.LearningRateSchedule, lambda self, step: 0.5)()),
        _large,
        "auto",
    ),
    "own optimizer": (False, lambda k: _own(k.optimizers.SGD)(0.5), _large, "auto"),
    "own constraint": (False, optimizer, lambda k: _large(k, _own(k.constraints.Constraint)()), "auto"),
    "averages": (False, lambda k: optimizer(k, use_ema=True, ema_overwrite_frequency=2), _large, "auto"),
    "own function": (False, lambda k: optimizer(k, learning_rate=lambda: 0.5), _large, "auto"),
    "accumulation": (False, lambda k: optimizer(k, gradient_accumulation_steps=2), _large, "auto"),
    "many optimizers": (False, lambda k: optimizer(k, "MultiOptimizer"), _large, "auto"),
}
_OF_KERAS_3 = {"own function", "accumulation", "many optimizers"}


@pytest.mark.parametrize("condition", _CONDITIONS)
@for_every_keras()
def test_update_is_compiled_on_demand_or_where_it_saves_time_and_keras_runs_alone(
    keras: ModuleType, condition: str
) -> None:
    if condition in _OF_KERAS_3 and keras.__version__.startswith("2."):
        pytest.skip("Keras 2 has not got it")
    expected, make, variables_of, jit_compile = _CONDITIONS[condition]
    opt = tfmp.LossScaleOptimizer(make(keras), tfmp.FixedLossScaleManager(8), jit_compile=jit_compile)
    assert bool(_programs_of_step(opt, variables_of(keras))) is expected


@for_every_keras()
def test_variables_that_have_a_gradient_decide_whether_the_program_is_compiled(
    keras: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So many small ones, none like another, that compiling the update of all would take longer than it saves.
    large = variable(keras, np.zeros([1024, 1024]))
    variables = [large, *(variable(keras, np.ones([index]), f"small_{index}") for index in range(64))]
    opt, scaler, small = optimizer(keras), tfmp.GradScaler(8), [tf.ones([index]) for index in range(64)]
    opt.build(variables)

    def step(given: list[Any]) -> None:
        scaler.scale(tf.constant(1.0))
        scaler.step(opt, zip(given, variables, strict=True))
        scaler.update()

    grad = tf.zeros([1024, 1024])
    for given, is_compiled in [([grad, *[None] * 64], True), ([grad, *small], False), ([None, *small], False)]:
        assert bool(compiled_calls(lambda given=given: step(given))) is is_compiled
    # Horovod takes no part in it.
    run_horovod(monkeypatch, 1)
    assert compiled_calls(lambda: step([grad, *[None] * 64]))


@pytest.mark.parametrize("jit_compile", ["auto", True])
@_keras_3_alone
def test_fit_under_the_debugger_warns_once_that_the_update_is_not_compiled(
    keras: ModuleType, jit_compile: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    def wrapped(jit_compile: Any) -> Any:
        inner = optimizer(keras, learning_rate=2.0**-10)
        return tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE), jit_compile=jit_compile)

    def fitted(opt: Any) -> list[np.ndarray]:
        layer = keras.layers.Dense(1024, kernel_initializer="ones")
        model = keras.Sequential([keras.Input([1024]), layer, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(opt, loss="mse", jit_compile=False)
        # Batches of two sizes, so that the step is traced twice.
        model.fit(np.full([6, 1024], 2.0**-10), np.zeros([6, 1]), batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    expected = fitted(optimizer(keras, learning_rate=2.0**-10))
    tf.debugging.enable_check_numerics()
    request.addfinalizer(tf.debugging.disable_check_numerics)
    # Nothing is said where nothing would be compiled.
    assert not _programs_of_step(wrapped("auto"), kernel_and_bias(keras))
    assert not _programs_of_step(wrapped(False), _large(keras))
    assert "not compiled" not in caplog.text
    for weights, others in zip(fitted(wrapped(jit_compile)), expected, strict=True):
        np.testing.assert_allclose(weights, others, rtol=1e-5)
    (message,) = [record.message for record in caplog.records if "not compiled" in record.message]
    assert message.startswith("the update of the variables is not compiled, as with jit_compile=False")


@_keras_3_alone
def test_graph_of_a_step_never_calls_python_and_branches_twice(keras: ModuleType) -> None:
    """At each branch TensorFlow's executor waits for a boolean from the device, so there must be few of them."""
    opt, variables = wrap(optimizer(keras, "Adam")), _large(keras)
    opt.build(variables)
    nodes = operations(lambda: opt.apply([tf.ones(each.shape) for each in variables], variables))
    branching = {"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"}
    assert not [node.name for node in nodes if "PyFunc" in node.op]
    assert len([node.name for node in nodes if node.op in branching]) == 2
