"""What a `GradScaler` refuses, and the message that says what to do; a call that is refused changes nothing."""

import copy
import importlib
import math
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kerases
import pytest
import tensorflow as tf
from scaler_loops import IN_BOTH_WAYS, WAYS, Training, sgd

import tfmp

tf1 = tf.compat.v1


class _Fused:
    def apply_scaled_gradients(self, grads_and_vars: Any, loss_scale: tf.Tensor, finite: tf.Tensor) -> None:
        raise AssertionError


class _Refusing:
    built = False

    def build(self, variables: Any) -> None:
        raise ValueError("no variables today")

    def apply_gradients(self, grads_and_vars: Any) -> None:
        raise NotImplementedError


class _Float8Scale:
    overwrite_with_gradient = True
    assign = None


_KERAS: Any = next(iter(kerases.installed().values()))
_NO_PAIRS = r"must be pairs of a gradient and its variable, .*: pass zip\(grads, variables\)"
_NO_STEPS = r"^steps must be pairs of an optimizer .*it holds {}: pass \[\(optimizer, zip\(grads, variables\)\)"
_ALL_NONE = (
    "every gradient is None: the loss depends on none of the variables.*, or was scaled outside of the tape: comp"
)
_CLASS = "^optimizer is the class GradientDescentOptimizer: pass an object of it, Grad"
_BETWEEN = "^a tfmp.GradScaler is pickled or copied between iterations: call update"
_STATE = {"loss_scale": 8.0, "good_steps": 0, "bad_steps": 0}


def _pairs(t: Training) -> list[tuple[Any, Any]]:
    return list(zip(t.scaled(), t.weights, strict=True))


def _of_keras() -> Any:
    return _KERAS.mixed_precision.LossScaleOptimizer(_KERAS.optimizers.SGD(1.0))


def _by(*make: Callable[[], Any], **kwargs: Any) -> Callable[[Training], Any]:
    """Step with these optimizers together."""
    return lambda t: t.scaler.step_all([(each(), _pairs(t)) for each in make], **kwargs)


def _with(pairs: Callable[[], Any]) -> Callable[[Training], Any]:
    return lambda t: t.scaler.step(sgd(), pairs())


def _part_of_a_window(t: Training) -> None:
    accumulator = tfmp.GradientAccumulator(t.weights, 1)
    accumulator.add([tf.constant(8.0), None], 8.0)
    t.scaler.step(t.optimizer, [(t.unscale(accumulator)[0], t.weights[0])])


def _replay(max_replays: Any, make: Callable[[], Any] | None = None) -> Callable[[Training], Any]:
    return lambda t: tfmp.replay(
        lambda: pytest.fail("the step was taken"), make() if make else t.scaler, max_replays=max_replays
    )


_CALLS: dict[str, tuple[Callable[[Training], Any], type[Exception], str]] = {
    "unscale nothing": (lambda t: t.unscale([]), ValueError, _ALL_NONE),
    "unscale None": (lambda t: t.unscale([None]), ValueError, _ALL_NONE),
    "step with nothing": (_with(list), ValueError, "there are no gradients to step with"),
    "step with None": (_with(lambda: [(None, tf.Variable(1.0))]), ValueError, _ALL_NONE),
    "step with lists": (_with(lambda: [[tf.constant(1.0)]]), TypeError, _NO_PAIRS),
    "step with complex gradients": (
        _with(lambda: [(tf.constant(1j), tf.Variable(1j, name="phase"))]),
        TypeError,
        "^the gradient of phase:0 is of type",
    ),
    "step with float8 scales": (
        _with(lambda: [(tf.constant(1.0), _Float8Scale())]),
        NotImplementedError,
        '"gradient" of a variable is its next value.*tfmp.LossScaleOptimizer',
    ),
    "no steps": (_by(), ValueError, "there is no optimizer to step: pass pairs of an optimizer"),
    "steps of a text": (lambda t: t.scaler.step_all(["ab"]), TypeError, _NO_STEPS.format("'ab' of type str")),
    "steps of one": (lambda t: t.scaler.step_all([("a",)]), TypeError, _NO_STEPS.format(r"\('a',\) of type tuple")),
    "steps of a number": (
        lambda t: t.scaler.step_all(3),
        TypeError,
        r"^steps must be .*, got 3 of type int: pass \[\(",
    ),
    "steps twice": (lambda t: t.scaler.step_all([(t.optimizer, _pairs(t))] * 2), ValueError, "each optimizer once"),
    "argument of TF1 beside Keras": (
        _by(sgd, lambda: _of_keras().inner_optimizer, rate=1, global_step=None),
        TypeError,
        "rate, global_step would be passed to each optimizer, and SGD is not TF1's",
    ),
    "argument of TF1": (_by(_Fused, global_step=None), TypeError, "_Fused.apply_scaled_gradients takes no global_step"),
    "error of an optimizer": (_by(_Refusing), ValueError, "^no variables today"),
    "by a text": (_by(lambda: "sgd"), TypeError, "of Keras or TF1, with apply_gradients, got 'sgd' of type str"),
    "by a class": (_by(lambda: type(sgd())), TypeError, _CLASS),
    "unscale for a class": (lambda t: t.scaler.unscale(type(sgd()), t.scaled()), TypeError, _CLASS),
    "prepare a class": (lambda t: t.scaler.prepare(type(sgd()), t.weights), TypeError, _CLASS),
    "by tfmp's wrapper": (_by(lambda: tfmp.LossScaleOptimizer(sgd(), 8)), ValueError, "the optimizer inside it"),
    "by Keras' wrapper": (_by(_of_keras), ValueError, "is a .*, which scales the loss itself"),
    "by SyncReplicas": (
        _by(lambda: tf1.train.SyncReplicasOptimizer(sgd(), 1)),
        TypeError,
        r"write SyncReplicasOptimizer\(tfmp\.LossScaleOptimizer\(opt, manager\), \.\.\.\)",
    ),
    "scale a number": (lambda t: t.scaler.scale(1), TypeError, "float"),
    "scale a tensor": (lambda t: t.scaler.scale(tf.constant(1)), TypeError, "float"),
    "scale a list": (lambda t: t.scaler.scale([1.0, tf.constant([1])]), TypeError, "float"),
    "0 replays": (_replay(0), ValueError, "max_replays must be a whole number from 1 to .*, got 0"),
    "1.5 replays": (_replay(1.5), ValueError, "max_replays must be a whole number from 1 to .*, got 1.5"),
    "replay of a manager": (
        _replay(1, lambda: tfmp.FixedLossScaleManager(8)),
        TypeError,
        "must be the tfmp.GradScaler or tfmp.LossScaleOptimizer",
    ),
    "replay at a fixed scale": (
        lambda t: tfmp.replay(lambda: None, tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(8)), max_replays=1),
        ValueError,
        "the scale of a FixedLossScaleManager never falls",
    ),
    "replays of a text": (_replay("2"), TypeError, "max_replays must be a number, got '2'"),
    **{
        f"load {state}": (lambda t, state=state: t.scaler.load_state_dict(state), error, message)
        for state, error, message in [
            ({}, ValueError, "keeps loss_scale, good_steps, bad_steps, got nothing"),
            ({"scale": 8.0, "_growth_tracker": 0}, ValueError, "got scale, _growth_tracker: pass what state_dict"),
            (_STATE | {"good_steps": "many"}, TypeError, "good_steps must be a number, got 'many'"),
            (_STATE | {"loss_scale": math.nan}, ValueError, "loss_scale must be finite, got nan"),
            (_STATE | {"loss_scale": -8.0}, ValueError, "loss_scale must be a float32 number of at least 1"),
            (_STATE | {"bad_steps": -1}, ValueError, "bad_steps must be a whole number from 0"),
        ]
    },
    **{
        name: (lambda t, name=name: getattr(t.scaler, name)(2), AttributeError, "cannot be set, .* make a new scaler")
        for name in ("set_growth_factor", "set_backoff_factor", "set_growth_interval")
    },
}

#: The same of calls in an iteration that has begun, which goes on.
_CALLS_LATER: dict[str, tuple[Callable[[Training], Any], type[Exception], str]] = {
    "part of a window": (_part_of_a_window, ValueError, "2 gradients of the accumulator, and step got 1: pass all"),
    **{
        f"set {scale}": (lambda t, scale=scale: (t.step(t.scaled()), t.scaler.update(scale)), error, message)
        for scale, error, message in [
            ("8", TypeError, "loss_scale must be a number, got '8'"),
            (True, TypeError, "loss_scale must be a number, got True"),
            (math.nan, ValueError, "loss_scale must be finite, got nan"),
            (-8, ValueError, "loss_scale must be a float32 number of at least 1, got -8"),
            (2.0**30, ValueError, "loss_scale must not be greater than max_loss_scale, got 1073741824.0"),
        ]
    },
    **{
        f"{way} {made.__name__}": (
            lambda t, way=way, made=made: (WAYS[way](t.unscale)(t.scaled()), made(t.scaler)),
            RuntimeError,
            _BETWEEN,
        )
        for made in (copy.copy, copy.deepcopy, pickle.dumps)
        for way in ("eager", "function")
    },
}


@pytest.mark.parametrize(("name", "later"), [*((name, False) for name in _CALLS), *((n, True) for n in _CALLS_LATER)])
def test_refused_call_changes_nothing(name: str, later: bool) -> None:
    call, error, message = (_CALLS_LATER if later else _CALLS)[name]
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 1000, decr_every_n_nan_or_inf=1, max_loss_scale=1024)
    training = Training(tfmp.GradScaler(manager=manager))
    with pytest.raises(error, match=message):
        call(training)
    assert (training.scaler.state_dict(), int(training.scaler.attempted_steps)) == (_STATE, 0)
    if later:
        training.scaler.update()
        copy.copy(training.scaler)
    before, had_stepped = training.state(), int(training.scaler.applied_steps)
    after = training.run(lambda factor: training.step(training.unscale(training.scaled(factor))), "eager", 1.0)
    assert after == (before[0] - 0.5, before[1] - 0.5, 8, 0)
    # The step before a scale that was refused was applied, and is still counted.
    assert had_stepped == name.startswith("set ") == (before[0] < 1)


_CONSTRUCTED: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((), {"init_scale": 0.5}, ValueError, r"init_scale \(init_loss_scale\) must be a float32 number of at least 1"),
    ((), {"growth_factor": 1}, ValueError, r"growth_factor \(incr_ratio\) must be greater than 1, got 1"),
    ((), {"backoff_factor": 1.5}, ValueError, r"backoff_factor \(decr_ratio\) must lie between 0 and 1, got 1.5"),
    ((), {"growth_interval": 0}, ValueError, r"growth_interval \(incr_every_n_steps\) must be a whole number from 1"),
    ((), {"enabled": 1}, TypeError, "^enabled must be True or False, got 1 of type int"),
    ((), {"is_distributed": 1}, TypeError, "^is_distributed must be True or False, got 1 of type int"),
    ((), {"jit_compile": "always"}, ValueError, 'jit_compile must be True, False or "auto", got'),
    ((), {"manager": [8]}, TypeError, "a loss scale is described by a tfmp.LossScaleManager, a number"),
    ((), {"manager": tfmp.FixedLossScaleManager}, TypeError, "is the class FixedLossScaleManager: pass an object of"),
    ((), {"manager": 8, "init_scale": 8}, ValueError, "manager decides the scale by settings of its own: leave out in"),
    (("cuda",), {}, TypeError, r"takes no device, got 'cuda', .* leave it out, and write tfmp.GradScaler\(init"),
    ((), {"device": "cuda", "enabled": True}, TypeError, "takes no device, got 'cuda', which is an argument of torch"),
    ((8.0, 2.0, 0.5, 2000), {}, TypeError, "takes init_scale alone without a name, got 4 arguments: write the others"),
]


@pytest.mark.parametrize(("arguments", "keywords", "error", "message"), _CONSTRUCTED)
def test_settings_are_refused(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tfmp.GradScaler(*arguments, **keywords)


@pytest.mark.parametrize(
    "make", [lambda: tfmp.FixedLossScaleManager(8), tfmp.LogMaxLossScaleManager], ids=["fixed", "log-max"]
)
def test_what_the_managers_rule_has_not_is_refused(make: Callable[[], tfmp.LossScaleManager]) -> None:
    scaler = tfmp.GradScaler(manager=make())
    with pytest.raises(NotImplementedError, match="cannot be set: use a tfmp"):
        scaler.update(16)
    with pytest.raises(AttributeError, match=r"^a \w+LossScaleManager has no growth_factor: ask the loss-scale man"):
        scaler.get_growth_factor()


@pytest.mark.horovod
def test_horovods_optimizer_is_refused() -> None:
    hvd = importlib.import_module("horovod.tensorflow")
    with pytest.raises(ValueError, match="averages gradients itself: step with the optimizer inside it"):
        tfmp.GradScaler(8).step(hvd.DistributedOptimizer(sgd()), [(tf.constant(8.0), tf.Variable(0.0))])


@IN_BOTH_WAYS
@kerases.for_every_keras()
def test_variable_that_the_optimizer_was_not_built_with_is_refused_as_keras_does(keras: ModuleType, way: str) -> None:
    known, unknown = (tf.Variable([1.0], name=each) for each in ("known", "unknown"))
    scaler, optimizer = tfmp.GradScaler(8), keras.optimizers.Adam(0.5)
    optimizer.build([known])

    def step() -> None:
        scaler.step(optimizer, [(scaler.scale(tf.constant([1.0])), each) for each in (known, unknown)])

    with pytest.raises((KeyError, ValueError), match=r"unknown:0.*\. (This optimizer can only be|This usually means)"):
        WAYS[way](step)()
    assert [float(each[0]) for each in (known, unknown)] == [1, 1]


def _known() -> tuple[Any, list[Any]]:
    optimizer = _KERAS.optimizers.SGD(1.0)
    optimizer.build([tf.Variable(1.0)])
    return optimizer, [(tf.constant(1.0), tf.Variable(1.0))]


def _other_window(scaler: tfmp.GradScaler) -> tuple[Any, list[Any]]:
    variables, optimizer = [tf.Variable(1.0), tf.Variable(1.0)], sgd()
    accumulator = tfmp.GradientAccumulator(variables, 1)
    accumulator.add([tf.constant(1.0), None])
    return optimizer, [(scaler.unscale(optimizer, accumulator)[0], variables[0])]


@pytest.mark.parametrize(
    "make",
    [lambda _: (sgd(), [(tf.constant(1j), tf.Variable(1j))]), lambda _: _known(), _other_window],
    ids=["complex", "unknown variable", "part of a window"],
)
def test_refused_step_of_several_optimizers_makes_no_variables(make: Callable[..., Any]) -> None:
    training, first = Training(), sgd(momentum=0.5)
    refused = make(training.scaler)
    with pytest.raises((TypeError, ValueError, KeyError)):
        training.scaler.step_all([(first, _pairs(training)), refused])
    assert first.variables() == []


@pytest.mark.parametrize(("named", "name"), [("_Named", None), ("_Named 'critic'", "critic")])
def test_optimizer_is_named_by_its_type_and_its_name(named: str, name: str | None) -> None:
    class _Named:
        def __init__(self) -> None:
            self.name = name

        def apply_gradients(self, grads_and_vars: Any) -> None:
            del grads_and_vars

    training, optimizer = Training(), _Named()
    training.scaler.step(optimizer, _pairs(training))
    with pytest.raises(RuntimeError, match=rf"step was called already for this optimizer \({named}\) since"):
        training.scaler.step(optimizer, _pairs(training))
