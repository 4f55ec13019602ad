"""Reads the recipes of docs/howto/recipes.md, and runs what they say.

As a program it runs one recipe as a process among others, with an infinite batch for the last of the steps, and prints
its weights and its loss scale:

    PYTHONPATH=. horovodrun -np 2 python tests/docs/recipe_blocks.py "One GPU in each process"
"""

import ast
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_PAGE = Path(__file__).parents[2] / "docs" / "howto" / "recipes.md"

#: Rows in a batch.
ROWS = 4

_SET_UP = "Set-up"

#: Recipes whose functions others call.
_WITH_FUNCTIONS = ("Typical training", "Several GPUs in one process")

#: A batch: the features and the targets.
Batch = tuple[np.ndarray, np.ndarray]


def recipes() -> dict[str, dict[str, list[ast.stmt]]]:
    """Return the statements of each recipe, by its heading, and within by "torch" or "tfmp", or "both"."""
    page = _PAGE.read_text()
    headings = list(re.finditer(r"(?m)^## (.*)$", page))
    found: dict[str, dict[str, list[ast.stmt]]] = {}
    for block in re.finditer(r"(?ms)^```python\n(# (\w+)\n.*?)^```$", page):
        heading = [each for each in headings if each.start() < block.start()][-1].group(1)
        tree = ast.parse(block.group(1))
        # The lines of the page, for tracebacks, and for AutoGraph, which reads the code of functions there.
        ast.increment_lineno(tree, page.count("\n", 0, block.start(1)))
        found.setdefault(heading, {})[block.group(2)] = tree.body
    return found


def set_up() -> dict[str, Any]:
    """Return the names that the page's set-up makes, and the functions that several recipes call."""
    names: dict[str, Any] = {}
    found = recipes()
    _execute([*found[_SET_UP]["both"], *found[_SET_UP]["tfmp"]], names)
    for heading in _WITH_FUNCTIONS:
        _execute([each for each in found[heading]["tfmp"] if isinstance(each, ast.FunctionDef)], names)
    return names


def run(heading: str, names: dict[str, Any]) -> None:
    """Run a recipe of tfmp, which knows some names, and leaves among them what it makes."""
    _execute(recipes()[heading]["tfmp"], names)


def run_in_order(names: dict[str, Any], *, without: Sequence[str]) -> None:
    """Run all recipes of tfmp one after the other, as the page has them, but for those with some headings."""
    for heading, blocks in recipes().items():
        if heading not in without:
            _execute([*blocks.get("both", []), *blocks["tfmp"]], names)


def run_with_strategy(heading: str, names: dict[str, Any], strategy: Any = None) -> None:
    """Run a recipe that makes a strategy, or with another one, on batches of which one overflows on a replica."""
    *_, make, train = recipes()[heading]["tfmp"]
    if strategy is None:
        names["tf"] = importlib.import_module("tensorflow")
        _execute([make], names)
        strategy = names["strategy"]
    names |= set_up()
    names |= {"strategy": strategy, "batches": dataset(names, shared_batches(names))}
    _execute([train], names)


def _execute(statements: Sequence[ast.stmt], names: dict[str, Any]) -> None:
    exec(compile(ast.Module([*statements], []), str(_PAGE), "exec"), names)


def dataset(names: dict[str, Any], batches: Sequence[Batch]) -> Any:
    """Return batches, of the same size but for the last, as the page's set-up makes them."""
    features, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return names["tf"].data.Dataset.from_tensor_slices((features, targets)).batch(len(batches[0][0]))


def batches_of_page(names: dict[str, Any]) -> list[Batch]:
    """Return the batches that the set-up made."""
    return [(features.numpy(), targets.numpy()) for features, targets in names["batches"]]


def overflowing(batch: Batch, row: int = 0) -> Batch:
    """Return a batch that is finite in float32, and infinite in float16 in one of its rows."""
    features, targets = batch
    factors = np.ones_like(features)
    factors[row] = 1e6
    return features * factors + factors - 1, targets


def shared_batches(names: dict[str, Any]) -> list[Batch]:
    """Return what two processes train on, of whose batches one overflows, in a row of the second process."""
    first, second, third, fourth = batches_of_page(names)
    return [first, second, third, overflowing(fourth, ROWS - 1)]


def _main(heading: str) -> None:
    names: dict[str, Any] = {}
    model, scaler = "model", "scaler"
    if heading == "Several GPUs in each process":
        run_with_strategy(heading, names)
        model, scaler = "parallel", "parallel_scaler"
    else:
        names = set_up()
        names["batches"] = dataset(names, shared_batches(names))
        run(heading, names)
    weights = [variable.numpy().tolist() for variable in names[model].trainable_variables]
    print("STATE recipe", json.dumps([weights, float(names[scaler].loss_scale)]), flush=True)  # noqa: T201 - its result


if __name__ == "__main__":
    _main(sys.argv[1])
