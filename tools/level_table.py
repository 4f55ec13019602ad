"""Prints the table of docs/howto/levels.md: what each class of Keras' layers does at each level of precision.

`python -m tools.level_table keras tf_keras` prints it for both.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

from tfmp.core.dtypes import HALF_TYPES_BY_NAME
from tfmp.mixed_precision.levels.level import level_of, policy_of

#: What Keras computes in float32 under its mixed policies, and returns in half precision.
_FLOAT32_INSIDE = ("BatchNormalization", "LayerNormalization")

#: Layers that compute what the layers in them compute.
_HOLD_LAYERS = ("Bidirectional", "Pipeline", "RNN", "StackedRNNCells", "TimeDistributed")

#: Layers of strings and integers.
_WITHOUT_FLOATS = (
    "Discretization",
    "HashedCrossing",
    "Hashing",
    "IntegerLookup",
    "MaxNumBoundingBoxes",
    "StringLookup",
    "TextVectorization",
)

#: What is no layer of a model.
_LEFT_OUT = ("InputLayer", "InputSpec", "Layer", "Wrapper")


def rows(keras: ModuleType) -> dict[str, tuple[str, ...]]:
    """Return what each class of layers computes at O1, O2 and O3, by its name.

    Args:
        keras: The package `keras` or `tf_keras`.

    Examples:
        >>> import keras
        >>> rows(keras)["Softmax"]
        ('float32', 'half', 'half')
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(dir(keras.layers)):
        layer = getattr(keras.layers, name)
        is_layer = isinstance(layer, type) and issubclass(layer, keras.layers.Layer)
        # Other names of a class are left out.
        if is_layer and layer.__name__.removesuffix("V2") == name and name not in _LEFT_OUT:
            found[name] = tuple(_cell(keras, layer, level) for level in ("O1", "O2", "O3"))
    return found


def _cell(keras: ModuleType, layer: type, level: str) -> str:
    name = layer.__name__
    if name in _WITHOUT_FLOATS:
        return "no floats"
    if name in _HOLD_LAYERS:
        return "as its layers"
    nearest = {
        half: policy_of(keras, layer, {"interpolation": "nearest"}, level_of(f"{level}-{half}"))
        for half in HALF_TYPES_BY_NAME
    }
    if set(nearest.values()) == {"float32"}:
        return "float32"
    for half in HALF_TYPES_BY_NAME:
        if nearest[half] == "float32":
            return f"float32 instead of {half}"
    if policy_of(keras, layer, {}, level_of(level)) == "float32":
        return "half for the nearest pixel, otherwise float32"
    return "float32, result half" if name in _FLOAT32_INSIDE else "half"


def table(packages: Iterable[ModuleType]) -> str:
    """Return the table for several Kerases as Markdown, with a row for all layers that do the same.

    Args:
        packages: The packages `keras` and `tf_keras`, or one of them.
    """
    found: dict[str, tuple[str, ...]] = {}
    for keras in packages:
        found.update(rows(keras))
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, cells in sorted(found.items()):
        groups.setdefault(cells, []).append(name)
    lines = [f"| {' | '.join([', '.join(names), *cells])} |" for cells, names in sorted(groups.items())]
    return "\n".join(["| layers | O1 | O2 | O3 |", "|---|---|---|---|", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table.

    Args:
        argv: The names of the packages; None means the command line's.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.level_table", description=__doc__)
    parser.add_argument("packages", nargs="+", choices=("keras", "tf_keras"))
    print(table(importlib.import_module(name) for name in parser.parse_args(argv).packages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
