"""What `tfmp.LossScaleOptimizer` refuses, around optimizers of every kind; each error says what to do."""

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, gradients, kernel_and_bias, kinds, optimizer, skip_before, take_step, values, wrap
from stand_ins import run_horovod

import tfmp

tf1 = tf.compat.v1


class _Kind(NamedTuple):
    """A kind of optimizers: of TensorFlow 1, of a Keras, or legacy ones."""

    keras: Any
    make: Callable[..., Any]

    def wrap(self, *arguments: Any, **settings: Any) -> Any:
        return tfmp.LossScaleOptimizer(self.make(0.5), *arguments, **settings)

    def fixed(self, **settings: Any) -> Any:
        return self.wrap(tfmp.FixedLossScaleManager(8), **settings)

    def own(self, inner: Any) -> Any:
        return self.keras.mixed_precision.LossScaleOptimizer(inner)

    def wrap_own(self) -> Any:
        return tfmp.LossScaleOptimizer(self.own(self.make()))


#: By a letter: those of TensorFlow 1, of Keras 3, of Keras 2, and legacy ones of Keras 2.
_KINDS = {"1": {"tf1": _Kind(None, tf1.train.GradientDescentOptimizer)}, "3": {}, "2": {}, "L": {}}
for _name, (_keras, _optimizers) in kinds().items():
    _letter = "L" if "legacy" in _name else "3" if _name == "keras3" else "2"
    _KINDS[_letter][_name] = _Kind(_keras, _optimizers.SGD)

_Call: TypeAlias = Callable[..., object]


def _step(kind: _Kind, opt: Any) -> None:
    take_step(opt, kernel_and_bias(kind.keras), [tf.ones([2, 2]), tf.ones([2])])


def _manager_of_another(kind: _Kind, bad: str) -> object:
    manager = tfmp.FixedLossScaleManager(8) if bad == "fixed" else tfmp.ExponentialUpdateLossScaleManager(8, 2)
    kind.wrap(manager)
    return kind.wrap(manager)


def _detector_of_another(kind: _Kind) -> object:
    detector = tfmp.SpikeDetector()
    return kind.fixed(skip_spikes=detector), kind.fixed(skip_spikes=detector)


def _synchronous(kind: _Kind) -> Any:
    return tf1.train.SyncReplicasOptimizer(kind.make(0.5), replicas_to_aggregate=1)


def _aggregating(kind: _Kind, bad: Any) -> object:
    return kind.fixed(is_distributed=True, aggregation_dtype=bad)


def _of_other_variables(kind: _Kind, bad: str) -> None:
    opt, variables = kind.fixed(accumulation_steps=2), kernel_and_bias(kind.keras)
    opt.build(variables)
    given = variables[::-1] if bad == "order" else variables[:1]
    take_step(opt, given, [tf.ones(each.shape) for each in given])


def _accumulating_twice(kind: _Kind, bad: str) -> object:
    inner = optimizer(kind.keras, bad)
    (inner.optimizers[0] if bad == "MultiOptimizer" else inner).gradient_accumulation_steps = 2
    assert tfmp.LossScaleOptimizer(inner, accumulation_steps=1).inner_optimizer is inner
    return tfmp.LossScaleOptimizer(inner, accumulation_steps=4)


def _overwritten(kind: _Kind, bad: str) -> None:
    opt, variables = kind.fixed(accumulation_steps=2), kernel_and_bias(kind.keras)
    variables[1].overwrite_with_gradient = True
    if bad == "built":
        opt.build(variables)
    take_step(opt, variables, gradients(0))


def _too_few(kind: _Kind) -> None:
    kind.wrap().apply(gradients(0)[:1], kernel_and_bias(kind.keras))


_NO_BOOL = ("x", "False", 1, None)
_TOO_MANY = {"initial_scale": 8, "dynamic_growth_steps": 5}
_COUNTING = "iterations_include_skipped_steps"
_OF_KERAS = ("scale_loss", "get_scaled_loss", "get_unscaled_gradients", "apply")


_NO_MANAGER = r'TypeError.*a tfmp\.LossScaleManager, a name such as "dynamic", or a dict, got [^:]*\.$'
_TWO_WAYS = r"TypeError.*got .*: write initial_scale={0} for a dynamic .*, or tfmp\.FixedLossScaleManager\({0}\) for"
_FOR_FIXED = r"ValueError.*tfmp\.FixedLossScaleManager\(scale\)\) for a fixed scale"
_ONE_NAME = "TypeError: opt and inner_optimizer are two names of one argument: give one"
_ONE_DTYPE = 'ValueError: aggregation_dtype must be "float16" or None, got'
_NO_DETECTOR = r"TypeError: skip_spikes must be a tfmp\.SpikeDetector or None.*max_norm"
_BY_OWN = r"(Type|Value)Error.*(scaled twice|already wrapped by a LossScaleOp|cannot wrap another LossScaleOptimizer)"


def _rows(kinds: str, message: str, call: Callable[..., object], *bad: Any) -> list[tuple[str, str, _Call]]:
    """Return a row for each bad value; or one, if none is given: the kinds by their letters, the error, and a call."""
    return [(kinds, message, functools.partial(call, bad=each) if bad else call) for each in bad or [None]]


_REFUSED = [
    # What is wrapped.
    *_rows("132L", "ValueError.*scale the loss twice", lambda k: tfmp.LossScaleOptimizer(k.fixed())),
    *_rows("32", r"ValueError.*already: .* or call tfmp\.LossScaleOptimizer\.from_keras", lambda k: k.wrap_own()),
    *_rows("L", "ValueError.*wrap the optimizer inside", lambda k: k.wrap_own()),
    *_rows("32L", _BY_OWN, lambda k: k.own(k.wrap())),
    *_rows("32", "TypeError: opt is the class SGD: pass an object of it,", lambda k: tfmp.LossScaleOptimizer(k.make)),
    *_rows("L", r"TypeError.*must be a \w+.optimizers.legacy", lambda k: type(k.wrap())(k.keras.optimizers.SGD())),
    *_rows("132L", _ONE_NAME, lambda k: k.wrap(inner_optimizer=k.make(0.5))),
    *_rows("1", "TypeError.*wrap the optimizer inside it", lambda k: tfmp.LossScaleOptimizer(_synchronous(k))),
    *_rows("32", "TypeError.*got .*SGD.* wrap any other by", lambda k: tfmp.LossScaleOptimizer.from_keras(k.make())),
    *_rows("32", "ValueError.*already: use it as it is", lambda k: tfmp.LossScaleOptimizer.from_keras(k.wrap())),
    *_rows("1", "NotImplementedError.*wraps no optimizer of Keras", lambda k: type(k.wrap()).from_config({})),
    # The manager. In Keras 3's own wrapper the two positions behind the optimizer are initial_scale and
    # dynamic_growth_steps; the second argument of Keras 2's is `dynamic`, a boolean.
    *_rows("32L", _NO_MANAGER, lambda k, bad: k.wrap(bad), None, True, 2 + 0j),
    *_rows("1", r"TypeError.*LossScaleManager, .*number.*got", lambda k, bad: k.wrap(bad), None, True),
    *_rows("32L", "TypeError.*class FixedLossScaleManager: pass", lambda k: k.wrap(tfmp.FixedLossScaleManager)),
    *_rows("32L", _TWO_WAYS.format(r"32768\.0"), lambda k: k.wrap(2.0**15, 2000)),
    *_rows("1", "TypeError: is_distributed must be True or False, got 2000", lambda k: k.wrap(2.0**15, 2000)),
    *_rows("32L", "TypeError.*write initial_scale=512 for a dynamic", lambda k: k.wrap(512, initial_scale=8)),
    *_rows("32L", _TWO_WAYS.format("number"), lambda k, bad: k.wrap(bad), np.float32(8), np.array(8.0)),
    *_rows("32L", _TWO_WAYS.format("number"), lambda k, bad: k.wrap(bad(8.0)), tf.constant, tf.Variable),
    *_rows("32", "ValueError.*='log_max' decides the scale by set", lambda k: k.wrap("log_max", initial_scale=8)),
    *_rows("32", "ValueError.*scale is one of dynamic, .*got 'quick'", lambda k: k.wrap("quick")),
    *_rows("32", "ValueError.*initial_scale must be .* at least 1, got 0.5", lambda k: k.wrap(initial_scale=0.5)),
    *_rows("32", "ValueError.*growth_steps must be a whole number from 1", lambda k: k.wrap(dynamic_growth_steps=0)),
    *_rows("32", "ValueError.*in another Keras optimizer already", _manager_of_another, "fixed", "dynamic"),
    *_rows("2", r"ValueError.*write tfmp\.LossScaleOptimizer\(optimizer, tfmp\.Fix", lambda k: k.wrap(dynamic=False)),
    *_rows("2", "ValueError.*pass it as initial_scale, without", lambda k: k.wrap(dynamic=False, **_TOO_MANY)),
    *_rows("3", _FOR_FIXED, lambda k, bad: k.wrap(**bad), {"dynamic": False}, {"loss_scale_factor": 8.0}),
    # Other arguments; those of the inner optimizer are sent there.
    *_rows("32", "ValueError.* of Keras has no arguments: `foo`, `bar`", lambda k: k.wrap(foo=True, bar=3)),
    *_rows("32", r"ValueError.*, got use_ema=True: .*\(SGD\(\.\.\., use_ema=True", lambda k: k.wrap(use_ema=True)),
    *_rows("32", r"ValueError.*got clipnorm=1\.0, momentum=0\.5", lambda k: k.wrap(clipnorm=1.0, momentum=0.5)),
    *_rows("32", r"ValueError.*`inner_optimizer`, got learning_rate=0\.5", lambda k: k.wrap(learning_rate=0.5)),
    *_rows("L", r"ValueError.*LossScaleOptimizer\(SGD\(..., momentum=0.5\)\)", lambda k: k.wrap(momentum=0.5)),
    *_rows("L", "ValueError.*has no arguments: `jit_compile`", lambda k: k.wrap(jit_compile=True)),
    *_rows("132L", "TypeError: is_distributed must be True or F", lambda k, bad: k.wrap(is_distributed=bad), *_NO_BOOL),
    *_rows("1", "TypeError: sparse_as_dense must be True or F", lambda k, bad: k.wrap(sparse_as_dense=bad), *_NO_BOOL),
    *_rows("32L", "TypeError: dynamic must be True or False, got", lambda k, bad: k.wrap(dynamic=bad), *_NO_BOOL),
    *_rows("2L", "TypeError: iterations_.* True or False", lambda k, bad: k.wrap(**{_COUNTING: bad}), *_NO_BOOL),
    *_rows("132", r"TypeError.*must be a tfmp\.OverflowDetector", lambda k, bad: k.wrap(overflow_detector=bad), 65504),
    *_rows("1", "TypeError.*OverflowDetector", lambda k: k.wrap(overflow_detector=tfmp.NonFiniteDetector)),
    *_rows("1", _ONE_DTYPE, _aggregating, "bfloat16", "half precision", 16, True),
    *_rows("1", "ValueError.*='float16' needs is_distributed=True", lambda k: k.wrap(aggregation_dtype="float16")),
    *_rows("32", "ValueError.*True, False or .auto., got", lambda k, bad: k.wrap(jit_compile=bad), "always", 1, None),
    *_rows("32", "ValueError.*nothing distributes: call hvd", lambda k: _step(k, k.wrap(is_distributed=True))),
    *_rows("132L", _NO_DETECTOR, lambda k, bad: k.fixed(skip_spikes=bad), True, 10.0, "auto", tfmp.SpikeDetector),
    *_rows("32L", "ValueError.*used by another optimizer or scaler already", _detector_of_another),
    # Accumulation.
    *_rows("32", "ValueError: accumulation_steps must be a whole n", lambda k: k.wrap(accumulation_steps=0)),
    *_rows("32", "ValueError.*differ from the 2 that the optimizer was built", _of_other_variables, "order", "number"),
    *_rows("3", "ValueError.*=2, and accumulation_steps=4: .*Leave", _accumulating_twice, "SGD", "MultiOptimizer"),
    *_rows("3", r"ValueError.*=2, .*\(float8 scales\).*: bias\. Leave", _overwritten, "built", "not built"),
    # Methods and attributes; a property with an error of its own keeps it.
    *_rows("32L", r"AttributeError.*call record_gradient_norm\(\) before", lambda k: k.wrap().gradient_norm),
    *_rows("32L", r"TypeError: LossScaleOptimizer\.scale_loss\(\) missing 1 required", lambda k: k.wrap().scale_loss()),
    *_rows("32L", r"TypeError: .*Optimizer\.__init__\(\) takes from 1 to 4", lambda k: k.wrap("dynamic", False, 5)),
    *_rows("32L", "AttributeError: a tfmp.LossScaleOptimizer around an optimizer of K", lambda k: k.wrap().minimise),
    *_rows("3", "AttributeError.*FixedLossScaleManager does not count the finite", lambda k: k.fixed().step_counter),
    *_rows("3", "AttributeError.*has no loss_scale_factor", lambda k: k.wrap().loss_scale_factor),
    *_rows("2L", "AttributeError.*apply is Keras 3's", lambda k: k.wrap().apply),
    *_rows("2L", "AttributeError.*(read the state|manager.state_dict)", lambda k: k.wrap().dynamic_counter),
    *_rows("1", "AttributeError.* Keras' optimizers: call minimize", lambda k, bad: getattr(k.wrap(), bad), *_OF_KERAS),
    *_rows("32", "TypeError.*of a floating-point type, got int32", lambda k: k.wrap().scale_loss(tf.constant(1))),
    *_rows("32", "TypeError.*of a floating-point type, got int32", lambda k: k.wrap().get_scaled_loss(tf.constant(1))),
    *_rows("32L", "ValueError.*None", lambda k: k.wrap().apply_gradients([(None, tf.Variable(1.0))])),
    *_rows("L", "TypeError.*complex", lambda k: k.wrap().apply_gradients([(tf.constant(1j), tf.Variable(1j))])),
    *_rows("32", r"ValueError.*has \d+ variables, got 50 values: build it", lambda k: k.wrap().set_weights([1.0] * 50)),
    *_rows("32", "TypeError.*must be a list of values, got 'ab' of type str", lambda k: k.wrap().set_weights("ab")),
    *_rows("3", "ValueError.*not built yet: pass trainable_variables", lambda k: k.wrap().apply(gradients(0))),
    *_rows("3", "ValueError.*there are 1 gradients for 2 variables: pass one for each", _too_few),
    *_rows("3", "ValueError.*the loss is a tensor: pass the tape", lambda k: k.wrap().minimize(tf.constant(1.0), [])),
]


@pytest.mark.parametrize(
    ("kind", "call", "message"),
    [
        pytest.param(kind, call, message, id=f"{name}-{message}", marks=[pytest.mark.graph] * (letter == "1"))
        for letters, message, call in _REFUSED
        for letter in letters
        for name, kind in _KINDS[letter].items()
    ],
)
def test_wrong_call_is_refused_with_advice(kind: _Kind, call: _Call, message: str) -> None:
    if message == _BY_OWN:
        skip_before((3, 10), kind.keras, "its wrapper does not touch the optimizer that it wraps")
    with pytest.raises(Exception) as refused:  # noqa: PT011 - the message tells the type
        call(kind)
    assert re.match(message, f"{refused.type.__name__}: {refused.value}", re.DOTALL), refused.value


@pytest.mark.graph
@pytest.mark.parametrize("bad", [None, 0.1, "adam", object()], ids=lambda bad: type(bad).__name__)
def test_object_that_is_not_an_optimizer_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"opt must be a tf\.compat\.v1\.train\.Optimizer or .*, got "):
        tfmp.LossScaleOptimizer(bad, tfmp.FixedLossScaleManager(8))
    if bad is None:
        with pytest.raises(TypeError, match=r"opt must be a tf\.compat\.v1\.train\.Optimizer or .*, got None"):
            tfmp.LossScaleOptimizer(loss_scale_manager=8)
    with pytest.raises(ValueError, match=r"config must be what get_config of a LossScaleOptimizer .*got name"):
        tfmp.LossScaleOptimizer.from_config({"name": "sgd"})


def test_front_end_is_picked_by_the_wrapped_optimizer_and_can_be_subclassed() -> None:
    class Own(tfmp.LossScaleOptimizer):
        pass

    classes = set()
    for kind in (kind for found in _KINDS.values() for kind in found.values()):
        inner, manager = kind.make(0.5), tfmp.FixedLossScaleManager(8)
        opt = tfmp.LossScaleOptimizer(opt=inner, loss_scale_manager=manager)
        assert (opt.inner_optimizer is inner, opt.manager is manager) == (True, True)
        assert isinstance(opt, tfmp.LossScaleOptimizer)
        front_end = type(opt)
        classes.add(front_end)
        assert getattr(tfmp.optimizers, front_end.__name__) is front_end
        assert not hasattr(opt, "minimise")
        own = type("Own", (front_end,), {})
        assert type(own(kind.make(0.5), tfmp.FixedLossScaleManager(8))) is own
        with pytest.raises(TypeError, match=r"Own subclasses .* such as tfmp\.optimizers\.LossScaleOptimizerV1"):
            Own(kind.make(0.5), tfmp.FixedLossScaleManager(8))
    assert len(classes) == sum(map(len, _KINDS.values()))


@pytest.mark.graph
@for_every_keras()
def test_graph_mode_is_refused(keras: ModuleType) -> None:
    with tf.Graph().as_default(), pytest.raises(ValueError, match="need TensorFlow 2's behaviour, which is disabled"):
        wrap(optimizer(keras))


@for_every_keras("keras3")
def test_horovod_is_refused(keras: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # Horovod 0.28.1 does not support Keras 3, so this test uses a stand-in for the module.
    run_horovod(monkeypatch, 2)
    kind = _KINDS["3"]["keras3"]
    with pytest.raises(NotImplementedError, match=r"not for those of Keras 3: .*MultiWorkerMirroredStrategy"):
        _step(kind, kind.fixed(is_distributed=True))


# The name of the backend is patched, because no other backend is installed; even NumPy's needs JAX.
@for_every_keras("keras3")
def test_other_backend_than_tensorflow_is_refused(keras: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="TensorFlow backend of Keras, got 'jax': set KERAS_BACKEND=tensorflow"):
        wrap(optimizer(keras))


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
    ours = error_of(tfmp.LossScaleOptimizer(optimizer(keras, name), tfmp.FixedLossScaleManager(8), **settings))
    assert type(ours) is type(of_keras)
    assert _advice(ours) == _advice(of_keras)


def _advice(error: Exception) -> str:
    # Keras shows the variable, and graphs add where it is.
    return next(each for each in re.split(r"(?<=\.) ", str(error)) if each.startswith(("This opt", "This usually")))
