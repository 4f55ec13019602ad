"""Optimizers of Keras 3 whose slots, or weights, are in half precision: their numbers are those in float32.

The last tests are about what is refused.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from half_training import adam, fitted, least_squares_error, slot_types
from kerases import (
    assert_trains_as,
    dense_model,
    gradients,
    kernel_and_bias,
    optimizer,
    optimizer_names,
    values,
    wrap,
)

import tfmp

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

#: MultiOptimizer has no slots itself, and Keras 3.5 does not make the accumulator of Adagrad as one.
_WITHOUT_SLOTS = {"MultiOptimizer", *(["Adagrad"] if keras.__version__.startswith("3.5.") else [])}
_NAMES = [name for name in optimizer_names(keras.optimizers) if name not in _WITHOUT_SLOTS]

#: Settings of the base class of all optimizers.
_SETTINGS: list[dict[str, Any]] = [
    *({name: 0.5} for name in ("weight_decay", "clipnorm", "global_clipnorm")),
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize(
    ("name", "jit_compile", "settings"),
    [
        *(pytest.param(name, False, {}, id=f"{name}-graph") for name in _NAMES),
        *(pytest.param(name, True, {}, id=f"{name}-xla") for name in _NAMES),
        *(pytest.param("Adam", False, settings, id=f"Adam-graph-{next(iter(settings))}") for settings in _SETTINGS),
    ],
)
def test_training_is_that_with_float32_state_but_for_rounding(
    name: str, jit_compile: bool, settings: dict[str, Any]
) -> None:
    options = {"learning_rate": 0.125, **settings} | ({"momentum": 0.9} if name == "SGD" else {})
    plain, half = optimizer(keras, name, **options), tfmp.half_state(optimizer(keras, name, **options))
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
    # By default all slots are in half precision but these, of which Keras' optimizers compute in another way.
    float32 = {"momentum"} if name == "ScheduleFreeAdamW" else {"average", "gradient_accumulator"}
    assert {slot for slot, dtype in slot_types(half).items() if dtype != "bfloat16"} <= float32
    assert isinstance(half, getattr(keras.optimizers, name))
    half.learning_rate = 0.5
    assert float(half.learning_rate) == 0.5


@pytest.mark.parametrize("rate", [0.5, keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)], ids=["0.5", "decay"])
def test_optimizer_that_is_passed_stays_as_it_is_and_its_settings_hold_for_the_other(rate: Any) -> None:
    variables = kernel_and_bias(keras)
    passed = keras.optimizers.Adam(rate, weight_decay=0.5)
    passed.iterations.assign(3)
    passed.exclude_from_weight_decay([variables[1]])
    passed.of_its_own = keras.Variable(7.0)
    before = dict(vars(passed))
    half = tfmp.half_state(passed, momentum="float16")
    half.apply([tf.zeros([2, 2]), tf.zeros([2])], variables)
    expected = kernel_and_bias(keras)
    decay = 0.5 * (0.5 if rate == 0.5 else 0.0625)
    assert values(variables) == values([expected[0] * (1 - decay), expected[1]])
    assert vars(passed).keys() == before.keys()
    assert [name for name, value in vars(passed).items() if value is not before[name]] == []
    assert (int(passed.iterations), int(half.iterations), passed.built) == (3, 4, False)
    assert 7.0 in values(half.variables)


class _WithRateAndListOfItsOwn(keras.optimizers.SGD):  # type: ignore[misc] # Keras has no types
    def __init__(self) -> None:
        super().__init__(learning_rate=self.rate, momentum=0.5)
        self.slow: list[Any] = []
        self.count = tf.Variable(7)

    def rate(self) -> tf.Tensor:
        return 1.0 / (1.0 + tf.cast(self.iterations.value, tf.float32))

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.slow += [self.add_variable_from_reference(each, name="slow") for each in variables]


def test_methods_and_lists_of_a_users_class_are_of_the_optimizer_that_has_them(tmp_path: Path) -> None:
    variables, passed = kernel_and_bias(keras), _WithRateAndListOfItsOwn()
    half = tfmp.half_state(passed)
    half.apply([tf.zeros([2, 2]), tf.zeros([2])], variables)
    assert (float(half.learning_rate), float(passed.learning_rate)) == (0.5, 1)
    assert (len(half.slow), len(passed.slow), len(passed.variables)) == (
        2,
        0,
        len(_WithRateAndListOfItsOwn().variables),
    )
    saved = tf.train.list_variables(tf.train.Checkpoint(half=half).save(tmp_path / "half"))
    assert [name for name, _ in saved if name.startswith("half/count/")]


class _WithSlotsOfItsOwn(keras.optimizers.SGD):  # type: ignore[misc] # Keras has no types
    def build(self, variables: Any) -> None:
        super().build(variables)
        self.slow_weights = [self.add_variable_from_reference(each, name="slow") for each in variables]


@pytest.mark.parametrize(
    ("make", "settings", "expected"),
    [
        (keras.optimizers.Adam, {"momentum": "float16"}, {"momentum": "float16", "velocity": "float32"}),
        # The setting is the optimizer's own, not that of its class.
        (keras.optimizers.Adam, {"momentum": "bfloat16"}, {"momentum": "bfloat16", "velocity": "float32"}),
        (lambda: _WithSlotsOfItsOwn(momentum=0.9), {}, {"momentum": "bfloat16", "slow": "float32"}),
        (
            lambda: keras.optimizers.RMSprop(momentum=0.5, centered=True),
            {},
            {"velocity": "float32", "momentum": "bfloat16", "average_gradient": "float32"},
        ),
        # Keras builds the optimizer of a model without weights, too.
        (keras.optimizers.Adam, {}, {}),
    ],
    ids=["one-slot", "other-type", "unknown-names", "centered-RMSprop", "no-weights"],
)
def test_slots_have_the_types_that_were_asked_for(make: Any, settings: dict[str, str], expected: Any) -> None:
    opt = tfmp.half_state(make(), **settings)
    opt.build(kernel_and_bias(keras) if expected else [])
    assert slot_types(opt) == expected


def _decaying(name: str, rate: float, **settings: Any) -> Any:
    """Make an optimizer whose learning rate is halved every 250 steps."""
    return optimizer(keras, name, learning_rate=keras.optimizers.schedules.ExponentialDecay(rate, 250, 0.5), **settings)


@pytest.mark.parametrize(
    ("name", "rate", "options", "settings"),
    [
        *(("SGD", 0.02, {"momentum": 0.9}, {"momentum": dtype}) for dtype in ("float16", "bfloat16")),
        ("Adam", 0.05, {}, {"momentum": "float16"}),
        ("Adam", 0.05, {}, {}),
        ("RMSprop", 0.02, {"momentum": 0.5, "centered": True}, {}),
        ("Adagrad", 0.5, {}, {}),
    ],
)
def test_half_state_ends_within_a_tenth_of_the_error(
    name: str, rate: float, options: dict[str, Any], settings: dict[str, str]
) -> None:
    if name in _WITHOUT_SLOTS:
        pytest.skip("Keras 3.5 does not make the accumulator of Adagrad as a slot")
    exact = least_squares_error(keras, _decaying(name, rate, **options), noise=0.1)
    half = tfmp.half_state(_decaying(name, rate, **options), **settings)
    assert least_squares_error(keras, half, noise=0.1) < 1.1 * exact < 0.5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_half_precision_end_nearer_with_stochastic_rounding(dtype: str) -> None:
    nearest = least_squares_error(keras, _decaying("SGD", 0.02, momentum=0.9), dtype)
    half = tfmp.half_state(_decaying("SGD", 0.02, momentum=0.9), momentum=dtype, rounding="stochastic")
    assert least_squares_error(keras, half, dtype) < nearest / 3


def test_second_moment_follows_the_squares_of_gradients_over_many_steps() -> None:
    variable, opt = keras.Variable(np.zeros(4096, np.float32)), tfmp.half_state(keras.optimizers.Adam(0.0, beta_2=0.99))
    opt.build([variable])

    @tf.function(jit_compile=True)
    def train() -> None:
        for step in tf.range(600):
            opt.apply([1e-3 * tf.random.stateless_normal([4096], [step, 0])], [variable])

    train()
    velocity = next(slot for slot in opt.variables if slot.name.endswith("velocity"))
    assert np.float32(velocity.numpy()).mean() == pytest.approx(1e-6, rel=0.02)


@pytest.mark.parametrize("way", ["eager", "function", "xla"])
def test_skipped_step_leaves_slots_and_random_numbers_as_they_were(way: str) -> None:
    run = None if way == "eager" else functools.partial(tf.function, jit_compile=way == "xla", autograph=False)
    assert_trains_as(adam(keras), wrap(adam(keras)), keras, run)


def test_replicas_hold_equal_state(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        plain = keras.optimizers.Adam(0.125)
    half = tfmp.half_state(plain)
    with two_replicas.scope():
        trained = dense_model(keras, wrap(half))
    fitted(trained, epochs=3)
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


_ROWS = tf.IndexedSlices(
    tf.constant([[1.0, 2.0], [0.5, 4.0], [0.25, 1.0]]), tf.constant([1, 0, 1]), tf.constant([2, 2])
)
_BINARY = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)

#: What an optimizer of the user's may do with a slot `m`: it returns a step, or assigns.
_USES: dict[str, Any] = {
    **{f"m {each.__name__} g": lambda opt, m, g, each=each: each(m, g) for each in _BINARY},
    **{f"2 {each.__name__} m": lambda opt, m, g, each=each: each(2.0, m) for each in _BINARY},
    "comparisons": lambda opt, m, g: tf.add_n(
        [2.0**at * tf.cast(each, tf.float32) for at, each in enumerate([m < 1.0, m <= 1.0, m > 1.0, m >= 1.0])]
    ),
    "m + m, -m, abs, row": lambda opt, m, g: (m + m) - abs(-m) + m[0],
    "tensor": lambda opt, m, g: tf.sqrt(tf.convert_to_tensor(m) ** 2) + tf.zeros(m.shape, m.dtype),
    **{
        f"{name} {kind}": lambda opt, m, g, name=name, value=value: getattr(opt, name)(m, value)
        for name in ("assign", "assign_add", "assign_sub")
        for kind, value in {"dense": tf.constant([[1.0, 2.0], [3.0, 4.0]]), "sparse": _ROWS}.items()
        # TensorFlow assigns to a row that is named twice in any order.
        if (name, kind) != ("assign", "sparse")
    },
    "assign row": lambda opt, m, g: opt.assign(
        m, tf.IndexedSlices(tf.constant([[7.0, 8.0]]), tf.constant([1]), [2, 2])
    ),
}


@pytest.mark.parametrize("use", _USES.values(), ids=_USES)
def test_slot_is_used_as_a_variable_in_float32(use: Any) -> None:
    class Own(keras.optimizers.Optimizer):
        def build(self, variables: list[Any]) -> None:
            super().build(variables)
            self.means = [self.add_variable_from_reference(variable, "momentum") for variable in variables]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            mean = self.means[self._get_variable_index(variable)]
            self.assign(mean, 0.5 * mean + gradient)
            step = use(self, mean, gradient)
            step = mean if step is None else step
            self.assign_sub(variable, step * keras.ops.cast(learning_rate, variable.dtype))

    trained = []
    for opt in (Own(0.5), tfmp.half_state(Own(0.5), momentum="bfloat16")):
        variable = keras.Variable(np.float32([[1, 2], [3, 4]]))
        for _ in range(2):
            # All numbers here are also numbers of bfloat16.
            opt.apply([tf.constant([[1.0, -2.0], [0.5, 4.0]])], [variable])
        trained.append([variable.numpy(), np.float32(opt.variables[-1].numpy())])
    np.testing.assert_array_equal(trained[1], trained[0])
    assert opt.variables[-1].dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_gradients_are_applied(dtype: str) -> None:
    tables = [keras.Variable(np.ones([4, 2], np.float32), dtype=each) for each in ("float32", dtype)]
    for opt, table in zip((keras.optimizers.Adam(0.125), adam(keras)), tables, strict=True):
        values = tf.constant([[1.0, 2.0], [0.5, 0.5]], table.dtype)
        for _ in range(3):
            opt.apply([tf.IndexedSlices(values, tf.constant([3, 1]), tf.constant([4, 2]))], [table])
    found = np.float32(tables[1].numpy())
    np.testing.assert_allclose(found, tables[0].numpy(), atol=0.01 if dtype == "float32" else 0.03)
    assert found[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_decays_and_steps_of_half_weights_are_right_in_the_mean(dtype: str) -> None:
    weight, excluded = (keras.Variable(np.ones(4096, np.float32), dtype=dtype) for _ in range(2))
    decaying = tfmp.half_state(keras.optimizers.SGD(0.01, weight_decay=0.01), rounding="stochastic")
    decaying.exclude_from_weight_decay([excluded])
    decaying.build([weight, excluded])
    for _ in range(100):
        decaying.apply([tf.zeros([4096], dtype)] * 2, [weight, excluded])
    assert np.float32(weight.numpy()).mean() == pytest.approx((1 - 1e-4) ** 100, abs=3e-4)
    assert set(excluded.numpy().tolist()) == {1.0}
    # A step of an eighth of the distance between two numbers of bfloat16, by default and without slots.
    tfmp.half_state(keras.optimizers.SGD(0.5)).apply([tf.fill([4096], tf.constant(2.0**-10, dtype))], [excluded])
    assert np.float32(excluded.numpy()).mean() == pytest.approx(1 - 2.0**-11, abs=2.0**-13)


@pytest.mark.parametrize("way", ["plain", "accumulation", "MultiOptimizer", "GradScaler"])
def test_gradients_of_half_weights_are_unscaled_in_float32(way: str) -> None:
    weight = keras.Variable(np.ones(4, np.float32), dtype="float16")
    # Of a true size of 2**-30, which is 0 in float16.
    grad = tf.fill([4], tf.constant(2.0**-20, tf.float16))
    opt = tfmp.half_state(keras.optimizers.Adam(2.0**-5, epsilon=1e-16), rounding="stochastic")
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


@pytest.mark.parametrize(
    ("name", "options", "grad"),
    [
        *((name, {"learning_rate": 0.01}, 1e-4) for name in _NAMES if name not in {"Muon", "Nadam"}),
        # The squares of these gradients are beyond the range of float16.
        *(("SGD", {setting: 0.5}, 400.0) for setting in ("global_clipnorm", "clipnorm", "clipvalue")),
    ],
)
def test_every_optimizer_trains_half_weights_in_float32(name: str, options: dict[str, Any], grad: float) -> None:
    if not keras.__version__.startswith("3.15") and name in {"Adagrad", "Ftrl", "Adafactor"}:
        pytest.skip(f"Keras {keras.__version__} makes variables of {name} in the type of the weights")
    opts = tfmp.half_state(optimizer(keras, name, **options), rounding="stochastic"), optimizer(keras, name, **options)
    weights = [keras.Variable(np.ones([32, 32], np.float32), dtype=dtype) for dtype in ("float16", "float32")]
    for opt, weight in zip(opts, weights, strict=True):
        for _ in range(5):
            opt.apply([tf.fill([32, 32], tf.cast(grad, weight.dtype))], [weight])
    found, expected = (np.float64(weight.numpy()).mean() for weight in weights)
    assert found == pytest.approx(expected, abs=0.05 * abs(expected - 1) + 1e-4)


_ALL_PARTS = {"RightShift", "Sqrt", "AssignVariableOp"}  # of the rounding, of Adam and of what is stored


@pytest.mark.parametrize(
    ("size", "settings", "compiled"),
    [
        pytest.param(1024, {}, _ALL_PARTS, id="large update"),
        pytest.param(4, {"jit_compile": False}, {"RightShift"}, id="jit_compile=False"),
        pytest.param(4, None, {"RightShift"}, id="bare optimizer"),
    ],
)
def test_large_update_is_one_program_of_xla_and_otherwise_rounding_alone_is_compiled(
    size: int, settings: Any, compiled: set[str]
) -> None:
    weight, opt = keras.Variable(np.ones([size, size], np.float32)), adam(keras)
    if settings is not None:
        opt = tfmp.LossScaleOptimizer(opt, tfmp.FixedLossScaleManager(1.0), **settings)
        opt.scale_loss(tf.constant(1.0))
    opt.build([weight])
    step = tf.function(lambda: opt.apply([tf.ones([size, size])], [weight]), autograph=False)
    graph = step.get_concrete_function().graph.as_graph_def()
    functions = {function.signature.name: function.node_def for function in graph.library.function}
    nodes = itertools.chain(graph.node, *functions.values())
    programs = [functions[node.attr["f"].func.name] for node in nodes if "_XlaMustCompile" in node.attr]
    assert {node.op for program in programs for node in program} & _ALL_PARTS == compiled
    # Those of a large update are in one.
    assert any(compiled <= {node.op for node in program} for program in programs)


def test_step_after_an_error_in_a_trace_is_what_it_is_without_the_error() -> None:
    def trained(*, fails: bool) -> list[Any]:
        weights = [keras.Variable(np.full([4, 4], number, np.float32)) for number in range(4)]
        opt = tfmp.LossScaleOptimizer(adam(keras), tfmp.FixedLossScaleManager(8), jit_compile=True)
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


def _built() -> Any:
    built = keras.optimizers.SGD(momentum=0.9)
    built.build(kernel_and_bias(keras))
    return built


def _sgd(momentum: float = 0.9, **options: Any) -> Any:
    return keras.optimizers.SGD(0.5, momentum=momentum, **options)


_MOMENTUM, _STOCHASTIC = {"momentum": "bfloat16"}, {"rounding": "stochastic"}

#: What makes an optimizer, the settings of its state, and the error.
_REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (lambda: "adam", _MOMENTUM, "optimizer must be an optimizer of Keras 3, got 'adam'"),
    (tf.compat.v1.train.AdamOptimizer, _MOMENTUM, "of type AdamOptimizer"),
    (lambda: adam(keras), _MOMENTUM, "HalfStateAdam has half-precision state already"),
    (lambda: wrap(keras.optimizers.Adam()), _MOMENTUM, "call tfmp.half_state with the one"),
    (lambda: optimizer(keras, "MultiOptimizer"), _MOMENTUM, "each of the optimizers inside"),
    (_built, _MOMENTUM, "the SGD is built already, with slots in float32"),
    (lambda: optimizer(keras, "ScheduleFreeAdamW"), _MOMENTUM, "holds weights"),
    *(
        (lambda: keras.optimizers.RMSprop(centered=True), settings, message)
        for settings, message in [
            ({"rounding": "nearest"}, "there is nothing to keep in half precision: name the optimizer's slots"),
            ({"momentum": "float16", "rounding": "up"}, 'rounding must be "nearest" or "stochastic", got \'up\'.'),
            ({"momentum": "float32"}, 'momentum must be "float16" or "bfloat16", got \'float32\'.'),
            ({"velocity": "bfloat16"}, r"velocity='bfloat16' needs rounding='stochastic': a step changes"),
            ({"velocity": "float16"}, r"velocity='float16' is not possible: .* pass velocity='bfloat16'"),
            ({"velocity": "float16", **_STOCHASTIC}, r"velocity='float16' is not possible"),
            ({"accumulator": "bfloat16"}, r"accumulator='bfloat16' needs rounding='stochastic'"),
            ({"average": "bfloat16", **_STOCHASTIC}, "average cannot be kept .*: it is the moving average"),
            ({"average_gradient": "bfloat16", **_STOCHASTIC}, "average_gradient cannot be kept .*: RMSprop"),
            ({"gradient_accumulator": "bfloat16", **_STOCHASTIC}, r"or accumulate by tfmp\.LossScaleOptimizer"),
            (
                {"velocity": "bfloat16", **_STOCHASTIC},
                "velocity of RMSprop with centered=True is an average from which",
            ),
            *(({"seed": seed}, "seed must be") for seed in (-1, 0.5, "1", None)),
        ]
    ),
]


@pytest.mark.parametrize(("make", "settings", "message"), _REFUSED)
def test_what_cannot_have_half_state_is_refused(
    make: Callable[[], Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tfmp.half_state(make(), **settings)


@pytest.mark.parametrize(
    ("dtype", "make", "settings", "message"),
    [
        ("float32", lambda: _sgd(0.0), _MOMENTUM, "the optimizer made no slot momentum, only none: name those"),
        ("float32", lambda: _sgd(0.0), {}, "made no slot that can be in half precision, only none"),
        ("bfloat16", _sgd, _MOMENTUM, "in bfloat16, and most steps would be lost .* pass rounding='stochastic'"),
        ("bfloat16", lambda: _sgd(use_ema=True), _STOCHASTIC, "for which use_ema=True does not work"),
        ("bfloat16", lambda: _sgd(gradient_accumulation_steps=2), _STOCHASTIC, "gradient_accumulation_steps=2 does"),
        ("bfloat16", lambda: optimizer(keras, "Nadam"), _STOCHASTIC, "keeps .* in the type of the weights itself"),
        ("bfloat16", lambda: optimizer(keras, "Muon"), _STOCHASTIC, "decays in its own"),
    ],
)
def test_what_would_not_train_is_refused_each_time(
    dtype: str, make: Any, settings: dict[str, str], message: str
) -> None:
    opt = tfmp.half_state(make(), **settings)
    weight = keras.Variable(np.ones([4, 4], np.float32), dtype=dtype)
    with pytest.raises(ValueError, match="not built and has no slots yet"):
        opt.state_bytes()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            opt.apply([tf.ones([4, 4], dtype)], [weight])
        assert not opt.built
