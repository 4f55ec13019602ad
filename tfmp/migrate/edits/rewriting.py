"""Applies all rules to one script."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tfmp.migrate.analysis.project_role import ProjectRole, project_role
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits import import_edits, results
from tfmp.migrate.rules import RULES, removed_names
from tfmp.migrate.tables.api_names import Standing, standing
from tfmp.migrate.tables.contrib_successors import is_package

# A script without any of these words is not parsed.
_WORDS = ("tensorflow", "npu_bridge", "hccl", "TF_ENABLE_AUTO_MIXED_PRECISION")
# Another file may bind `tf`, or another name, to TensorFlow. Then one of these is behind it.
_BEHIND_TF = re.compile(r"\btf\s*\.\s*(\w[\w.]*)")
_OF_CONTRIB = re.compile(r"\bcontrib\s*\.\s*(\w+)")
_OF_TRAIN = re.compile(r"\.\s*(train\s*\.\s*\w+Optimizer)\b")
# An item of a list takes LibCST a tenth of a millisecond and five kilobytes. People write less than 10,000 commas.
_MOST_COMMAS = 100_000
_HIDING = (
    "{name} is a name of the script's own, and would hide the package {name}: left alone. Give it another name, and "
    "rewrite the script then."
)


class Change(NamedTuple):
    """An edit as the report shows it: the text that a rule removes, and the text that it inserts."""

    rule: str
    line: int  #: The line of the original script in which the edit starts, from 1.
    before: str
    after: str
    written_line: int  #: The line of the rewritten script in which the edit starts.


class RewritingError(Exception):
    """A script cannot be rewritten; the message says why."""


class Rewritten(NamedTuple):
    """The result of rewriting one script: the whole new text, and the changes and findings in the order of the text."""

    text: str
    changes: tuple[Change, ...]
    findings: tuple[results.Finding, ...]  #: Their lines are lines of the original text.
    role: ProjectRole | None = None  #: The role of the original script; None if it does not concern any rule.


def rewrite(
    text: str, tensorflow: int | None = None, star_names: Mapping[str, frozenset[str]] = MappingProxyType({})
) -> Rewritten:
    """Apply all rules to a script: rewrite what is certain, and report the rest.

    Args:
        text: The whole script.
        tensorflow: The TensorFlow version, 1 or 2, of a script that does not show its version; None to leave such a
            script alone.
        star_names: The names that star imports of the project's files bind, by the module as the script writes it.

    Returns:
        The rewritten script with its changes and findings. The text is the same if no rule edits it.

    Raises:
        libcst.ParserSyntaxError: It is not Python 3. A script that has nothing to do with TensorFlow is not parsed.
        RewritingError: The script cannot be rewritten: it is mostly data, or this package or LibCST has a defect.

    Examples:
        >>> done = rewrite('''import tensorflow.compat.v1 as tf
        ... opt = tf.contrib.mixed_precision.LossScaleOptimizer(opt, manager)
        ... ''')
        >>> print(done.text.rstrip())
        import tensorflow.compat.v1 as tf
        import tfmp
        opt = tfmp.LossScaleOptimizer(opt, manager)
        >>> [(change.rule, change.line) for change in done.changes]
        [('R2', 2), ('R2', 2)]
    """
    if not concerns(text) and not (removed_names.is_mentioned_in(text) and _compiles(text)):
        return Rewritten(text, (), ())
    if text.count(",") > _MOST_COMMAS:
        raise RewritingError(
            f"it has more than {_MOST_COMMAS:,} commas, which can take minutes and gigabytes of memory: move its data "
            "to a file of another format, such as .npy, and run this again"
        )
    script = Script(text, tensorflow, star_names)
    found = [result for rule in RULES for result in rule(script)]
    needed = [result for result in found if isinstance(result, results.NeededImport)]
    moved = [result for result in found if isinstance(result, results.MovedNames)]
    edits = [result for result in found if isinstance(result, results.Edit)]
    edits = [*import_edits.add_imports(script, needed, edits), *import_edits.move_names(script, moved), *edits]
    edits.sort(key=lambda edit: (edit.start, edit.end))
    findings = {result for result in found if isinstance(result, results.Finding)}
    hidden = _hidden(script, needed)
    if hidden:
        edits, findings = [], findings.union(hidden)
    in_order = tuple(sorted(findings, key=lambda finding: (finding.line, finding.rule, finding.text)))
    if edits or findings:
        _check_positions(script)
    changes = _changes(text, edits)
    rewritten = _applied(text, edits)
    if edits and _compiles(text) and not _compiles(rewritten):
        raise RewritingError("it would not be Python after the rewrite: this is a defect of tfmp, report it")
    return Rewritten(rewritten, changes, in_order, project_role(script))


def concerns(text: str) -> bool:
    """Tell whether a script has a word that can concern a rule. Its `tf` may come from another file."""
    old = (name for pattern in (_BEHIND_TF, _OF_TRAIN) for name in pattern.findall(text))
    return (
        any(word in text for word in _WORDS)
        or any(standing(name) is Standing.OLD for name in old)
        or any(map(is_package, _OF_CONTRIB.findall(text)))
    )


def _check_positions(script: Script) -> None:
    """Raise if LibCST does not reproduce the text, because then its positions are wrong too."""
    code = script.module.code
    # LibCST drops a lone carriage return at the end of the text, which shifts no position.
    if script.text not in (code, f"{code}\r"):
        raise RewritingError(
            "LibCST, which parses it, does not give it back as it is; form feeds in its indentation may be why"
        )


def _compiles(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            # Warnings about the script's own code, such as invalid escapes, must not appear.
            warnings.simplefilter("ignore")
            compile(text, "<script>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _applied(text: str, edits: Iterable[results.Edit]) -> str:
    pieces: list[str] = []
    done, by = 0, ""
    for edit in edits:
        if edit.start < done:
            raise RewritingError(
                f"rules {by} and {edit.rule} would both change {text[edit.start : edit.end]!r}: this is a defect of "
                "tfmp, report it"
            )
        pieces += [text[done : edit.start], edit.text]
        done, by = edit.end, edit.rule
    return "".join([*pieces, text[done:]])


def _changes(text: str, edits: Iterable[results.Edit]) -> tuple[Change, ...]:
    changes, moved = [], 0
    for edit in edits:
        before, line = text[edit.start : edit.end], _newlines(text[: edit.start]) + 1
        # If the text does not end with a newline, an inserted line starts with one.
        lead = 0 if before else _newlines(edit.text[: len(edit.text) - len(edit.text.lstrip("\r\n"))])
        changes.append(Change(edit.rule, line, before, edit.text, line + moved + lead))
        moved += _newlines(edit.text) - _newlines(before)
    return tuple(changes)


def _hidden(script: Script, needed: Sequence[results.NeededImport]) -> list[results.Finding]:
    """Return a finding for each name of the script that would hide a package which the edits import."""
    rules = {one.module.partition(".")[0]: one.rule for one in reversed(needed)}
    packages = {one.alias for one in script.imports if one.raw.partition(".")[0] == one.bound}
    return [
        results.Finding(rule, script.line(each.node), results.Level.FAILS, _HIDING.format(name=name))
        for name, rule in rules.items()
        for bound in script.scopes.bound(name).values()
        for each in bound
        if each.node not in packages
    ]


def _newlines(text: str) -> int:
    return text.count("\n") + text.count("\r") - text.count("\r\n")
