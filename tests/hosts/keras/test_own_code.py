"""What counts as Keras' own code, and what as a user's."""

import functools
from typing import Any

import keras
import pytest
import tensorflow as tf
from kerases import optimizer

from tfmp.hosts.keras.own_code import OwnCode, is_foreign

pytestmark = pytest.mark.essential


class _Own(keras.optimizers.SGD):
    pass


@functools.wraps(keras.optimizers.SGD.update_step)
def _pretends(*args: Any) -> None:
    del args


@pytest.mark.parametrize(
    ("value", "foreign"),
    [
        (keras.optimizers.SGD.update_step, False),
        (keras.optimizers.Optimizer.learning_rate, False),
        (vars(keras.optimizers.SGD).get("from_config"), False),
        (tf.clip_by_norm, False),
        (len, False),
        (0.5, False),
        (_pretends, True),
        (lambda: None, True),
        (property(lambda self: self), True),
        (staticmethod(lambda: None), True),
        (tf.function(lambda: None), True),
        (functools.partial(len), True),
    ],
)
def test_functions_are_known_by_where_they_were_defined(value: Any, foreign: bool) -> None:
    assert is_foreign(value) is foreign


def test_objects_and_their_methods_are_known_too() -> None:
    for value in (keras.optimizers.SGD(0.5).update_step, tf.Variable(1.0), _Own(0.5)):
        assert is_foreign(value) is False


def test_classes_of_users_do_not_run_keras_code_alone() -> None:
    own = OwnCode()
    assert own.runs_alone([optimizer(keras), keras.constraints.NonNeg()])
    assert not own.runs_alone([_Own(0.5)])
    assert not own.runs_alone([optimizer(keras), lambda: 0.5])


@pytest.mark.parametrize("place", ["object", "class", "base class"])
def test_replaced_methods_are_noticed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, opt = OwnCode(), optimizer(keras)
    assert own.runs_alone([opt])
    before = own.version
    where = {"object": opt, "class": keras.optimizers.SGD, "base class": keras.optimizers.Optimizer}[place]
    monkeypatch.setattr(where, "update_step", _pretends, raising=False)
    assert not own.runs_alone([opt])
    monkeypatch.undo()
    assert own.runs_alone([opt])
    assert (own.version > before) is (place != "object")


def test_method_of_another_class_of_keras_changes_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    own, opt = OwnCode(), optimizer(keras)
    assert own.runs_alone([opt])
    before = own.version
    monkeypatch.setattr(keras.optimizers.SGD, "update_step", keras.optimizers.Lion.update_step)
    assert own.runs_alone([opt])
    assert own.version == before + 1
