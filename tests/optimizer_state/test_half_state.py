"""Optimizers of Keras 3 whose slots are in half precision."""

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from half_training import (
    adam,
    classification,
    decaying_adam,
    decaying_sgd,
    least_squares_error,
    model,
    slots_of,
    state,
)
from kerases import gradients, kernel_and_bias, optimizer, optimizer_names, values, wrap

import tfmp

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

#: Without MultiOptimizer, which has no slots itself.
_NAMES = [name for name in optimizer_names(keras) if name != "MultiOptimizer"]


def _half(name: str, **options: Any) -> Any:
    """Make an optimizer all of whose slots are in bfloat16."""
    built = optimizer(keras, name, **options)
    built.build(kernel_and_bias(keras))
    slots = dict.fromkeys(slots_of(built), "bfloat16")
    if name == "ScheduleFreeAdamW":
        del slots["momentum"]
    return tfmp.half_state(optimizer(keras, name, **options), rounding="stochastic", **slots)


def _built() -> Any:
    built = keras.optimizers.SGD(momentum=0.9)
    built.build(kernel_and_bias(keras))
    return built


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.essential
def test_training_is_that_with_float32_state_but_for_rounding(name: str, jit_compile: bool) -> None:
    options = {"learning_rate": 0.125} | ({"momentum": 0.9} if name == "SGD" else {})
    plain, half = optimizer(keras, name, **options), _half(name, **options)
    expected, variables = kernel_and_bias(keras), kernel_and_bias(keras)
    plain.build(expected)
    half.build(variables)
    first = [variable.numpy() for variable in expected]
    step = tf.function(lambda grads: half.apply(grads, variables), jit_compile=jit_compile, autograph=False)
    for seed in range(10):
        plain.apply(gradients(seed), expected)
        step(gradients(seed))
    for start, one, other in zip(first, variables, expected, strict=True):
        moved = float(np.abs(other.numpy() - start).max())
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=0.05 * moved)
    assert isinstance(half, getattr(keras.optimizers, name))


def _loss_curve(opt: Any) -> np.ndarray:
    """Train a small net on noisy batches, and return the mean loss of each ten steps."""
    rng = np.random.default_rng(0)
    inputs = tf.constant(rng.normal(size=[80, 32, 16]).astype(np.float32))
    targets = tf.tanh(inputs @ rng.normal(size=[16, 1]).astype(np.float32)) + 0.1 * tf.constant(
        rng.normal(size=[80, 32, 1]).astype(np.float32)
    )
    weights = [keras.Variable(0.3 * rng.normal(size=[16, size]).astype(np.float32)) for size in (16, 1)]
    opt.build(weights)

    @tf.function(autograph=False)
    def step(batch: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(batch @ weights[0].value) @ weights[1].value - target) ** 2)
        opt.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
        return loss

    losses = [float(step(batch, target)) for batch, target in zip(inputs, targets, strict=True)]
    return np.reshape(losses, [8, 10]).mean(axis=1)


def _skip_without_slots(name: str) -> None:
    if keras.__version__.startswith("3.5.") and name == "Adagrad":
        pytest.skip("Keras 3.5 does not make the accumulator of Adagrad as a slot")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"learning_rate": 0.05, "momentum": 0.9}),
        ("Adam", {"learning_rate": 0.02}),
        ("RMSprop", {"learning_rate": 0.02, "momentum": 0.5, "centered": True}),
        ("Adagrad", {"learning_rate": 0.1}),
        ("Lion", {"learning_rate": 0.005}),
    ],
)
def test_default_follows_the_curve_of_float32_state(name: str, options: dict[str, Any]) -> None:
    _skip_without_slots(name)
    plain = _loss_curve(optimizer(keras, name, **options))
    half = _loss_curve(tfmp.half_state(optimizer(keras, name, **options)))
    assert plain[-1] < plain[0] / 4
    np.testing.assert_allclose(half, plain, atol=0.005 * plain[0])


@pytest.mark.parametrize("name", _NAMES)
def test_default_keeps_all_slots_that_can_be_in_bfloat16(name: str) -> None:
    _skip_without_slots(name)
    options = {"momentum": 0.9} if name == "SGD" else {}
    by_default, named = tfmp.half_state(optimizer(keras, name, **options)), _half(name, **options)
    config = keras.saving.serialize_keras_object(by_default)
    loaded = keras.saving.deserialize_keras_object(config)
    for opt in (by_default, named, loaded):
        opt.build(kernel_and_bias(keras))
    assert [variable.dtype for variable in by_default.variables] == [variable.dtype for variable in named.variables]
    assert state(loaded) == state(by_default)
    assert "bfloat16" in {variable.dtype for variable in by_default.variables}


def test_default_leaves_slots_of_unknown_names_in_float32() -> None:
    class Own(keras.optimizers.SGD):  # type: ignore[misc] # Keras has no types
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.slow_weights = [self.add_variable_from_reference(each, name="slow") for each in variables]

    opt = tfmp.half_state(Own(momentum=0.9))
    opt.build(kernel_and_bias(keras))
    assert {part.slot: part.dtype for part in opt.state_bytes().slots} == {"momentum": "bfloat16", "slow": "float32"}


def test_centered_rmsprop_keeps_its_velocity_in_float32() -> None:
    opt = tfmp.half_state(keras.optimizers.RMSprop(momentum=0.5, centered=True))
    opt.build(kernel_and_bias(keras))
    slots = {part.slot: part.dtype for part in opt.state_bytes().slots}
    assert slots == {"velocity": "float32", "momentum": "bfloat16", "average_gradient": "float32"}
    with pytest.raises(ValueError, match="velocity of RMSprop with centered=True is an average from which another is"):
        tfmp.half_state(keras.optimizers.RMSprop(centered=True), velocity="bfloat16", rounding="stochastic")


def test_default_without_any_slot_needs_weights_in_half_precision() -> None:
    opt = tfmp.half_state(keras.optimizers.SGD(0.5))
    with pytest.raises(ValueError, match="made no slot that can be in half precision, only none"):
        opt.build(kernel_and_bias(keras))
    opt = tfmp.half_state(keras.optimizers.SGD(0.5))
    weight = keras.Variable(np.ones(4096, np.float32), dtype="bfloat16")
    # A step of an eighth of the distance between two numbers of bfloat16.
    opt.apply([tf.fill([4096], tf.constant(2.0**-10, tf.bfloat16))], [weight])
    assert np.float32(weight.numpy()).mean() == pytest.approx(1 - 2.0**-11, abs=2.0**-13)


def test_slots_have_the_types_that_were_asked_for() -> None:
    opt = tfmp.half_state(keras.optimizers.Adam(), momentum="float16")
    opt.build(kernel_and_bias(keras))
    assert [variable.dtype for variable in opt.variables[2:]] == ["float16", "float32"] * 2
    assert str(opt.state_bytes()).splitlines() == [
        "momentum  float16  12 bytes  -50 %",
        "velocity  float32  24 bytes",
        "total              36 bytes  -25 %",
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [decaying_sgd, decaying_adam])
def test_first_moment_in_half_precision_ends_within_a_tenth_of_the_error(make: Any, dtype: str) -> None:
    exact = least_squares_error(keras, make(keras), noise=0.1)
    assert least_squares_error(keras, tfmp.half_state(make(keras), momentum=dtype), noise=0.1) < 1.1 * exact


def test_whole_state_in_bfloat16_ends_within_a_tenth_of_the_error() -> None:
    exact = least_squares_error(keras, decaying_adam(keras), noise=0.1)
    half = tfmp.half_state(decaying_adam(keras), momentum="bfloat16", velocity="bfloat16", rounding="stochastic")
    assert least_squares_error(keras, half, noise=0.1) < 1.1 * exact


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_half_precision_end_nearer_with_stochastic_rounding(dtype: str) -> None:
    nearest = least_squares_error(keras, decaying_sgd(keras), dtype)
    half = tfmp.half_state(decaying_sgd(keras), momentum=dtype, rounding="stochastic")
    assert least_squares_error(keras, half, dtype) < nearest / 3


def test_second_moment_follows_the_squares_of_gradients() -> None:
    variable = keras.Variable(np.zeros(4096, np.float32))
    opt = tfmp.half_state(
        keras.optimizers.Adam(0.0, beta_2=0.99), momentum="bfloat16", velocity="bfloat16", rounding="stochastic"
    )
    opt.build([variable])

    @tf.function(jit_compile=True)
    def train() -> None:
        for step in tf.range(1000):
            opt.apply([1e-3 * tf.random.stateless_normal([4096], [step, 0])], [variable])

    train()
    velocity = next(slot for slot in opt.variables if slot.name.endswith("velocity"))
    assert np.float32(velocity.numpy()).mean() == pytest.approx(1e-6, rel=0.02)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_skipped_step_leaves_slots_and_random_numbers_as_they_were(jit_compile: bool) -> None:
    def trained(overflows: set[int]) -> list[Any]:
        opt, variables = wrap(adam(keras)), kernel_and_bias(keras)
        opt.build(variables)
        opt.scale_loss(tf.constant(1.0))
        step = tf.function(lambda grads: opt.apply(grads, variables), jit_compile=jit_compile, autograph=False)
        for seed in range(8):
            before = [*values(variables), *state(opt.inner_optimizer)]
            if seed in overflows:
                step([grad * np.inf for grad in gradients(seed)])
                assert [*values(variables), *state(opt.inner_optimizer)] == before
            step([opt.loss_scale * grad for grad in gradients(seed)])
            assert [*values(variables), *state(opt.inner_optimizer)] != before
        return [*values(variables), *state(opt.inner_optimizer)]

    assert trained({2, 3, 6}) == trained(set())


def test_replicas_hold_equal_state(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        trained = model(keras, wrap(adam(keras)))
    points, sides = classification()
    trained.fit(points, sides, batch_size=64, epochs=3, verbose=0)
    opt = trained.optimizer.inner_optimizer
    for variable in (*trained.weights, *opt.variables):
        first, second = (local.numpy() for local in two_replicas.experimental_local_results(variable.value))
        assert first.tobytes() == second.tobytes(), variable.path
    assert {variable.dtype for variable in opt.variables[2:]} == {"bfloat16"}
    assert np.abs(np.float32(opt.variables[2].numpy())).max() > 0


def test_seed_decides_the_random_numbers() -> None:
    def weights(seed: int) -> list[Any]:
        opt, variables = adam(keras, seed=seed), kernel_and_bias(keras)
        for step in range(3):
            opt.apply(gradients(step), variables)
        return values(variables)

    assert weights(0) == weights(0) != weights(1)


def test_grad_scaler_steps_it() -> None:
    scaler, opt, variables = tfmp.GradScaler(init_scale=1024.0), adam(keras), kernel_and_bias(keras)

    @tf.function
    def step(factor: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = scaler.scale(factor * tf.add_n([tf.reduce_sum(variable**2) for variable in variables]))
        grads = tape.gradient(loss, [variable.value for variable in variables])
        scaler.step(opt, zip(grads, variables, strict=True))
        scaler.update()

    step(tf.constant(1.0))
    before = [*values(variables), *state(opt)]
    step(tf.constant(np.inf))
    assert [*values(variables), *state(opt)] == before
    step(tf.constant(1.0))
    assert int(opt.iterations) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.25},
        {"clipnorm": 0.5},
        {"global_clipnorm": 0.5},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.essential
def test_settings_of_the_optimizer_stay(options: dict[str, Any]) -> None:
    plain, half = (keras.optimizers.Adam(0.125, **options) for _ in range(2))
    half = tfmp.half_state(half, momentum="bfloat16", velocity="bfloat16", rounding="stochastic")
    expected, variables = kernel_and_bias(keras), kernel_and_bias(keras)
    for seed in range(6):
        plain.apply(gradients(seed), expected)
        half.apply(gradients(seed), variables)
    np.testing.assert_allclose(variables[0].numpy(), expected[0].numpy(), atol=0.02)
    half.learning_rate = 0.5
    assert float(half.learning_rate) == 0.5


def test_large_update_is_compiled_like_that_with_float32_state() -> None:
    weight = keras.Variable(np.ones([1024, 1024], np.float32))
    opt = wrap(adam(keras))
    opt.build([weight])
    opt.scale_loss(tf.constant(1.0))
    step = tf.function(lambda: opt.apply([tf.ones([1024, 1024])], [weight]), autograph=False)
    assert "AssignVariableOp" in _compiled_ops(step)


def _compiled_ops(step: Any) -> set[str]:
    """Return the kinds of the operations in the programs that XLA compiles in a function of TensorFlow."""
    graph = step.get_concrete_function().graph.as_graph_def()
    functions = {function.signature.name: function.node_def for function in graph.library.function}
    nodes = itertools.chain(graph.node, *functions.values())
    programs = [functions[node.attr["f"].func.name] for node in nodes if "_XlaMustCompile" in node.attr]
    return {node.op for program in programs for node in program}


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "bare"])
def test_rounding_alone_is_compiled_if_the_update_is_not(wrapped: bool) -> None:
    weight = keras.Variable(np.ones([4, 4], np.float32))
    opt: Any = adam(keras)
    if wrapped:
        opt = tfmp.LossScaleOptimizer(opt, tfmp.FixedLossScaleManager(1.0), jit_compile=False)
        opt.scale_loss(tf.constant(1.0))
    opt.build([weight])
    step = tf.function(lambda: opt.apply([tf.ones([4, 4])], [weight]), autograph=False)
    found = _compiled_ops(step)
    assert "RightShift" in found
    assert "Sqrt" not in found
    assert "AssignVariableOp" not in found


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"momentum": "float16"}, "float32"), ({}, "float32"), ({}, "bfloat16"), ({}, "float16")],
    ids=["nearest", "stochastic", "bfloat16 weights", "float16 weights"],
)
def test_compiled_rounding_changes_no_number(
    options: dict[str, str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(in_graph: bool) -> list[bytes]:
        weights = [keras.Variable(np.ones([3, 2], np.float32), dtype=dtype) for _ in range(2)]
        opt = tfmp.half_state(keras.optimizers.AdamW(0.125), **options)
        opt.build(weights)

        def apply(grads: list[tf.Tensor]) -> None:
            opt.apply(grads, weights)

        step = tf.function(apply, autograph=False) if in_graph else apply
        for seed in range(3):
            step([tf.random.stateless_normal([3, 2], [seed, place]) for place in range(2)])
        return [*state(opt), *(np.float32(weight.numpy()).tobytes() for weight in weights)]

    found = [trained(in_graph) for in_graph in (True, False)]
    monkeypatch.setattr("tfmp.optimizer_state.rounded_results.has_apple_gpu", lambda: True)
    assert found == [trained(in_graph) for in_graph in (True, False)]


def test_step_after_an_error_in_a_trace_is_what_it_is_without_the_error() -> None:
    def trained(*, fails: bool) -> list[Any]:
        weights = [keras.Variable(np.full([4, 4], number, np.float32)) for number in range(4)]
        half, manager = tfmp.half_state(keras.optimizers.Adam(0.125)), tfmp.FixedLossScaleManager(8)
        opt = tfmp.LossScaleOptimizer(half, manager, jit_compile=True)
        opt.build(weights)

        def apply(grads: list[tf.Tensor]) -> None:
            opt.scale_loss(tf.constant(1.0))
            opt.apply(grads, weights)

        step, grads = tf.function(apply), [tf.fill([4, 4], float(number)) for number in range(4)]
        if fails:
            with pytest.raises(ValueError, match=r"must be (equal|compatible|broadcastable)"):
                step([tf.ones([5, 7])] * 4)
        apply(grads)
        step(grads)
        return [*values(weights), int(opt.iterations)]

    assert trained(fails=True) == trained(fails=False)


def test_sparse_gradients_are_applied() -> None:
    tables = [keras.Variable(np.ones([4, 2], np.float32)) for _ in range(2)]
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [0.5, 0.5]]), tf.constant([3, 1]), tf.constant([4, 2]))
    plain, half = keras.optimizers.Adam(0.125), adam(keras)
    for opt, table in zip((plain, half), tables, strict=True):
        for _ in range(3):
            opt.apply([rows], [table])
    np.testing.assert_allclose(tables[1].numpy(), tables[0].numpy(), atol=0.01)
    assert tables[1].numpy()[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weight_decay_of_weights_in_half_precision_is_not_lost(dtype: str) -> None:
    weight = keras.Variable(np.ones(4096, np.float32), dtype=dtype)
    excluded = keras.Variable(np.ones(4, np.float32), dtype=dtype)
    opt = tfmp.half_state(keras.optimizers.SGD(0.01, weight_decay=0.01), rounding="stochastic")
    opt.exclude_from_weight_decay([excluded])
    opt.build([weight, excluded])
    for _ in range(100):
        opt.apply([tf.zeros([4096], dtype), tf.zeros([4], dtype)], [weight, excluded])
    assert np.float32(weight.numpy()).mean() == pytest.approx((1 - 1e-4) ** 100, abs=3e-4)
    assert np.float32(excluded.numpy()).tolist() == [1.0] * 4


def test_weights_in_half_precision_decay_once_in_a_step() -> None:
    weight = keras.Variable(np.ones(2, np.float32), dtype="float16")
    opt = tfmp.half_state(keras.optimizers.SGD(0.5, weight_decay=0.5), rounding="stochastic")
    opt.build([weight])
    opt.apply([tf.zeros([2], tf.float16)], [weight])
    assert np.float32(weight.numpy()).tolist() == [0.75, 0.75]


def test_model_at_o3_learns() -> None:
    points, sides = classification()
    sgd = tfmp.half_state(keras.optimizers.SGD(0.5, momentum=0.9), momentum="float16", rounding="stochastic")
    trained = model(
        keras, tfmp.LossScaleOptimizer(sgd, tfmp.FixedLossScaleManager(128.0)), "float16", metrics=["accuracy"]
    )
    trained.fit(points, sides, batch_size=64, epochs=30, verbose=0)
    assert {weight.dtype for weight in trained.weights} == {"float16"}
    assert np.mean((trained.predict(points, verbose=0) > 0) == sides) > 0.95


def _adam_for_half_weights() -> Any:
    return tfmp.half_state(keras.optimizers.Adam(2.0**-5, epsilon=1e-16), rounding="stochastic")


@pytest.mark.parametrize("way", ["plain", "accumulation", "MultiOptimizer", "GradScaler"])
def test_gradients_of_half_weights_are_unscaled_in_float32(way: str) -> None:
    weight = keras.Variable(np.ones(4, np.float32), dtype="float16")
    # Of a true size of 2**-30, which is 0 in float16.
    grad = tf.fill([4], tf.constant(2.0**-20, tf.float16))
    opt = _adam_for_half_weights()
    if way == "MultiOptimizer":
        if not hasattr(keras.optimizers, way):
            pytest.skip(f"needs {way}, which Keras {keras.__version__} does not have")
        opt = keras.optimizers.MultiOptimizer(lambda _, inner=opt: inner)
    if way == "GradScaler":
        scaler = tfmp.GradScaler(init_scale=1024.0)
        scaler.scale(tf.constant(1.0))
        scaler.step(opt, [(grad, weight)])
    else:
        steps = 2 if way == "accumulation" else 1
        wrapped = tfmp.LossScaleOptimizer(opt, tfmp.FixedLossScaleManager(1024.0), accumulation_steps=steps)
        wrapped.build([weight])
        wrapped.scale_loss(tf.constant(1.0))
        for _ in range(steps):
            wrapped.apply([grad], [weight])
    np.testing.assert_allclose(np.float32(weight.numpy()), 1 - 2.0**-5, atol=2.0**-10)


@pytest.mark.parametrize("clipping", ["global_clipnorm", "clipnorm", "clipvalue"])
def test_gradients_of_half_weights_are_clipped_in_float32(clipping: str) -> None:
    weights = [keras.Variable(np.ones(4, np.float32), dtype=dtype) for dtype in ("float32", "float16")]
    for weight in weights:
        opt = tfmp.half_state(keras.optimizers.SGD(0.5, **{clipping: 0.5}), rounding="stochastic")
        # Their squares are beyond the range of float16.
        opt.apply([tf.fill([4], tf.cast(400.0, weight.dtype))], [weight])
    np.testing.assert_allclose(np.float32(weights[1].numpy()), weights[0].numpy(), atol=1e-3)


@pytest.mark.parametrize("name", [name for name in _NAMES if name not in {"Muon", "Nadam"}])
def test_every_optimizer_trains_half_weights_in_float32(name: str) -> None:
    if not keras.__version__.startswith("3.15") and name in {"Adagrad", "Ftrl", "Adafactor"}:
        pytest.skip(f"Keras {keras.__version__} makes variables of {name} in the type of the weights")
    half = tfmp.half_state(optimizer(keras, name, learning_rate=0.01), rounding="stochastic")
    plain = optimizer(keras, name, learning_rate=0.01)
    weights = [keras.Variable(np.ones([32, 32], np.float32), dtype=dtype) for dtype in ("float16", "float32")]
    for _ in range(5):
        half.apply([tf.fill([32, 32], tf.constant(1e-4, tf.float16))], [weights[0]])
        plain.apply([tf.fill([32, 32], 1e-4)], [weights[1]])
    moved = float(np.abs(weights[1].numpy() - 1).mean())
    found = np.float64(weights[0].numpy()).mean()
    assert found == pytest.approx(float(weights[1].numpy().mean()), abs=0.05 * moved + 1e-4)


@pytest.mark.parametrize(
    ("name", "message"), [("Nadam", "keeps .* in the type of the weights itself"), ("Muon", "decays in its own")]
)
def test_optimizers_that_would_compute_in_half_precision_refuse_half_weights(name: str, message: str) -> None:
    opt = tfmp.half_state(optimizer(keras, name), rounding="stochastic")
    with pytest.raises(ValueError, match=message):
        opt.build([keras.Variable(np.ones([4, 4], np.float32), dtype="bfloat16")])
    assert not opt.built


def test_model_without_weights_has_no_slots() -> None:
    opt = adam(keras)
    opt.build([])
    assert opt.state_bytes().bytes == 0


def test_missing_slot_is_an_error_each_time() -> None:
    opt = tfmp.half_state(keras.optimizers.SGD(0.5), momentum="float16")
    for _ in range(2):
        with pytest.raises(ValueError, match="made no slot momentum"):
            opt.apply([tf.ones([2, 2]), tf.ones([2])], kernel_and_bias(keras))


def test_optimizer_that_was_built_by_the_other_object_is_refused() -> None:
    plain, variables = keras.optimizers.SGD(0.5, momentum=0.9), kernel_and_bias(keras)
    half = tfmp.half_state(plain, momentum="float16")
    plain.build(variables)
    with pytest.raises(
        ValueError, match=r"has slots in float32: the one that was passed to tfmp\.half_state was built"
    ):
        half.apply([tf.ones([2, 2]), tf.ones([2])], variables)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: "adam", {"momentum": "float16"}, TypeError, "optimizer must be an optimizer of Keras 3, got 'adam'"),
        (tf.compat.v1.train.AdamOptimizer, {"momentum": "float16"}, TypeError, "of type AdamOptimizer"),
        (lambda: adam(keras), {"momentum": "float16"}, ValueError, "HalfStateAdam has half-precision state already"),
        (
            lambda: wrap(keras.optimizers.Adam()),
            {"momentum": "float16"},
            ValueError,
            "call tfmp.half_state with the one",
        ),
        (
            lambda: optimizer(keras, "MultiOptimizer"),
            {"momentum": "float16"},
            ValueError,
            "each of the optimizers inside",
        ),
        (_built, {"momentum": "float16"}, ValueError, "the SGD is built already, with slots in float32"),
        (lambda: optimizer(keras, "ScheduleFreeAdamW"), {"momentum": "float16"}, ValueError, "holds weights"),
        (keras.optimizers.Adam, {"velocity": "bfloat16"}, ValueError, "needs rounding='stochastic'"),
    ],
)
def test_bad_input_is_refused(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tfmp.half_state(make(), **options)


def test_slot_that_the_optimizer_does_not_make_is_refused_when_it_is_built() -> None:
    opt = tfmp.half_state(keras.optimizers.SGD(), momentum="float16")
    with pytest.raises(ValueError, match="the optimizer made no slot momentum, only none: name those that it has"):
        opt.build(kernel_and_bias(keras))


@pytest.mark.parametrize(
    ("options", "rounding", "message"),
    [
        ({}, "nearest", "is in bfloat16, and most steps would be lost by rounding .* pass rounding='stochastic'"),
        ({"use_ema": True}, "stochastic", "is in bfloat16, for which use_ema=True does not work"),
        ({"gradient_accumulation_steps": 2}, "stochastic", "for which gradient_accumulation_steps=2 does not work"),
    ],
)
def test_half_weights_that_would_not_train_are_refused(options: dict[str, Any], rounding: str, message: str) -> None:
    opt = tfmp.half_state(keras.optimizers.SGD(momentum=0.9, **options), momentum="bfloat16", rounding=rounding)
    weight = keras.Variable(np.ones(2, np.float32), dtype="bfloat16")
    with pytest.raises(ValueError, match=message):
        opt.build([weight])
    assert not opt.built


def test_bytes_are_known_once_it_is_built() -> None:
    with pytest.raises(ValueError, match="not built and has no slots yet"):
        adam(keras).state_bytes()


def test_custom_optimizer_with_python_operators_works() -> None:
    class Descent(keras.optimizers.Optimizer):
        def build(self, variables: list[Any]) -> None:
            super().build(variables)
            self.means = [self.add_variable_from_reference(variable, "momentum") for variable in variables]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            mean = self.means[self._get_variable_index(variable)]
            self.assign(mean, 0.5 * mean + gradient)
            self.assign_sub(variable, mean * keras.ops.cast(learning_rate, variable.dtype))

    opt, variables = tfmp.half_state(Descent(0.5), momentum="bfloat16"), kernel_and_bias(keras)
    for _ in range(2):
        opt.apply([tf.ones([2, 2]), tf.ones([2])], variables)
    assert variables[1].numpy().tolist() == [5 - 0.5 - 0.75, 6 - 0.5 - 0.75]
    assert opt.variables[-1].dtype == "bfloat16"


def test_two_optimizers_of_one_class_have_settings_of_their_own() -> None:
    opts = [tfmp.half_state(keras.optimizers.Adam(), momentum=dtype) for dtype in ("float16", "bfloat16")]
    for opt in opts:
        opt.build(kernel_and_bias(keras))
    assert [opt.variables[2].dtype for opt in opts] == ["float16", "bfloat16"]
    assert type(opts[0]) is type(opts[1])
    assert list(itertools.chain(*(opt.get_config()["slots"].values() for opt in opts))) == ["float16", "bfloat16"]
