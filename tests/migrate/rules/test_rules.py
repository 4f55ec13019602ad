"""What each rule rewrites and reports, in the scripts of all rules, and what holds for every rule and script."""

import libcst
import pytest

from tests.migrate.rules.rule_cases import RuleCase, cases
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding
from tfmp.migrate.edits.rewriting import RewritingError, rewrite
from tfmp.migrate.rules import RULES

_CASES = cases()

_each_case = pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)


@_each_case
def test_a_script_becomes_what_the_case_says_with_its_own_line_ends(case: RuleCase) -> None:
    for newline in ("\n", "\r\n"):
        done = rewrite(case.before.replace("\n", newline))
        assert done.text == case.after.replace("\n", newline)
        assert [f"{one.line}: {one.rule}: {one.level.value}: {one.text}" for one in done.findings] == case.report


@_each_case
def test_a_script_that_was_rewritten_is_not_rewritten_again(case: RuleCase) -> None:
    libcst.parse_module(case.after)
    again = rewrite(case.after)
    assert again.text == case.after
    assert again.changes == ()


def test_every_rule_has_cases_in_a_folder_of_its_name() -> None:
    folders = {case.path.parent.name for case in _CASES.values()}
    assert {rule.__module__.rpartition(".")[2] for rule in RULES} - folders == set()


def test_rules_that_edit_are_called_rewrite_and_the_others_report() -> None:
    scripts = [Script(case.before) for case in _CASES.values()]
    editing = {
        rule for rule in RULES if any(not isinstance(result, Finding) for script in scripts for result in rule(script))
    }
    assert {rule: rule.__name__ for rule in RULES} == {
        rule: "rewrite" if rule in editing else "report" for rule in RULES
    }


_USE = "opt = tf.contrib.mixed_precision.LossScaleOptimizer(opt, manager)\n"


def test_a_script_without_tensorflow_is_not_parsed() -> None:
    assert rewrite("print 1\n").text == "print 1\n"


def test_changes_have_the_lines_of_both_texts() -> None:
    done = rewrite(f"import tensorflow.compat.v1 as tf\n{_USE}")
    assert [(change.line, change.written_line, change.after) for change in done.changes] == [
        (2, 2, "import tfmp\n"),
        (2, 3, "tfmp.LossScaleOptimizer"),
    ]


@pytest.mark.parametrize(
    "own", ["tfmp = 1", "f = lambda tfmp: 1", "from . import tfmp", "import other as tfmp", "class tfmp: pass"]
)
def test_a_script_that_uses_the_name_of_a_needed_package_is_left_alone(own: str) -> None:
    text = f"import tensorflow.compat.v1 as tf\n{own}\n{_USE}"
    done = rewrite(text)
    assert done.text == text
    assert [finding.line for finding in done.findings] == [2]


@pytest.mark.parametrize("other", ["import tfmp", "import tfmp.layers", "a.tfmp = 1", "f(tfmp=1)"])
def test_imports_and_attributes_do_not_hide_a_package(other: str) -> None:
    assert "tfmp.LossScaleOptimizer" in rewrite(f"import tensorflow.compat.v1 as tf\n{other}\n{_USE}").text


def test_a_text_that_libcst_changes_is_refused() -> None:
    with pytest.raises(RewritingError, match="does not give it back"):
        rewrite(f"import tensorflow.compat.v1 as tf\n{_USE}if opt:\n\f    x = 1\n    y = 2\n")


def test_a_script_that_is_mostly_data_is_refused() -> None:
    with pytest.raises(RewritingError, match="more than 100,000 commas"):
        rewrite(f"import tensorflow as tf\nx = [{'1,' * 100_001}]\n")


def test_a_long_string_is_read_at_once() -> None:
    text = f"import tensorflow as tf\nx = {'a' * 1_000_000!r}\n"
    assert rewrite(text).text == text
