"""R14: names of `tf.estimator`, and what needs Estimator."""

import importlib

import pytest

from tests.migrate.rules.rule_cases import RuleCase, cases_of
from tfmp.migrate.rules.tensorflow1.without_estimator import is_hook


@pytest.mark.parametrize("case", cases_of(__file__))
def test_a_script_becomes_what_the_case_says(case: RuleCase) -> None:
    case.check()


def test_a_hook_is_the_same_object_in_both_modules() -> None:
    estimator = pytest.importorskip("tensorflow.compat.v1.estimator", reason="only TensorFlow 2.15 has Estimator")
    train = importlib.import_module("tensorflow.compat.v1").train
    hooks = [name for name in dir(estimator) if is_hook(name)]
    assert "SessionRunHook" in hooks
    assert [name for name in hooks if getattr(estimator, name) is not getattr(train, name)] == []
    assert not is_hook("Estimator")
