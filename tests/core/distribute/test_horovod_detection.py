"""Recognizing Horovod, by optimizers and a module that look as Horovod's (0.28.1) do."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from stand_in_horovod import run_horovod

from tfmp.core.distribute.horovod_detection import (
    called_by_horovods,
    is_horovods,
    refuse_unsupported_horovods,
    running_horovod,
    without_horovods,
)


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(0.5)


class _Distributed:
    """Hands its steps on to the optimizer that it wraps."""

    def __init__(self, opt: Any, helper: object | None = None) -> None:
        self._optimizer = opt
        self._agg_helper = helper

    def apply(self, function: Callable[[], Any]) -> Any:
        return function()


_Distributed.__module__ = "horovod.tensorflow"


class _DistributedAdasumOptimizer(_Distributed):
    __module__ = "horovod.tensorflow"


class _DistributedOfKeras:
    """Derived from the user's optimizer, as Horovod's optimizers for Keras are; it wraps nothing."""

    __module__ = "horovod.tensorflow.keras"

    def apply(self, function: Callable[[], Any]) -> Any:
        return function()


class _Lookalike:
    """Of a package whose name only begins as Horovod's does."""

    __module__ = "horovod_tools.optimizers"

    def __init__(self, opt: Any) -> None:
        self._optimizer = opt


def test_optimizer_is_horovods_by_the_package_of_its_class_and_the_one_inside_is_found() -> None:
    opt = _sgd()
    assert is_horovods(_DistributedOfKeras())
    assert is_horovods(_Distributed(opt))
    assert without_horovods(_Distributed(opt)) is opt
    for other in (opt, _Lookalike(opt)):
        assert not is_horovods(other)
    for alone in (opt, _Lookalike(opt), _DistributedOfKeras()):
        assert without_horovods(alone) is alone
        refuse_unsupported_horovods(alone)


def test_optimizers_that_do_not_average_each_step_are_refused() -> None:
    refuse_unsupported_horovods(_Distributed(_sgd()))
    with pytest.raises(ValueError, match="leave backward_passes_per_step at 1"):
        refuse_unsupported_horovods(_Distributed(_sgd(), helper=object()))
    with pytest.raises(ValueError, match=r"does not average gradients: use op=hvd\.Average"):
        refuse_unsupported_horovods(_DistributedAdasumOptimizer(_sgd()))


def test_call_by_the_wrapper_of_this_optimizer_is_recognized() -> None:
    opt, other = _sgd(), _sgd()
    assert not called_by_horovods(opt)
    assert _Distributed(opt).apply(lambda: called_by_horovods(opt))
    for caller in (_Distributed(other), _DistributedOfKeras()):
        assert not caller.apply(lambda: called_by_horovods(opt))


def test_horovod_runs_if_the_program_has_initialized_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run_horovod(monkeypatch, 2, is_initialized=False)
    assert running_horovod() is None
    horovod = run_horovod(monkeypatch, 2)
    assert running_horovod() is horovod
