"""Saving and resuming models with the wrapper, in every format of every Keras: each goes on in every bit."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import python_process
from kerases import Halving, dense_model, for_every_keras, installed, optimizer, state, values, wrap
from moving import FORMS, Form, built, checkpoint, for_forms, train

import tfmp


def _adam(keras: ModuleType, **options: Any) -> Any:
    return optimizer(keras, "Adam", learning_rate=keras.optimizers.schedules.PolynomialDecay(0.125, 10), **options)


def _managed(keras: ModuleType, manager: tfmp.LossScaleManager, inner: Any = None, **settings: Any) -> Any:
    return tfmp.LossScaleOptimizer(inner or optimizer(keras, learning_rate=2.0**-6), manager, **settings)


class _Run(NamedTuple):
    """An optimizer, the steps that it takes, and those after which it is stopped."""

    make: Callable[[ModuleType], Any]
    #: The counts after the last step, by which the steps are as meant.
    counts: Mapping[str, Any]
    stops: Iterable[int]
    forms: Iterable[str]
    num_steps: int = 8
    #: What the inputs of a step are multiplied by: here an overflow, two in a row, which lower the scale, and the last.
    factors: Mapping[int, float] = dict.fromkeys((1, 4, 5, 7), np.inf)


_WHOLE = ("keras_file", "legacy_file")
_ALL = ("weights_file", "checkpoint", "checkpoint_before_build", *_WHOLE, "tensorflow_weights", "saved_model")
_RUNS = {
    "streaks": _Run(
        lambda keras: wrap(
            _adam(keras, use_ema=True, ema_overwrite_frequency=3), incr_every_n_steps=2, decr_every_n_nan_or_inf=2
        ),
        {"applied_steps": 4, "skipped_steps": 4, "last_step_applied": False},
        # Backwards, so that the model that is loaded into has always trained further than the saved one. Not before
        # the first step, because Keras 2 has no metrics to save there.
        range(7, 0, -1),
        _ALL,
    ),
    # Of several micro-batches, so that the detector is not the only one that adds variables in `build`. The third of
    # three spikes in a row is applied.
    "spikes": _Run(
        lambda keras: tfmp.LossScaleOptimizer(
            optimizer(keras, learning_rate=1e-6),
            skip_spikes=tfmp.SpikeDetector(window=2, max_consecutive_skips=2),
            accumulation_steps=2,
        ),
        {"applied_steps": 6, "skipped_steps": 4, "skipped_spikes": 4},
        [13, 10, 5],
        ("weights_file", "checkpoint", "keras_file"),
        num_steps=20,
        factors=dict.fromkeys((4, 8, 11, 13, 18), 1e3),
    ),
    "multi": _Run(
        lambda keras: wrap(optimizer(keras, "MultiOptimizer")), {"applied_steps": 4}, [3], ("weights_file", *_WHOLE)
    ),
    "log_max": _Run(
        lambda keras: _managed(keras, tfmp.LogMaxLossScaleManager(init_loss_scale=8)), {"skipped_steps": 4}, [5], _WHOLE
    ),
}


def _step(model: Any, run: _Run, step: int) -> list[Any]:
    """Take a step and return the values of all weights and variables of the optimizer."""
    # Two micro-batches of the run with spikes are alike.
    x = np.random.default_rng(step if run.num_steps <= 8 else step // 2).random((8, 3), np.float32)
    model.train_on_batch(x * np.float32(run.factors.get(step, 1)), np.ones([8, 1]))
    return values([*model.weights, *model.optimizer.variables])


@for_forms("name", {name: run.forms for name, run in _RUNS.items()}, only_keras_3=["multi"])
def test_run_resumes_exactly_where_it_stopped(
    keras: ModuleType, name: str, form: Form, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = _RUNS[name]
    model = built(dense_model(keras, run.make(keras)))
    after = []
    # Keras takes long to make a model of a file, or its functions anew.
    stops = [*run.stops][: None if form in {FORMS["weights_file"], FORMS["checkpoint"]} else 2]
    for step in range(run.num_steps):
        if step in stops:
            (tmp_path / str(step)).mkdir()
            form.save(keras, model, tmp_path / str(step))
        after.append(_step(model, run, step))
    assert state(model.optimizer, *run.counts) == [*run.counts.values()]
    resumed: Any = None
    for stop in stops:
        if resumed is None or form is FORMS["checkpoint_before_build"]:
            resumed = dense_model(keras, run.make(keras))
        found = form.load(keras, resumed, tmp_path / str(stop), resumed.optimizer, True)
        resumed = found if isinstance(found, keras.Model) else resumed
        assert type(resumed.optimizer) is type(model.optimizer)
        for part in ("loss_scale_manager", "skip_spikes", "accumulation_steps", "overflow_drops"):
            assert resumed.optimizer.get_config().get(part) == model.optimizer.get_config().get(part)
        for step in range(stop, run.num_steps):
            assert _step(resumed, run, step) == after[step], (stop, step)
    assert "Inconsistent references" not in caplog.text


@pytest.mark.parametrize(
    "manager",
    [
        tfmp.ExponentialUpdateLossScaleManager(1024, 4, 3, 4, 0.25, min_loss_scale=2, hysteresis=2, tolerance=0.5),
        tfmp.FixedLossScaleManager(256),
    ],
    ids=["tolerant", "fixed"],
)
@for_every_keras()
def test_config_makes_the_same_optimizer_again(keras: ModuleType, manager: tfmp.LossScaleManager) -> None:
    settings: dict[str, Any] = {"name": "mine", "accumulation_steps": 3, "overflow_drops": "micro_batch"}
    settings |= {"is_distributed": True, "micro_batches_per_epoch": 7}
    of_keras_2 = {"iterations_include_skipped_steps": True, "aggregation_dtype": "float16"}
    settings |= of_keras_2 if keras.__version__.startswith("2.") else {"jit_compile": False}
    manager = type(manager).from_config(manager.get_config())
    opt = _managed(keras, manager, optimizer(keras, "Adam", learning_rate=0.125), **settings)
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(opt)))
    assert {name: config["config"][name] for name in settings} == settings
    # A file may name the public class.
    public = config | {"module": None, "class_name": "LossScaleOptimizer", "registered_name": "LossScaleOptimizer"}
    own, custom = keras.saving.deserialize_keras_object, {"LossScaleOptimizer": tfmp.LossScaleOptimizer}
    for again in (
        type(opt).from_config(opt.get_config()),
        tfmp.LossScaleOptimizer.from_config(opt.get_config()),
        own(config),
        own(public, custom_objects=custom),
        keras.optimizers.deserialize(keras.optimizers.serialize(opt)),
    ):
        assert (type(again), again.get_config(), again.name) == (type(opt), opt.get_config(), "mine")
        assert float(again.inner_optimizer.learning_rate.numpy()) == 0.125
        assert again.get_config()["loss_scale_manager"]["config"] == manager.get_config()
    assert wrap(optimizer(keras)).get_config().get("jit_compile", "auto") == "auto"


class _Continuing(Halving):
    """A custom manager that can continue from a given scale."""

    def continue_from(self, loss_scale: float, good_steps: int) -> None:
        self.loss_scale.assign(loss_scale + good_steps)


@for_every_keras()
def test_custom_manager_is_loaded_with_custom_objects_and_a_checkpoint_holds_its_variables(
    keras: ModuleType, tmp_path: Path
) -> None:
    model, restored = (built(dense_model(keras, _managed(keras, Halving(64.0)))) for _ in range(2))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Halving": Halving})
    assert float(loaded.optimizer.loss_scale) == 64
    train(model, [0], [0])
    path = checkpoint(model, model.optimizer).save(tmp_path / "checkpoint")
    checkpoint(restored, restored.optimizer).restore(path).assert_consumed()
    assert (float(restored.optimizer.loss_scale), int(restored.optimizer.skipped_steps)) == (32, 1)


@pytest.mark.parametrize(
    ("make", "scale"),
    [
        (tfmp.LogMaxLossScaleManager, 512),
        (lambda: _Continuing(64.0), 512),
        (lambda: tfmp.FixedLossScaleManager(512), 512),
        (lambda: tfmp.FixedLossScaleManager(64), 64),
        (lambda: Halving(64.0), 64),
    ],
    ids=["log_max", "custom with continue_from", "fixed there", "fixed", "custom"],
)
@for_every_keras("keras3")
def test_manager_continues_from_the_scale_of_keras_own_wrapper_or_warns(
    keras: ModuleType, make: Any, scale: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = built(dense_model(keras, keras.optimizers.LossScaleOptimizer(optimizer(keras), initial_scale=512)))
    own.save_weights(tmp_path / "model.weights.h5")
    manager = make()
    ours = built(dense_model(keras, _managed(keras, manager)))
    ours.load_weights(tmp_path / "model.weights.h5")
    assert float(ours.optimizer.loss_scale) == scale
    warnings = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    cause = f"{type(manager).__name__} has no method continue_from."
    expected = [f"the loss scale 512 of Keras' own LossScaleOptimizer is not taken over: {cause}"]
    assert warnings == ([] if scale == 512 else expected)


_LOAD = """
import tfmp
import importlib, json, sys
import numpy as np

for name, path, shape in json.loads(sys.argv[1]):
    model = importlib.import_module(name).saving.load_model(path)
    model.train_on_batch(np.ones(shape), np.ones([shape[0], 1]))
    print(json.dumps([variable.numpy().tolist() for variable in [*model.weights, *model.optimizer.variables]]))
"""


def test_fresh_process_loads_models_of_this_and_of_an_earlier_tfmp(tmp_path: Path) -> None:
    saved = []
    for id_, keras in installed().items():
        opt = wrap(_adam(keras, use_ema=True), incr_every_n_steps=4, decr_every_n_nan_or_inf=2)
        train(dense_model(keras, opt), range(3), [1, 2]).save(tmp_path / f"{id_}.keras")
        saved.append((keras, tmp_path / f"{id_}.keras", [8, 3]))
        # The earlier file holds layers of Keras 3.15.
        if id_ != "keras3" or tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15):
            recorded = Path(__file__).parent.parent / "recordings" / "scales"
            saved.append((keras, recorded / f"keras{keras.__version__[0]}_own" / "model.keras", [4, 1]))
    described = json.dumps([(keras.__name__, str(path), shape) for keras, path, shape in saved])
    done = python_process.run("-c", _LOAD, described)
    assert done.returncode == 0, done.stderr
    for (keras, path, shape), of_loaded in zip(saved, map(json.loads, done.stdout.splitlines()), strict=True):
        # This process imported Keras and the front-end before it loads the file.
        model = keras.saving.load_model(path)
        model.train_on_batch(np.ones(shape), np.ones([shape[0], 1]))
        assert of_loaded == values([*model.weights, *model.optimizer.variables])
