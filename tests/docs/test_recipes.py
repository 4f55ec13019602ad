"""The recipes of docs/howto/recipes.md train as float32 does without loss scaling, and skip what overflows."""

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import recipe_blocks
import replica_processes
import tensorflow as tf
from recipe_blocks import Batch, dataset, overflowing, run

#: What four steps in float16 are off by, at most; the weights move by a hundred times that.
_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=4e-3)

_SCALE = 1024.0
_RATE = 0.125

#: Tells a test which recipe it runs; the last test asks whether there is one for each.
_of_recipe = functools.partial(pytest.mark.parametrize, "recipe")


@pytest.fixture
def names() -> dict[str, Any]:
    """Return what the set-up of the page makes, for one recipe."""
    return recipe_blocks.set_up()


@pytest.fixture
def good(names: dict[str, Any]) -> list[Batch]:
    """Return the batches that the recipes train on."""
    return recipe_blocks.batches_of_page(names)


def _design(features: np.ndarray) -> np.ndarray:
    """Return the matrix whose product with kernel and bias is the output."""
    return np.concatenate([features, np.ones([len(features), 1])], axis=1)


def _slope(weights: np.ndarray, batch: Batch) -> np.ndarray:
    """Return the gradient of the mean squared error of the linear model."""
    design = _design(batch[0])
    return 2 / len(design) * design.T @ (design @ weights - batch[1])


def _trained(
    batches: Iterable[Batch],
    slope: Callable[[np.ndarray, Batch], np.ndarray] = _slope,
    weights: Iterable[float] = (1, 1, 0),
) -> np.ndarray:
    """Return what gradient descent makes of the weights in float64, without a scale."""
    trained = np.array([[weight] for weight in weights], np.float64)
    for batch in batches:
        trained = trained - _RATE * slope(trained, batch)
    return trained.ravel()


def _weights(variables: Iterable[Any]) -> np.ndarray:
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def _joined(batches: Iterable[Batch]) -> Batch:
    features, targets = zip(*batches, strict=True)
    return np.concatenate(features), np.concatenate(targets)


def _clipped(weights: np.ndarray, batch: Batch) -> np.ndarray:
    slope = _slope(weights, batch)
    return slope * min(1, 0.5 / np.linalg.norm(slope))


def _with_penalty(weights: np.ndarray, batch: Batch) -> np.ndarray:
    design, slope = _design(batch[0]), _slope(weights, batch)
    return slope + 0.25 * 2 * (2 / len(design) * design.T @ design) @ slope


def _reversed(weights: np.ndarray, batch: Batch) -> np.ndarray:
    shift, kernel = weights[:2].T, weights[2:]
    shifted = batch[0] + shift
    upstream = 2 / len(shifted) * (shifted @ kernel - batch[1])
    return np.concatenate([-kernel * upstream.sum(), shifted.T @ upstream])


def _squared(weights: np.ndarray, batch: Batch) -> np.ndarray:
    design = _design(batch[0])
    outputs = design @ weights
    return 2 / len(design) * design.T @ (2 * outputs * (outputs**2 - batch[1]))


_SEVERAL_INPUTS = "Functions with several inputs or autocastable operations"
_ONE_TYPE = "Functions that need a particular type"

#: The recipes that train one model on one batch a step: the gradient, and the batch that overflows, if one does.
_STEPS: dict[str, tuple[Callable[[np.ndarray, Batch], np.ndarray], int | None]] = {
    "Typical training": (_slope, 2),
    "Gradient clipping": (_clipped, 1),
    "Gradient penalty": (_with_penalty, 1),
    _SEVERAL_INPUTS: (_reversed, 1),
    # In float16 it would overflow.
    _ONE_TYPE: (_squared, None),
}


@_of_recipe(_STEPS)
def test_training_takes_true_gradients_and_skips_the_batch_that_overflows(
    recipe: str, names: dict[str, Any], good: list[Batch]
) -> None:
    slope, overflow = _STEPS[recipe]
    start = (0, 0, 1, 1) if recipe == _SEVERAL_INPUTS else (1, 1, 0)
    if recipe == _ONE_TYPE:
        in_float16 = tf.square(tf.cast(512 * names["model"](good[0][0]), tf.float16))
        assert not np.isfinite(in_float16.numpy()).all()
    names["batches"] = dataset(
        names, [overflowing(batch) if at == overflow else batch for at, batch in enumerate(good)]
    )
    run(recipe, names)
    kept = [batch for at, batch in enumerate(good) if at != overflow]
    expected = _trained(kept, slope, start)
    _close(_weights([names["shift"], names["kernel"]] if recipe == _SEVERAL_INPUTS else names["variables"]), expected)
    assert float(names["scaler"].loss_scale) == (_SCALE if overflow is None else _SCALE / 2)
    assert int(names["scaler"].applied_steps) == len(kept)
    if recipe in {"Gradient clipping", "Gradient penalty"}:
        assert np.abs(expected - _trained(kept)).max() > 0.1
    if recipe == "Gradient clipping":
        _close(float(names["norm"]), np.linalg.norm(_slope(_trained(kept[:-1], slope)[:, None], kept[-1])))
    if recipe == _SEVERAL_INPUTS:
        with names["autocast"]():
            assert names["product_model"](good[0][0]).dtype == tf.float16


@_of_recipe(["Several models, losses and optimizers"])
def test_the_optimizer_whose_gradients_are_finite_steps_and_the_other_does_not(
    recipe: str, names: dict[str, Any], good: list[Batch]
) -> None:
    features, targets = good[1]
    second_overflows = (features * np.float32([1, 1e6]) + np.float32([0, 1e6]), targets)
    names["batches"] = dataset(names, [good[0], second_overflows, *good[2:]])
    run(recipe, names)

    first_steps = [(features[:, :1], targets) for features, targets in good]
    _close(_weights(names["sources"][0]), _trained(first_steps, weights=(1, 0)))
    second_steps = []
    for index in (0, 2, 3):
        features, targets = good[index]
        of_first = _design(features[:, :1]) @ _trained(first_steps[:index], weights=(1, 0))[:, None]
        second_steps.append((features[:, 1:], targets - of_first))
    _close(_weights(names["sources"][1]), _trained(second_steps, weights=(1, 0)))
    assert [int(each.iterations) for each in names["optimizers"]] == [4, 3]
    assert float(names["scaler"].loss_scale) == _SCALE / 2


@_of_recipe(["Several GPUs in one process"])
def test_replicas_take_the_mean_and_skip_what_one_of_them_overflows_on(
    recipe: str, names: dict[str, Any], good: list[Batch], two_replicas: tf.distribute.Strategy
) -> None:
    # Without GPUs the strategy that the page makes would have one replica.
    recipe_blocks.run_with_strategy(recipe, names, two_replicas)
    _close(_weights(names["parallel"].trainable_variables), _trained(good[:3]))
    assert float(names["parallel_scaler"].loss_scale) == _SCALE / 2


@pytest.mark.horovod
@_of_recipe(["One GPU in each process"])
def test_horovods_processes_take_the_mean_and_skip_what_one_of_them_overflows_on(
    recipe: str, good: list[Batch], tmp_path: Path
) -> None:
    program = [sys.executable, recipe_blocks.__file__, recipe]
    finished = replica_processes.run(replica_processes.under_horovod(program), tmp_path, 60)
    assert finished.codes == [0], str(finished)
    first, second = (json.loads(state) for state in re.findall(r"STATE recipe (.*)", finished.logs[0]))
    # Each takes a batch of a pair; in the second pair there is one that overflows.
    _see_state(first, _trained([_joined(good[:2])]))
    assert first == second


@pytest.mark.skipif(not keras.__version__.startswith("3."), reason="run once, in the lane that has Keras 3")
@_of_recipe(["Several GPUs in each process"])
def test_workers_take_the_mean_and_skip_what_one_of_them_overflows_on(
    recipe: str, good: list[Batch], tmp_path: Path
) -> None:
    program = [sys.executable, recipe_blocks.__file__, recipe]
    finished = replica_processes.run(program, tmp_path, 60, replica_processes.two_workers())
    assert finished.codes == [0, 0], str(finished)
    [first], [second] = finished.states("recipe")
    _see_state(first, _trained(good[:3]))
    assert first == second


def _see_state(state: Any, weights: np.ndarray) -> None:
    trained, loss_scale = state
    _close(np.concatenate(list(map(np.ravel, trained))), weights)
    assert loss_scale == _SCALE / 2


@_of_recipe(["Gradient accumulation", "Drop a step by its norm"])
def test_a_window_or_a_step_is_dropped_and_only_an_overflow_lowers_the_scale(
    recipe: str, names: dict[str, Any], good: list[Batch]
) -> None:
    if recipe == "Gradient accumulation":
        # An overflow drops its window, and the last one has two batches.
        batches = [*good, good[0], overflowing(good[1]), *good[2:], *good[:2]]
        applied, counts = [_joined(good), _joined(good[:2])], [2, 1]
    else:
        # The norm of its gradient is about 20, and the scaled gradient is finite in float16.
        large = (good[1][0], good[1][1] + np.float32(10))
        batches, applied, counts = [large, good[0], overflowing(good[2]), *good[1:]], good, [4, 1]
    names["batches"] = dataset(names, batches)
    run(recipe, names)
    _close(_weights(names["variables"]), _trained(applied))
    assert float(names["scaler"].loss_scale) == _SCALE / 2
    assert [int(count) for count in names["scaler"].manager.get_status()[4:6]] == counts


@_of_recipe(["Saving and resuming"])
def test_a_run_that_is_resumed_equals_the_one_that_was_not(
    recipe: str, names: dict[str, Any], good: list[Batch], tmp_path: Path
) -> None:
    def train(names: dict[str, Any], batches: list[Batch]) -> list[Any]:
        run("Typical training", names | {"batches": dataset(names, batches)})
        return [
            _weights(names["variables"]).tolist(),
            names["scaler"].state_dict(),
            int(names["optimizer"].iterations),
        ]

    names["path"] = str(tmp_path / "run")
    before = train(names, [good[0], overflowing(good[1])])
    run(recipe, names)
    after = train(names, good)
    assert after != before

    resumed = recipe_blocks.set_up()
    resumed["optimizer"].build(resumed["variables"])
    parts = {name: resumed[name] for name in ("model", "optimizer", "scaler")}
    tf.train.Checkpoint(**parts).restore(names["saved"]).assert_existing_objects_matched()
    assert train(resumed, good) == after


@_of_recipe(["Evaluation"])
def test_evaluation_computes_in_float16_and_leaves_the_scaler_alone(
    recipe: str, names: dict[str, Any], good: list[Batch]
) -> None:
    run(recipe, names)
    assert names["outputs"].dtype == tf.float32
    _close(names["outputs"], _design(_joined(good)[0]) @ [[1], [1], [0]])
    # float16 rounds these to 1.
    names["batches"] = dataset(names, [(np.full([4, 2], 1 + 2.0**-12, np.float32), good[0][1])])
    run(recipe, names)
    assert names["outputs"].numpy().tolist() == [[2.0]] * 4
    assert int(names["scaler"].attempted_steps) == 0


@_of_recipe(["Batch replay"])
def test_a_batch_that_overflows_at_a_high_scale_is_applied_once_at_a_lower_one(
    recipe: str, names: dict[str, Any], good: list[Batch]
) -> None:
    run(recipe, names)
    _close(_weights(names["variables"]), _trained(good))
    applied, skipped = int(names["scaler"].applied_steps), int(names["scaler"].skipped_steps)
    assert applied == 4
    assert skipped > 1
    assert float(names["scaler"].loss_scale) == 2.0 ** (20 - skipped)


@_of_recipe(["With and without scaling"])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_disabled_scaler_checks_nothing(recipe: str, mixed: bool, names: dict[str, Any], good: list[Batch]) -> None:
    names["mixed"] = mixed
    names["batches"] = dataset(names, [good[0], (np.full_like(good[1][0], np.inf), good[1][1])])
    run(recipe, names)
    weights = _weights(names["model"].trainable_variables)
    if mixed:
        _close(weights, _trained(good[:1]))
    else:
        assert not np.isfinite(weights).any()
    assert float(names["scaler"].loss_scale) == (_SCALE / 2 if mixed else 1)


def test_recipes_can_be_typed_one_after_the_other(
    tmp_path: Path, two_replicas: tf.distribute.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The strategy that the page makes is for GPUs.
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: two_replicas)
    names: dict[str, Any] = {"path": str(tmp_path / "run"), "mixed": True}
    recipe_blocks.run_in_order(names, without=["One GPU in each process", "Several GPUs in each process"])
    # Each recipe with the optimizer of the set-up takes a step for each of the four batches; a window is one step.
    assert int(names["optimizer"].iterations) == 7 * 4 + 1
    assert int(names["own_optimizer"].iterations) == 4


def test_every_recipe_of_the_page_is_run() -> None:
    marks = [mark for test in globals().values() for mark in getattr(test, "pytestmark", [])]
    run_here = [heading for mark in marks if mark.args[:1] == ("recipe",) for heading in mark.args[1]]
    found = recipe_blocks.recipes()
    assert sorted(run_here) == sorted(found.keys() - {"Set-up"})
    assert {heading for heading, blocks in found.items() if blocks.keys() < {"torch", "tfmp"}} == set()
