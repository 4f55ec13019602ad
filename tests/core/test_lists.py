"""Passes right and wrong arguments to every public function that takes gradients, variables, pairs or names."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import installed, optimizer, wrap

import tfmp
from tfmp.bert.optimizers import AdamWeightDecayOptimizer

#: Converts the right list into the argument that is passed instead, for example into a generator.
_Form = Callable[[list[Any]], Any]
#: Calls the function under test with the right list in this form, and returns its result.
_Take = Callable[[_Form], Any]


def _variables() -> list[tf.Variable]:
    return [tf.Variable([1.0, 2.0], name="a"), tf.Variable([3.0, 4.0], name="b")]


def _grads() -> list[tf.Tensor]:
    return [tf.constant([8.0, 16.0]), tf.constant([24.0, 32.0])]


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(1.0)


def _of_v1() -> Any:
    return tfmp.LossScaleOptimizer(_sgd(), tfmp.FixedLossScaleManager(8))


def _moves(move: Callable[[Any, list[tf.Variable], _Form], Any], make: Callable[[], Any]) -> Callable[[], _Take]:
    """Return what makes an object and variables, and a call that moves the variables and reads them."""

    def prepared() -> _Take:
        owner, variables = make(), _variables()

        def take(form: _Form) -> list[tf.Tensor]:
            move(owner, variables, form)
            return [variable.read_value() for variable in variables]

        return take

    return prepared


def _pairs(variables: list[tf.Variable]) -> list[Any]:
    return list(zip(_grads(), variables, strict=True))


def _step(scaler: tfmp.GradScaler, variables: list[tf.Variable], form: _Form) -> None:
    scaler.step(_sgd(), form(_pairs(variables)))
    scaler.update()


def _step_all(scaler: tfmp.GradScaler, variables: list[tf.Variable], form: _Form) -> None:
    scaler.step_all(form([(_sgd(), [pair]) for pair in _pairs(variables)]))
    scaler.update()


def _apply(optimizer: Any, variables: list[tf.Variable], form: _Form) -> None:
    optimizer.apply_gradients(form(_pairs(variables)))


def _minimize(optimizer: Any, variables: list[tf.Variable], form: _Form) -> None:
    optimizer.minimize(lambda: tf.add_n(variables), var_list=form(variables))


def _unscale(enabled: bool) -> _Take:
    scaler = tfmp.GradScaler(8, enabled=enabled)
    return lambda form: scaler.unscale(_sgd(), form(_grads()))


def _scale() -> _Take:
    scaler = tfmp.GradScaler(8)
    return lambda form: list(scaler.scale(form([tf.constant(1.0), tf.constant(2.0)])))


def _prepare(form: _Form) -> int:
    optimizer = tf.compat.v1.train.MomentumOptimizer(1.0, 0.5)
    tfmp.GradScaler(8).prepare(optimizer, form(_variables()))
    return len(optimizer.variables())


def _add() -> _Take:
    accumulator = tfmp.GradientAccumulator(_variables(), 2)

    def take(form: _Form) -> Any:
        accumulator.add(form(_grads()), 8.0)
        return accumulator.mean()

    return take


def _decays(form: _Form) -> list[tf.Tensor]:
    optimizer = AdamWeightDecayOptimizer(0.125, 0.5, exclude_from_weight_decay=form(["a", "b"]))
    return [tf.constant(optimizer.decays(variable)) for variable in _variables()]


def _of_keras(keras: ModuleType) -> dict[str, tuple[Callable[[], _Take], str]]:
    """Return the entrances of the front-end for a Keras; a step follows each."""
    calls: dict[str, tuple[Callable[[Any, list[tf.Variable], _Form], Any], str]] = {
        "apply_gradients": (_apply, "pairs"),
        "minimize": (_minimize, "variables"),
        "build": (lambda opt, variables, form: opt.build(form(variables)), "variables"),
        "exclusion": (lambda opt, variables, form: opt.exclude_from_weight_decay(form(variables)), "variables"),
        "exclusion by name": (lambda opt, _, form: opt.exclude_from_weight_decay(var_names=form(["a", "b"])), "names"),
        "last values": (lambda opt, variables, form: opt.finalize_variable_values(form(variables)), "variables"),
        "get_unscaled_gradients": (lambda opt, _, form: opt.get_unscaled_gradients(form(_grads())), "grads"),
    }
    if keras.__version__.startswith("3."):
        calls |= {
            "apply": (lambda opt, variables, form: opt.apply(form(_grads()), variables), "grads"),
            "apply to variables": (lambda opt, variables, form: opt.apply(_grads(), form(variables)), "variables"),
        }
    else:
        calls |= {
            "compute_gradients": (
                lambda opt, variables, form: opt.compute_gradients(lambda: tf.add_n(variables), form(variables)),
                "variables",
            ),
            "aggregate_gradients": (
                lambda opt, variables, form: opt.aggregate_gradients(form(_pairs(variables))),
                "pairs",
            ),
        }

    def prepared(call: Callable[[Any, list[tf.Variable], _Form], Any]) -> _Take:
        opt, variables = wrap(optimizer(keras, momentum=0.5, weight_decay=0.25)), _variables()

        def take(form: _Form) -> Any:
            returned = filter(tf.is_tensor, tf.nest.flatten(call(opt, variables, form)))
            _apply(opt, variables, list)
            return [*returned, *(variable.read_value() for variable in variables)]

        return take

    return {name: (partial(prepared, call), wrong) for name, (call, wrong) in calls.items()}


#: For each public function under test, what makes its call, and the key in `_WRONG` of the arguments that it must
#: refuse.
_ENTRANCES: dict[str, tuple[Callable[[], _Take], str]] = {
    "GradScaler.unscale": (lambda: _unscale(True), "grads"),
    "GradScaler.unscale disabled": (lambda: _unscale(False), "grads"),
    "GradScaler.step": (_moves(_step, lambda: tfmp.GradScaler(8)), "pairs"),
    "GradScaler.step_all": (_moves(_step_all, lambda: tfmp.GradScaler(8)), "steps"),
    "GradScaler.scale": (_scale, "none"),
    "GradScaler.prepare": (lambda: _prepare, "variables"),
    "GradientAccumulator of variables": (
        lambda: lambda form: len(tfmp.GradientAccumulator(form(_variables()), 2).sums),
        "variables",
    ),
    "GradientAccumulator.add": (_add, "grads"),
    "clip_by_value": (lambda: lambda form: tfmp.clip_by_value(form(_grads()), -9, 9), "grads or one"),
    "clip_by_norm": (lambda: lambda form: tfmp.clip_by_norm(form(_grads()), 1.0), "grads or one"),
    "clip_by_global_norm": (lambda: lambda form: tfmp.clip_by_global_norm(form(_grads()), 1.0), "grads"),
    "v1 apply_gradients": (_moves(_apply, _of_v1), "pairs"),
    "v1 minimize": (_moves(_minimize, _of_v1), "none"),
    "bert apply_gradients": (_moves(_apply, lambda: AdamWeightDecayOptimizer(0.125)), "pairs"),
    "bert exclude_from_weight_decay": (lambda: _decays, "names"),
}
for _name, _keras in installed().items():
    _ENTRANCES |= {f"{_name} {method}": entrance for method, entrance in _of_keras(_keras).items()}

_WRONG: dict[str, dict[str, _Form]] = {
    "grads": {
        "one tensor": lambda right: right[0],
        "an array": lambda right: np.ones([2, 2], np.float32),
        "a dict": lambda right: dict(enumerate(right)),
        "a zip of pairs": lambda right: zip(right, _variables(), strict=True),
        "pairs": lambda right: list(zip(right, _variables(), strict=True)),
        "a list in a list": lambda right: [right],
        "a string": lambda right: "grads",
        "None": lambda right: None,
    },
    "pairs": {
        "one tensor": lambda right: right[0][0],
        "a dict": lambda right: dict(enumerate(right)),
        "gradients": lambda right: [grad for grad, _ in right],
        "two gradients in a pair": lambda right: [tuple(grad for grad, _ in right)],
        "swapped": lambda right: [(variable, grad) for grad, variable in right],
        "one pair": lambda right: right[0],
        "two lists": lambda right: tuple(map(list, zip(*right, strict=True))),
        "None": lambda right: None,
    },
    "steps": {
        "a dict": dict,
        "one step": lambda right: right[0],
        "optimizers": lambda right: [optimizer for optimizer, _ in right],
    },
    "variables": {
        "one variable": lambda right: right[0],
        "a dict": lambda right: dict(enumerate(right)),
        "names": lambda right: ["a", "b"],
        "a name": lambda right: "a",
        "gradients": lambda right: _grads(),
    },
    "names": {"a string": lambda right: "a", "a number": lambda right: 1},
    "none": {},
}
_WRONG["grads or one"] = {name: form for name, form in _WRONG["grads"].items() if name != "one tensor"}

_FORMS: dict[str, _Form] = {
    "generator": lambda right: (each for each in right),
    "map": lambda right: map(lambda each: each, right),  # noqa: C417 - the type is what matters
    "tuple": tuple,
    "values of a dict": lambda right: dict(enumerate(right)).values(),
}


def _result(entrance: str, form: _Form) -> Any:
    found = _ENTRANCES[entrance][0]()(form)
    return tf.nest.map_structure(lambda each: each.numpy().tolist() if tf.is_tensor(each) else each, found)


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("entrance", _ENTRANCES)
def test_any_ordered_iterable_gives_the_same_result_as_a_list(entrance: str, form: str) -> None:
    assert _result(entrance, _FORMS[form]) == _result(entrance, list)


@pytest.mark.parametrize(
    ("entrance", "wrong"), [(entrance, wrong) for entrance, (_, key) in _ENTRANCES.items() for wrong in _WRONG[key]]
)
def test_wrong_argument_is_refused_with_its_value_and_advice(entrance: str, wrong: str) -> None:
    form = _WRONG[_ENTRANCES[entrance][1]][wrong]
    with pytest.raises(TypeError, match=r"must be (a list of|pairs of) .*(, got |, and it holds ).*: (pass|write) "):
        _result(entrance, form)
