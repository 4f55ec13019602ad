"""Runs the doctests of the examples' modules."""

import doctest
import importlib

import pytest

MODULES = (
    "bert.corpus",
    "bert.history",
    "bert.outline",
    "bert.report",
    "bert.vocabulary",
    "digits_gan.picture",
    "digits_gan.quality",
    "digits_gan.report",
)

NEEDED = {
    "bert.outline": ("matplotlib", "tokenizers"),
    "bert.report": ("matplotlib", "tokenizers"),
    "bert.vocabulary": ("tokenizers",),
    "digits_gan.picture": ("matplotlib",),
}


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_tell_the_truth(name: str) -> None:
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    results = doctest.testmod(importlib.import_module(f"estimator_examples.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
