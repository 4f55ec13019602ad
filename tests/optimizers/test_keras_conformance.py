"""Every optimizer of every Keras trains as without a wrapper, and skips whole steps: without XLA, and with it."""

import functools
import importlib
import importlib.util
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import tensorflow as tf
from kerases import assert_trains_as, every_optimizer, for_every_keras, optimizer, wrap
from pairs import many_gradients, many_variables

import tfmp


def _on_replicas(step: Callable[..., None]) -> Callable[..., None]:
    strategy = tf.distribute.get_strategy()
    return tf.function(lambda grads: strategy.run(step, args=(grads,)))


class _Way(NamedTuple):
    """A way to run a step, and the optimizers and options that are tried in it: all by default."""

    run: Callable[..., Any] | None
    jit_compile: bool | str = "auto"
    names: frozenset[str] | None = None
    options: frozenset[str] | None = None


#: The optimizers that stand for all in the ways that take long: with few and many slots, and with large programs.
_SAMPLE = frozenset({"SGD", "Adam", "Ftrl", "Muon", "Nadam", "MultiOptimizer"})
_WAYS = {
    "eager": _Way(None),
    "compiled": _Way(tf.function, True),
    "function": _Way(tf.function, "auto", _SAMPLE, frozenset({"plain", "ema", "accumulation"})),
    "xla": _Way(functools.partial(tf.function, jit_compile=True), "auto", _SAMPLE, frozenset({"plain"})),
    "replicas": _Way(
        _on_replicas,
        True,
        frozenset({"Adafactor", "AdamW", "Muon", "Nadam"}),
        frozenset({"plain", "weight_decay", "global_clipnorm", "clipvalue"}),
    ),
    "compiled eagerly": _Way(lambda step: step, True, _SAMPLE, frozenset({"plain", "global_clipnorm"})),
}


def _rows() -> Iterator[Any]:
    for name, way in _WAYS.items():
        for id_, keras, opt, option, options in every_optimizer():
            # Legacy optimizers have no programs; in functions all make their variables before the conditional.
            is_tried = (way.names is None or opt in way.names) and (way.options is None or option in way.options)
            # Without a wrapper too, replicas with Nadam of Keras 2 do not stay the same.
            if (name, opt) == ("replicas", "Nadam") and id_ != "keras3":
                continue
            if name in {"eager", "function"} if "legacy" in id_ else is_tried:
                yield pytest.param(keras, opt, options, way, id=f"{name}-{id_}-{opt}-{option}")


@pytest.mark.parametrize(("keras", "name", "options", "way"), list(_rows()))
def test_wrapped_training_equals_training_without_wrapper_but_for_overflows(
    keras: ModuleType, name: str, options: dict[str, Any], way: _Way, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    strategy = two_replicas if way.run is _on_replicas else tf.distribute.get_strategy()
    # Those that are alike share programs, where a program updates each with its own slots.
    shares = way.jit_compile is True and name != "MultiOptimizer"
    of_many = {"make": many_variables, "grads_of": many_gradients} if shares else {}
    with strategy.scope():
        plain, inner = (optimizer(keras, name, **options) for _ in range(2))
        opt = wrap(inner, **({} if "legacy" in options else {"jit_compile": way.jit_compile}))
        assert_trains_as(plain, opt, keras, way.run, **of_many)


@for_every_keras("keras3")
def test_tests_of_keras_wrapper_pass_with_tfmps(keras: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in Keras' wheel; tfmp's class takes the place of Keras'."""
    name = "keras.src.optimizers.loss_scale_optimizer_test"
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the wheel of Keras {keras.__version__} does not hold its tests")
    tests = importlib.import_module(name)
    monkeypatch.setattr(tests, "LossScaleOptimizer", tfmp.LossScaleOptimizer)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(tests).run(result)
    faults = {case.id().rpartition(".")[2]: trace for case, trace in [*result.failures, *result.errors]}
    # The configuration has entries of tfmp's.
    assert set(faults) <= {"test_serialization"}, "\n".join(faults.values())
    assert result.testsRun - len(result.skipped) - len(faults) >= 10
