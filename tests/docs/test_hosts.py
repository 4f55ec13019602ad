"""The tables of what each host has are true of real objects."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from kerases import kinds

import tfmp

_PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "hosts.md").read_text()
_HOSTS = ("TF1", "Keras 2", "Keras legacy", "Keras 3", "GradScaler")


def _objects() -> Iterator[tuple[str, Any]]:
    yield "TF1", tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), 8)
    yield "GradScaler", tfmp.GradScaler()
    for kind, (_, optimizers) in kinds().items():
        host = "Keras legacy" if kind.endswith("legacy") else "Keras 3" if kind == "keras3" else "Keras 2"
        yield host, tfmp.LossScaleOptimizer(optimizers.Adam())


_OBJECTS = dict(_objects())
for _object in _OBJECTS.values():
    # Otherwise there is no `gradient_norm`.
    _object.record_gradient_norm()

_each_host = pytest.mark.parametrize("host", _OBJECTS)


def _table(heading: str, host: str) -> dict[str, str]:
    """Return the cells of a host, by the names in the first column."""
    section = _PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"(?m)^\|.*\|$", section)]
    assert rows[0][1:] == list(_HOSTS)
    cells = [(name, row[1 + _HOSTS.index(host)]) for row in rows[2:] for name in re.findall(r"`(\w+)`", row[0])]
    assert len(cells) == len(dict(cells))
    return dict(cells)


def _of_tfmp(obj: object) -> set[str]:
    """Return the public names that tfmp's own classes define for an object."""
    classes = [each for each in type(obj).__mro__ if each.__module__.startswith("tfmp.")]
    return {name for each in classes for name in vars(each) if not name.startswith("_")}


def _is_error(obj: object, name: str) -> bool:
    """Return whether tfmp refuses the use of an attribute, where it is read or where it is called."""
    if name not in _of_tfmp(obj):
        return False
    if not hasattr(obj, name):
        return True
    value = getattr(obj, name)
    if not callable(value) or isinstance(value, type):
        return False
    try:
        value({})
    except NotImplementedError:
        return True
    except Exception:
        return False
    return False


@_each_host
def test_every_method_and_attribute_is_what_the_table_says(host: str) -> None:
    obj = _OBJECTS[host]
    found = {}
    for name, said in _table("Methods and attributes", host).items():
        if said in {"error", ""}:
            found[name] = "error" if _is_error(obj, name) else "yes" if hasattr(obj, name) else ""
        else:
            keras_only = hasattr(obj, name) and name not in _of_tfmp(obj)
            found[name] = said if keras_only or (said == "yes" and hasattr(obj, name)) else "not so"
    assert found == _table("Methods and attributes", host)


@_each_host
def test_the_table_has_every_public_name_that_tfmp_adds(host: str) -> None:
    assert _of_tfmp(_OBJECTS[host]) - _table("Methods and attributes", host).keys() == set()


@_each_host
def test_every_argument_is_what_the_table_says(host: str) -> None:
    said = {name for name, cell in _table("Arguments of the constructor", host).items() if cell == "yes"}
    # Each class of a front-end takes some of them. The public class has those of all hosts.
    taken = set()
    for each in type(_OBJECTS[host]).__mro__:
        if each.__module__.startswith("tfmp.") and "__init__" in vars(each) and each is not tfmp.LossScaleOptimizer:
            found = inspect.signature(vars(each)["__init__"]).parameters.values()
            taken |= {one.name for one in found if one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}} - {"self"}
    assert said == taken
    assert host == "GradScaler" or taken <= inspect.signature(tfmp.LossScaleOptimizer).parameters.keys()
