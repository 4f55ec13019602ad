"""Under which conditions the update of a Keras 3 optimizer is compiled."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from kerases import (
    SCALE,
    compiles,
    kernel_and_bias,
    optimizer,
    wrap,
)

import tfmp

pytestmark = pytest.mark.essential

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)


def _large(constraint: Any = None) -> list[Any]:
    layer = keras.layers.Dense(1024, use_bias=False, kernel_initializer="ones", kernel_constraint=constraint)
    layer.build([None, 1024])
    return [layer.kernel]


def _wrapped_step(opt: Any, variables: list[Any]) -> Callable[[], None]:
    def step() -> None:
        opt.apply([tf.ones(variable.shape) for variable in variables], variables)

    opt.build(variables)
    return step


def test_large_update_is_compiled_within_a_function_by_default() -> None:
    assert compiles(_wrapped_step(wrap(optimizer(keras, "Adam")), _large()))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert compiles(_wrapped_step(wrap(optimizer(keras, learning_rate=schedule)), _large()))


class _OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        tf.print("step", step)
        return 0.5


class _OwnOptimizer(keras.optimizers.SGD):
    pass


class _OwnConstraint(keras.constraints.Constraint):
    def __call__(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"learning_rate": _OwnSchedule()}, _large),
        ({"learning_rate": lambda: 0.5}, _large),
        ({"gradient_accumulation_steps": 2}, _large),
        ({"use_ema": True, "ema_overwrite_frequency": 2}, _large),
        ({}, lambda: _large(_OwnConstraint())),
        ({}, lambda: kernel_and_bias(keras)),
    ],
    ids=["own schedule", "own function", "accumulation", "averages", "own constraint", "small"],
)
def test_update_with_custom_code_or_small_variables_is_not_compiled_by_default(
    options: dict[str, Any], variables: Callable[[], list[Any]]
) -> None:
    assert not compiles(_wrapped_step(wrap(optimizer(keras, **options)), variables()))


def test_update_by_a_custom_optimizer_is_not_compiled_by_default() -> None:
    assert not compiles(_wrapped_step(wrap(_OwnOptimizer(0.5)), _large()))


def test_jit_compile_false_compiles_nothing() -> None:
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), jit_compile=False)
    assert not compiles(_wrapped_step(opt, _large()))


def test_large_multi_optimizer_is_not_compiled_by_default() -> None:
    assert not compiles(_wrapped_step(wrap(optimizer(keras, "MultiOptimizer")), _large()))


@pytest.fixture
def check_numerics() -> Iterator[None]:
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


@pytest.fixture
def dumped_debug_info(tmp_path: Path) -> Iterator[None]:
    tf.debugging.experimental.enable_dump_debug_info(str(tmp_path), tensor_debug_mode="FULL_HEALTH")
    yield
    tf.debugging.experimental.disable_dump_debug_info()


@pytest.mark.parametrize("jit_compile", ["auto", True])
@pytest.mark.parametrize("debugger", ["check_numerics", "dumped_debug_info"])
def test_fit_under_the_debugger_warns_once_that_the_update_is_not_compiled(
    debugger: str, jit_compile: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    def fitted(opt: Any) -> list[np.ndarray]:
        layer = keras.layers.Dense(1024, kernel_initializer="ones")
        model = keras.Sequential([keras.Input([1024]), layer, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(opt, loss="mse", jit_compile=False)
        # Batches of two sizes, so that the step is traced twice.
        model.fit(np.full([6, 1024], 2.0**-10), np.zeros([6, 1]), batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    expected = fitted(keras.optimizers.SGD(2.0**-10))
    request.getfixturevalue(debugger)
    inner = keras.optimizers.SGD(2.0**-10)
    opt = tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE), jit_compile=jit_compile)
    for weights, others in zip(fitted(opt), expected, strict=True):
        np.testing.assert_allclose(weights, others, rtol=1e-5)
    (record,) = [record for record in caplog.records if record.name == "tfmp"]
    assert record.message.startswith("the update of the variables is not compiled, as with jit_compile=False")


@pytest.mark.usefixtures("check_numerics")
def test_no_warning_about_the_debugger_if_nothing_would_be_compiled(caplog: pytest.LogCaptureFixture) -> None:
    assert not compiles(_wrapped_step(wrap(optimizer(keras)), kernel_and_bias(keras)))
    opt = tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), jit_compile=False)
    assert not compiles(_wrapped_step(opt, _large()))
    assert "not compiled" not in caplog.text


def test_graph_of_a_step_never_calls_python_and_branches_twice() -> None:
    """At each branch TensorFlow's executor waits for a boolean from the device, so there must be few of them."""
    variables = _large()
    step = _wrapped_step(wrap(optimizer(keras, "Adam")), variables)
    graph = tf.function(step).get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    assert not [node.name for node in nodes if "PyFunc" in node.op]
    assert len([node.name for node in nodes if node.op in _BRANCHING]) == 2


#: The types of ops that branch on a boolean.
_BRANCHING = {"If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"}


@pytest.mark.parametrize("jit_compile", ["always", 1, None])
def test_unknown_jit_compile_is_refused(jit_compile: Any) -> None:
    with pytest.raises(ValueError, match=r'jit_compile must be True, False or "auto", got'):
        tfmp.LossScaleOptimizer(optimizer(keras), tfmp.FixedLossScaleManager(8), jit_compile=jit_compile)
