"""Tests of the error of the BERT example for a missing package."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from estimator_examples.bert import run_pretraining


def test_missing_packages_are_named_with_the_extra_that_brings_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("tokenizers", "matplotlib") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert run_pretraining.main([]) == 2
    message = (
        "error: this example needs tokenizers, matplotlib: install tfmp with its extra, "
        "e.g. `pip install '.[examples]'` from the clone."
    )
    assert message in capsys.readouterr().err
