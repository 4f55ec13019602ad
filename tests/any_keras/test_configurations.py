"""A configuration makes objects of classes that the program has, and imports no module."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tensorflow as tf
from kerases import for_every_keras, for_every_kind

import tfmp


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


@pytest.fixture
def not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that could be imported, and that fails if somebody does."""
    (tmp_path / "tfmp_not_imported.py").write_text("raise AssertionError('this was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "tfmp_not_imported"


def _described(module: str | None, name: str, registered: str | None = None) -> dict[str, Any]:
    return {"module": module, "class_name": name, "config": {}, "registered_name": registered}


@for_every_kind
def test_module_that_a_configuration_a_part_of_it_or_a_function_in_a_part_names_is_not_imported(
    keras: ModuleType, optimizers: ModuleType, not_imported: str
) -> None:
    evil = [_described(not_imported, "Thing", registered) for registered in (None, "Thing", "package>Thing")]
    opt = tfmp.LossScaleOptimizer(optimizers.SGD(0.5))
    config = opt.get_config()
    bad = [{part: each} for part in ("inner_optimizer", "loss_scale_manager", "skip_spikes") for each in evil]
    # The class is known under the second name while the optimizer is made.
    name = f"tfmp>found as {type(opt.inner_optimizer).__name__}"
    # Keras 2 looks for a function by the name in the field "config", and not by the registered one.
    keras.saving.register_keras_serializable(package="test_configurations", name="registered")(lambda step: step)
    function = _described(not_imported, "function", "test_configurations>registered") | {"config": "thing"}
    for nested in (evil[0], evil[:1], {"of": evil[0]}, _described(not_imported, name, "Thing"), function):
        for part, setting in [("inner_optimizer", "learning_rate"), ("loss_scale_manager", "init_loss_scale")]:
            bad.append({part: {**config[part], "config": {**config[part]["config"], setting: nested}}})
    for each in bad:
        with pytest.raises(ValueError, match=rf"names {not_imported}\..*, which is neither registered with"):
            type(opt).from_config({**config, **each})
    with pytest.raises(TypeError, match=r"a tfmp\.OverflowDetector"):
        type(opt).from_config({**config, "overflow_detector": evil[0]})
    assert not_imported not in sys.modules


@for_every_keras()
def test_module_of_a_layer_in_a_recomputed_model_is_not_imported(keras: ModuleType, not_imported: str) -> None:
    own = type("Own", (keras.Model,), {"__module__": __name__})
    inputs = keras.Input([2])
    model = tfmp.recompute_layers(own(inputs, keras.layers.Dense(2, name="block")(inputs)), "block")
    config = model.get_config()
    assert type(model).from_config(config, {"Own": own}).count_params() == 6
    # The class of the model is known under the second name while its layers are made.
    for name in ("tfmp>found as Own", "Thing"):
        for layer in config["model"]["config"]["layers"]:
            layer.update(_described(not_imported, name, "package>Thing"))
        with pytest.raises(ValueError, match=rf"names {not_imported}\.{name}, which is neither registered with"):
            type(model).from_config(config, {"Own": own})
    assert not_imported not in sys.modules


@for_every_keras()
def test_part_and_what_is_in_it_may_be_registered_or_of_an_imported_module(
    keras: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    decay = keras.optimizers.schedules.ExponentialDecay
    # The name of its class is that of one of Keras' own.
    own = type("Adam", (keras.optimizers.SGD,), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Adam", own, raising=False)
    for schedule in (type("_Half", (decay,), {"__module__": "a_module_that_is_gone"}), decay):
        opt = tfmp.LossScaleOptimizer(own(schedule(0.5, 1, 0.5)), _Eight())
        registered = {"_Half": schedule, "Custom>_Half": schedule}
        again = tfmp.LossScaleOptimizer.from_config(opt.get_config(), registered if schedule is not decay else None)
        assert (type(again.inner_optimizer), type(again.manager)) == (own, _Eight)
        assert type(again.inner_optimizer._learning_rate) is schedule


_NO_CONFIGURATION = r"must be a configuration with class_name and config, got \{"
#: What is no configuration of a part, or one of another kind, and what is said of it.
_BAD = [
    ({}, _NO_CONFIGURATION),
    ({"config": {}}, _NO_CONFIGURATION),
    ({"class_name": None, "config": {}}, _NO_CONFIGURATION),
    ({"class_name": "A", "config": 1}, _NO_CONFIGURATION),
    (_described(__name__, "_OfAnotherKind"), r"(_OfAnotherKind, where it )?must name a subclass of "),
]


@pytest.mark.parametrize("part", ["inner_optimizer", "loss_scale_manager", "skip_spikes"])
@pytest.mark.parametrize(("bad", "message"), _BAD)
@for_every_kind
def test_what_is_no_configuration_of_a_part_is_refused_before_it_runs(
    keras: ModuleType, optimizers: ModuleType, part: str, bad: dict[str, Any], message: str
) -> None:
    opt = tfmp.LossScaleOptimizer(optimizers.SGD(0.5))
    for custom_objects in (None, {"_OfAnotherKind": _OfAnotherKind}):
        with pytest.raises(ValueError, match=message):
            type(opt).from_config({**opt.get_config(), part: bad}, custom_objects=custom_objects)


@for_every_kind
def test_class_of_the_user_is_found_by_its_name(keras: ModuleType, optimizers: ModuleType) -> None:
    own = type("_Nine", (_Eight,), {"__module__": "a_module_that_is_gone"})
    opt = tfmp.LossScaleOptimizer(optimizers.SGD(0.5))
    config = {**opt.get_config(), "loss_scale_manager": _described("a_module_that_is_gone", "_Nine", "_Nine")}
    assert type(type(opt).from_config(config, {"_Nine": own}).manager) is own
    with keras.saving.custom_object_scope({"_Nine": own}):
        assert type(type(opt).from_config(config).manager) is own
