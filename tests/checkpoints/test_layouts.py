"""Among the saved values, each loss scale is found with the counters that belong to it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import systems

import tfmp
from tfmp.checkpoints.files import SavedObject, SavedRun
from tfmp.checkpoints.layouts import FoundScale, find_scales

pytestmark = pytest.mark.graph

_CONTRIB = "tf.contrib.mixed_precision or tfmp"
_TENSORFLOW = "TensorFlow's MixedPrecisionLossScaleOptimizer"
_KERAS2 = "Keras 2's LossScaleOptimizer"
_KERAS3 = "Keras 3's LossScaleOptimizer"
_COUNTERS = ("good_steps", "bad_steps")
_STATE = ("loss_scale", *_COUNTERS)


def test_managers_of_several_classes_are_not_taken_for_each_other_in_a_checkpoint_of_a_saver(tmp_path: Path) -> None:
    makers = [systems.own_manager, systems.log_max_manager]
    path = systems.train_in_session(lambda opt: systems.own(opt, makers.pop()), tmp_path, optimizers=2)
    with pytest.raises(ValueError, match=r"the scales loss_scale, loss_scale_1 of managers of several classes"):
        tfmp.checkpoints.read_loss_scale_state(path)


def _found_in(keys: dict[str, Any]) -> list[FoundScale]:
    return find_scales(SavedRun("model", sorted(keys), keys))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["loss_scale", "good_steps", "bad_steps"], [(_CONTRIB, "loss_scale", "good_steps", "bad_steps")]),
        # The legacy files of Keras, and its weights files.
        *(
            (
                [f"{before}{name}{behind}" for name in _STATE],
                [("tfmp", *(f"{before}{name}{behind}" for name in _STATE))],
            )
            for before, behind in [("optimizer_weights/opt/", ":0"), ("m/optimizer/_loss_scale_state/vars/", "")]
        ),
        (["loss_scale", "good_steps", "log_mean"], [("tfmp", "loss_scale", "good_steps", None)]),
        # Variables that look like those of another manager change nothing.
        (
            ["loss_scale", "good_steps", "bad_steps", "log_mean", "margin"],
            [(_CONTRIB, "loss_scale", "good_steps", "bad_steps")],
        ),
        (["current_loss_scale", "good_steps"], [(_TENSORFLOW, "current_loss_scale", "good_steps", None)]),
        (["opt/dynamic_scale", "opt/step_counter"], [(_KERAS3, "opt/dynamic_scale", "opt/step_counter", None)]),
        # The n-th scale has the n-th counter, in the order of the numbers, not of the letters.
        (
            [*(f"loss_scale{n}" for n in ("_10", "_9")), *(f"{name}{n}" for name in _COUNTERS for n in ("", "_1"))],
            [
                (_CONTRIB, "loss_scale_9", "good_steps", "bad_steps"),
                (_CONTRIB, "loss_scale_10", "good_steps_1", "bad_steps_1"),
            ],
        ),
        # Systems in several scopes, of which one has no counter.
        (
            ["b/dynamic_scale", "b/step_counter", "c/loss_scale", "a/current_loss_scale", "a/good_steps", "good_steps"],
            [
                (_TENSORFLOW, "a/current_loss_scale", "a/good_steps", None),
                (_KERAS3, "b/dynamic_scale", "b/step_counter", None),
            ],
        ),
        # Counters belong to the scale of their scope and turn, also if their own numbers differ.
        (
            [
                *("a/b/loss_scale_2", "a/b/good_steps", "a/b/bad_steps", "loss_scale/value", "loss_scale_3/value"),
                *(f"{name}{turn}/value" for name in _COUNTERS for turn in ("", "_1")),
            ],
            [
                (_CONTRIB, "loss_scale/value", "good_steps/value", "bad_steps/value"),
                (_CONTRIB, "loss_scale_3/value", "good_steps_1/value", "bad_steps_1/value"),
                (_CONTRIB, "a/b/loss_scale_2", "a/b/good_steps", "a/b/bad_steps"),
            ],
        ),
        (["loss_scale", "w"], []),
        (["loss_scale", "loss_scale_1", "good_steps", "bad_steps"], []),
        (["loss_scale", "good_steps/value", "bad_steps"], []),
        (["loss_scale-1", "good_steps", "bad_steps"], []),
    ],
)
def test_scale_and_counters_are_found_by_their_names(keys: list[str], expected: list[tuple[Any, ...]]) -> None:
    assert _found_in(dict.fromkeys(keys, np.float32(1))) == expected


#: The letters by which the module writes types.
_TYPES = {"f": np.float32(0), "i": np.int32(0), "l": np.int64(0), "b": np.bool_(True)}


def _at_positions(place: str, types: str) -> dict[str, Any]:
    return {f"{place}/vars/{index}": _TYPES[kind] for index, kind in enumerate(types)} | {
        f"{place}/inner_optimizer/vars/0": np.int64(0)
    }


@pytest.mark.parametrize(
    ("types", "writer", "scale", "good", "bad"),
    [
        ("lfif", _KERAS3, 3, 2, None),
        ("iflfff", _KERAS3, 3, 2, None),
        ("fiilllb", "tfmp", 0, 1, 2),
        ("fiiilllb", "tfmp", 0, 1, 2),
        ("lffiilllbff", "tfmp", 2, 3, 4),
        ("iffiiilllb", "tfmp", 2, 3, 4),
        ("fffiiilllb", "tfmp", 0, 5, None),
        ("lffffiiilllb", "tfmp", 2, 7, None),
    ],
)
def test_scale_of_a_wrapper_is_found_by_the_types_of_its_variables(
    types: str, writer: str, scale: int, good: int, bad: int | None
) -> None:
    at = "optimizer/vars/"
    expected = FoundScale(writer, f"{at}{scale}", f"{at}{good}", None if bad is None else f"{at}{bad}")
    assert _found_in(_at_positions("optimizer", types)) == [expected]


def test_types_are_looked_at_only_where_a_wrapper_saved_no_names() -> None:
    assert _found_in(_at_positions("optimizer", "lff")) == []
    without = _at_positions("optimizer", "lfif")
    del without["optimizer/inner_optimizer/vars/0"]
    assert _found_in(without) == []
    # Of the three wrappers the second has names.
    keys = _at_positions("c", "lfif") | _at_positions("b", "lfif") | _at_positions("a", "fiilllb")
    keys |= {f"b/_loss_scale_state/vars/{name}": np.float32(1) for name in ("loss_scale", *_COUNTERS)}
    assert [(each.writer, each.scale) for each in _found_in(keys)] == [
        ("tfmp", "b/_loss_scale_state/vars/loss_scale"),
        ("tfmp", "a/vars/0"),
        (_KERAS3, "c/vars/3"),
    ]


def _object(key: str | None = None, **children: int) -> SavedObject:
    return SavedObject(children, key)


@pytest.mark.parametrize(
    ("names", "holder", "expected"),
    [
        (["loss_scale", "good_steps", "bad_steps"], {}, ("tfmp", "loss_scale", "good_steps", "bad_steps")),
        (["loss_scale", "good_steps", "log_mean"], {}, ("tfmp", "loss_scale", "good_steps", None)),
        (["current_loss_scale", "good_steps"], {}, (_TENSORFLOW, "current_loss_scale", "good_steps", None)),
        (["dynamic_scale", "step_counter"], {}, (_KERAS3, "dynamic_scale", "step_counter", None)),
        (["loss_scale", "good_steps"], {}, None),
        # Keras 2's own scale is TensorFlow's, held by an optimizer that counts its steps.
        *(
            (["current_loss_scale", "good_steps"], holder, (writer, "current_loss_scale", "good_steps", None))
            for holder, writer in [
                ({"loss_scale": 0, "_iterations": 1}, _KERAS2),
                ({"loss_scale": 0, "iter": 1}, _KERAS2),
                ({"loss_scale": 0}, _TENSORFLOW),
                ({"loss_scale": 1, "iter": 1}, _TENSORFLOW),
                ({"scale": 0, "iter": 1}, _TENSORFLOW),
            ]
        ),
    ],
)
def test_scale_and_counters_are_found_among_the_attributes_of_an_object(
    names: list[str], holder: dict[str, int], expected: tuple[Any, ...] | None
) -> None:
    attributes = {name: index for index, name in enumerate([*names, "other"], 1)}
    objects = [_object(**attributes), *map(_object, names), _object(), _object(**holder)]
    found = find_scales(SavedRun("model", names, dict.fromkeys(names, np.float32(1)), objects))
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("scales", "bad", "marks", "found"),
    [(2, 1, 1, None), (3, 1, 2, None), (3, 2, 1, None), (2, 2, 2, 2), (2, 0, 2, 2), (2, 1, 2, 2), (2, 1, 0, 0)],
)
def test_scales_are_refused_if_each_manager_has_bad_steps_or_a_mean_and_not_all_have_the_same(
    scales: int, bad: int, marks: int, found: int | None
) -> None:
    counts = {"loss_scale": scales, "good_steps": scales, "bad_steps": bad, "log_mean": marks}
    keys = [f"{name}_{number}" for name, count in counts.items() for number in range(count)]
    if found is None:
        with pytest.raises(ValueError, match=r"model holds the scales loss_scale_0, .* of managers of several classes"):
            _found_in(dict.fromkeys(keys, np.float32(1)))
    else:
        assert len(_found_in(dict.fromkeys(keys, np.float32(1)))) == found
