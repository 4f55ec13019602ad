"""Among the saved values, each loss scale is found with the counters that belong to it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tfmp.checkpoints.files import SavedObject, SavedRun
from tfmp.checkpoints.states import states_in

pytestmark = pytest.mark.graph

_CONTRIB = "tf.contrib.mixed_precision or tfmp"
_TENSORFLOW = "TensorFlow's MixedPrecisionLossScaleOptimizer"
_KERAS2 = "Keras 2's LossScaleOptimizer"
_KERAS3 = "Keras 3's LossScaleOptimizer"
_COUNTERS = ("good_steps", "bad_steps")
_STATE = ("loss_scale", *_COUNTERS)


def _found_in(values: dict[str, Any], objects: list[SavedObject] | None = None) -> list[tuple[Any, ...]]:
    """Return the writers of what is found among values of these types, and the keys of the scales and counters."""
    keys = dict(enumerate(values, 1))
    scalars = {key: type(values[key])(number) for number, key in keys.items()}
    found = states_in(SavedRun("model", sorted(scalars), scalars, objects))
    assert [keys[int(each.loss_scale)] for each in found] == [each.key for each in found]
    return [(each.writer, each.key, keys[each.good_steps], keys.get(each.bad_steps)) for each in found]


def _named(writer: str, template: str = "{}", names: Sequence[str] = _STATE) -> tuple[Any, ...]:
    """Return what is found: the names of a scale and its counters in a template; None for a counter there is not."""
    return (writer, *map(template.format, names), *[None] * (3 - len(names)))


_OF_TENSORFLOW, _OF_KERAS3 = ("current_loss_scale", "good_steps"), ("dynamic_scale", "step_counter")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (_STATE, [_named(_CONTRIB)]),
        # The legacy files of Keras, and its weights files.
        *(
            ([template.format(name) for name in _STATE], [_named("tfmp", template)])
            for template in ("optimizer_weights/opt/{}:0", "m/optimizer/_loss_scale_state/vars/{}")
        ),
        (["loss_scale", "good_steps", "log_mean"], [_named("tfmp", names=_STATE[:2])]),
        # Variables that look like those of another manager change nothing.
        ([*_STATE, "log_mean", "margin"], [_named(_CONTRIB)]),
        (_OF_TENSORFLOW, [_named(_TENSORFLOW, names=_OF_TENSORFLOW)]),
        ([f"opt/{name}" for name in _OF_KERAS3], [_named(_KERAS3, "opt/{}", _OF_KERAS3)]),
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
            [
                *(f"b/{name}" for name in _OF_KERAS3),
                "c/loss_scale",
                *(f"a/{name}" for name in _OF_TENSORFLOW),
                "good_steps",
            ],
            [_named(_TENSORFLOW, "a/{}", _OF_TENSORFLOW), _named(_KERAS3, "b/{}", _OF_KERAS3)],
        ),
        # Counters belong to the scale of their scope and turn, also if their own numbers differ.
        (
            [
                *("a/b/loss_scale_2", "a/b/good_steps", "a/b/bad_steps", "loss_scale/value", "loss_scale_3/value"),
                *(f"{name}{turn}/value" for name in _COUNTERS for turn in ("", "_1")),
            ],
            [
                _named(_CONTRIB, "{}/value"),
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
def test_scale_and_counters_are_found_by_their_names(keys: Sequence[str], expected: list[tuple[Any, ...]]) -> None:
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
def test_scale_of_a_wrapper_is_found_by_types(types: str, writer: str, scale: int, good: int, bad: int | None) -> None:
    at = "optimizer/vars/"
    expected = (writer, f"{at}{scale}", f"{at}{good}", None if bad is None else f"{at}{bad}")
    assert _found_in(_at_positions("optimizer", types)) == [expected]


def test_types_are_looked_at_only_where_a_wrapper_saved_no_names() -> None:
    assert _found_in(_at_positions("optimizer", "lff")) == []
    without = _at_positions("optimizer", "lfif")
    del without["optimizer/inner_optimizer/vars/0"]
    assert _found_in(without) == []
    # Of the three wrappers the second has names.
    keys = _at_positions("c", "lfif") | _at_positions("b", "lfif") | _at_positions("a", "fiilllb")
    keys |= {f"b/_loss_scale_state/vars/{name}": np.float32(1) for name in ("loss_scale", *_COUNTERS)}
    assert [found[:2] for found in _found_in(keys)] == [
        ("tfmp", "b/_loss_scale_state/vars/loss_scale"),
        ("tfmp", "a/vars/0"),
        (_KERAS3, "c/vars/3"),
    ]


@pytest.mark.parametrize(
    ("names", "holder", "expected"),
    [
        (_STATE, {}, _named("tfmp")),
        (["loss_scale", "good_steps", "log_mean"], {}, _named("tfmp", names=_STATE[:2])),
        (_OF_TENSORFLOW, {}, _named(_TENSORFLOW, names=_OF_TENSORFLOW)),
        (_OF_KERAS3, {}, _named(_KERAS3, names=_OF_KERAS3)),
        (["loss_scale", "good_steps"], {}, None),
        # Keras 2's own scale is TensorFlow's, held by an optimizer that counts its steps.
        *(
            (_OF_TENSORFLOW, holder, _named(writer, names=_OF_TENSORFLOW))
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
def test_scale_is_found_among_the_attributes_of_an_object(
    names: Sequence[str], holder: dict[str, int], expected: Any
) -> None:
    attributes = {name: index for index, name in enumerate([*names, "other"], 1)}
    values = [SavedObject({}, name) for name in (*names, None)]
    objects = [SavedObject(attributes, None), *values, SavedObject(holder, None)]
    found = _found_in(dict.fromkeys(names, np.float32(1)), objects)
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("scales", "bad", "marks", "found"),
    [(2, 1, 1, None), (3, 1, 2, None), (3, 2, 1, None), (2, 2, 2, 2), (2, 0, 2, 2), (2, 1, 2, 2), (2, 1, 0, 0)],
)
def test_scales_of_managers_of_several_classes_are_refused(
    scales: int, bad: int, marks: int, found: int | None
) -> None:
    counts = {"loss_scale": scales, "good_steps": scales, "bad_steps": bad, "log_mean": marks}
    keys = [f"{name}_{number}" for name, count in counts.items() for number in range(count)]
    if found is None:
        with pytest.raises(ValueError, match=r"model holds the scales loss_scale_0, .* of managers of several classes"):
            _found_in(dict.fromkeys(keys, np.float32(1)))
    else:
        assert len(_found_in(dict.fromkeys(keys, np.float32(1)))) == found
