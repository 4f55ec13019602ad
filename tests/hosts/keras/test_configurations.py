"""A configuration makes objects of classes that the program has, and imports no module."""

import contextlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer

import tfmp

pytestmark = pytest.mark.essential


class _Eight(tfmp.LossScaleManager):
    def get_loss_scale(self) -> tf.Tensor:
        return tf.constant(8.0)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        del finite_grads
        return tf.no_op()

    def get_config(self) -> dict[str, Any]:
        return {}


class _OfAnotherKind:
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        raise AssertionError(f"this ran with {config}")


def _wrapped(keras: ModuleType, kind: str) -> Any:
    inner = optimizer(keras) if kind == "new" else keras.optimizers.legacy.SGD(0.5)
    return tfmp.LossScaleOptimizer(inner)


def _kinds(keras: ModuleType) -> list[str]:
    return ["new", "legacy"] if keras.__version__.startswith("2.") else ["new"]


@pytest.fixture
def not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that could be imported, and that fails if somebody does."""
    (tmp_path / "tfmp_not_imported.py").write_text("raise AssertionError('this was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "tfmp_not_imported"


def _described(module: str | None, name: str, registered: str | None = None) -> dict[str, Any]:
    return {"module": module, "class_name": name, "config": {}, "registered_name": registered}


@pytest.mark.parametrize("part", ["inner_optimizer", "loss_scale_manager", "skip_spikes"])
@for_every_keras()
def test_module_that_a_configuration_names_is_not_imported(keras: ModuleType, part: str, not_imported: str) -> None:
    for kind in _kinds(keras):
        opt = _wrapped(keras, kind)
        for registered in (None, "Thing", "package>Thing"):
            config = {**opt.get_config(), part: _described(not_imported, "Thing", registered)}
            with pytest.raises(ValueError, match=rf"names {not_imported}\.Thing, which is neither registered with"):
                type(opt).from_config(config)
    assert not_imported not in sys.modules


@for_every_keras()
def test_module_that_a_part_of_a_part_names_is_not_imported(keras: ModuleType, not_imported: str) -> None:
    evil = _described(not_imported, "Thing")
    for kind in _kinds(keras):
        opt = _wrapped(keras, kind)
        config = opt.get_config()
        for part, setting in [("inner_optimizer", "learning_rate"), ("loss_scale_manager", "init_loss_scale")]:
            inner = {**config[part], "config": {**config[part]["config"], setting: evil}}
            # Keras takes the name of the class for a learning rate in some versions.
            with contextlib.suppress(TypeError, ValueError):
                type(opt).from_config({**config, part: inner})
            assert not_imported not in sys.modules
        with pytest.raises(TypeError, match=r"a tfmp\.OverflowDetector"):
            type(opt).from_config({**config, "overflow_detector": evil})
    assert not_imported not in sys.modules


@pytest.mark.parametrize("part", ["inner_optimizer", "loss_scale_manager", "skip_spikes"])
@for_every_keras()
def test_class_of_another_kind_is_refused_before_it_runs(keras: ModuleType, part: str) -> None:
    for kind in _kinds(keras):
        opt = _wrapped(keras, kind)
        config = {**opt.get_config(), part: _described(__name__, "_OfAnotherKind")}
        with pytest.raises(ValueError, match=r"_OfAnotherKind, where it must name a subclass of "):
            type(opt).from_config(config)
        with pytest.raises(ValueError, match=r"must name a subclass of "):
            type(opt).from_config(config, custom_objects={"_OfAnotherKind": _OfAnotherKind})


@for_every_keras()
def test_class_of_an_imported_module_needs_no_registration(keras: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # The name of its class is that of one of Keras' own.
    own = type("Adam", (keras.optimizers.SGD,), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Adam", own, raising=False)
    opt = tfmp.LossScaleOptimizer(own(0.5), _Eight())
    again = tfmp.LossScaleOptimizer.from_config(opt.get_config())
    assert (type(again.inner_optimizer), type(again.manager)) == (own, _Eight)
    assert float(again.learning_rate) == 0.5


@for_every_keras()
def test_class_of_the_user_is_found_by_its_name(keras: ModuleType) -> None:
    own = type("_Nine", (_Eight,), {"__module__": "a_module_that_is_gone"})
    for kind in _kinds(keras):
        opt = _wrapped(keras, kind)
        config = {**opt.get_config(), "loss_scale_manager": _described("a_module_that_is_gone", "_Nine", "_Nine")}
        assert type(type(opt).from_config(config, {"_Nine": own}).manager) is own
        with keras.saving.custom_object_scope({"_Nine": own}):
            assert type(type(opt).from_config(config).manager) is own
