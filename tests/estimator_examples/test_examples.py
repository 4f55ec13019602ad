"""What all examples have in common: the packages that they name, and the doctests."""

import doctest
import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest

from estimator_examples.bert import run_pretraining

EXTRA = "install tfmp with its extra, e.g. `pip install '.[examples]'` from the clone"


@pytest.mark.parametrize(
    ("name", "package"),
    [
        *((name, "sklearn") for name in ("digits_session", "digits_keras", "digits_spikes", "digits_gan.__main__")),
        *(("digits_gan.__main__", package) for package in ("matplotlib", "tqdm")),
    ],
)
def test_without_a_package_the_extra_that_brings_it_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert importlib.import_module(f"estimator_examples.{name}").main([]) == 2
    assert EXTRA in capsys.readouterr().err


def test_missing_packages_of_the_bert_example_are_named_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("tokenizers", "matplotlib") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert run_pretraining.main([]) == 2
    assert f"error: this example needs tokenizers, matplotlib: {EXTRA}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("bert.corpus", ()),
        ("bert.history", ()),
        ("bert.outline", ("matplotlib", "tokenizers")),
        ("bert.report", ("matplotlib", "tokenizers")),
        ("bert.vocabulary", ("tokenizers",)),
        ("digits_gan.picture", ("matplotlib",)),
        ("digits_gan.quality", ()),
        ("digits_gan.report", ()),
    ],
)
def test_docstrings_tell_the_truth(name: str, needed: tuple[str, ...]) -> None:
    for package in needed:
        pytest.importorskip(package)
    results = doctest.testmod(importlib.import_module(f"estimator_examples.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
