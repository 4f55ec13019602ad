"""Formats the reports of the files as text for a person: what is left to do, worst first."""

import linecache
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO

from tfmp.migrate.cli.json_report import file_totals, order, rule_totals
from tfmp.migrate.cli.processing import FileReport
from tfmp.migrate.edits.results import Finding, Level

#: The levels that leave something to do.
TO_DO = (Level.WRONG, Level.FAILS)

_TITLES = {
    Level.WRONG: "Trains wrongly without an error",
    Level.FAILS: "Fails, or was not processed",
    Level.NOTE: "Good to know",
}
_COLOURS = {Level.WRONG: "1;31", Level.FAILS: "1;33", Level.NOTE: "1;36"}
_DIFF_COLOURS = {"+": "32", "-": "31", "@": "36"}
_NOT_DONE = "not done"
_LONGEST_DETAIL = 600
_LONGEST_CODE = 100
_SHORTEST_CODE = 30


class Style(NamedTuple):
    """The looks of a text: whether it has colours, and the number of columns. By default no line is wrapped."""

    colours: bool = False
    width: int = sys.maxsize

    def paint(self, text: str, colour: str) -> str:
        """Give a text a colour."""
        return f"\x1b[{colour}m{text}\x1b[0m" if self.colours else text


def style_for(stream: TextIO | None) -> Style:
    """Return the style for a stream: colours and wrapped lines are for terminals."""
    is_terminal = stream is not None and stream.isatty()
    colours = is_terminal and os.name == "posix" and os.environ.get("TERM") != "dumb"
    if os.environ.get("NO_COLOR") or os.environ.get("FORCE_COLOR"):
        colours = not os.environ.get("NO_COLOR")
    return Style(colours, shutil.get_terminal_size().columns if is_terminal else sys.maxsize)


def left_lines(reports: Sequence[FileReport], levels: Iterable[Level], style: Style) -> Iterator[str]:
    r"""Yield the findings and the files that were not processed, by level, each message once with all its places.

    A message of one place is a line `file:line: rule: message`. For a message of several places, lines `file:line:
    rule: ...` follow it. They end with what is special to the place, or with its code.

    Examples:
        >>> print(*left_lines([FileReport("a.py", error="it is read-only")], Level, Style()), sep="\n")
        Fails, or was not processed: 1 place
        <BLANKLINE>
        a.py: not done: it is read-only.
        <BLANKLINE>
    """
    linecache.clearcache()
    groups = _groups(reports)
    for level in levels:
        chosen = [group for group in groups if group[0][1].level is level]
        if chosen:
            yield style.paint(f"{_TITLES[level]}: {_places(sum(map(len, chosen)))}", _COLOURS[level])
            yield ""
        for group in chosen:
            yield from _group_lines(group, style)
            yield ""


def written_lines(reports: Sequence[FileReport]) -> Iterator[str]:
    """Yield a line for each file that was written, with the rules that rewrote it."""
    for report in reports:
        if report.changes:
            rules = sorted({change.rule for change in report.changes}, key=order)
            yield f"{report.path}: rewritten by {', '.join(rules)}"


def coloured_diff(text: str, style: Style) -> str:
    """Colour a unified diff."""
    lines = text.split("\n")
    return "\n".join(style.paint(line, _DIFF_COLOURS[line[0]]) if line[:1] in _DIFF_COLOURS else line for line in lines)


def summary_lines(reports: Sequence[FileReport], *, written: bool) -> Iterator[str]:
    """Yield the numbers of files, of lines that were `written` or would be, and of what is left."""
    yield files_line(reports, written=written)
    rules = rule_totals(reports)
    lines = ", ".join(f"{rule} {row['lines']}" for rule, row in rules.items() if row["lines"])
    if lines:
        yield f"lines {'rewritten' if written else 'to be rewritten'}, by rule: {lines}"
    wrong, fails, notes = (sum(row[level.value] for row in rules.values()) for level in Level)
    not_done = sum(report.error is not None for report in reports)
    left = [
        f"{_places(wrong)} of wrong training" if wrong else "",
        f"{_places(fails)} of failure" if fails else "",
        f"{not_done} not done" if not_done else "",
    ]
    known = f"; {_places(notes)} good to know" if notes else ""
    yield f"left to you: {', '.join(filter(None, left)) or 'nothing'}{known}"


def files_line(reports: Sequence[FileReport], *, written: bool) -> str:
    """Return a line with the numbers of files, and of those that were `written` or would be.

    Examples:
        >>> files_line([FileReport("a.py"), FileReport("b.py", error="it is read-only")], written=False)
        '2 files: 0 to be rewritten, 1 unchanged, 1 not done'
    """
    files, changed, unchanged, not_done = file_totals(reports).values()
    number = "1 file" if files == 1 else f"{files} files"
    return f"{number}: {changed} {'' if written else 'to be '}rewritten, {unchanged} unchanged, {not_done} not done"


def _groups(reports: Sequence[FileReport]) -> list[list[tuple[str, Finding]]]:
    """Return the places of each message: first the files that were not processed, then the most frequent messages."""
    groups: dict[tuple[Level, str, str], list[tuple[str, Finding]]] = {}
    for report in reports:
        findings = sorted(report.findings, key=lambda one: one.line)
        if report.error is not None:
            findings = [Finding(_NOT_DONE, report.error_line or 0, Level.FAILS, f"{report.error}.")]
        for one in findings:
            groups.setdefault((one.level, one.rule, one.message), []).append((report.path, one))
    ordered = sorted(groups.items(), key=lambda item: (item[0][1] != _NOT_DONE, -len(item[1]), order(item[0][1])))
    return [group for _, group in ordered]


def _group_lines(group: Sequence[tuple[str, Finding]], style: Style) -> Iterator[str]:
    first = group[0][1]
    if len(group) > 1:
        text = f"{first.message} ({_places(len(group))})"
        yield from _wrapped(f"{first.rule}:", text, _COLOURS[first.level], style)
    for path, one in group:
        code = _short(linecache.getline(path, one.line), _LONGEST_CODE)
        head = f"{path}:{one.line}: {one.rule}:" if one.line else f"{path}: {one.rule}:"
        if len(group) > 1 and not one.detail:
            # A long path leaves little of the line, but some code is better than none.
            room = max(style.width - len(head) - 1, _SHORTEST_CODE)
            yield f"{style.paint(head, '1')} {_short(code, room)}".rstrip()
            continue
        yield from _wrapped(head, one.text if len(group) == 1 else _short(one.detail, _LONGEST_DETAIL), "1", style)
        if code:
            yield style.paint(f"    | {code}", "2")


def _wrapped(head: str, text: str, colour: str, style: Style) -> Iterator[str]:
    wrapper = textwrap.TextWrapper(
        style.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    lines = wrapper.wrap(f"{head} {text}")
    yield lines[0].replace(head, style.paint(head, colour), 1)
    yield from lines[1:]


def _places(number: int) -> str:
    return "1 place" if number == 1 else f"{number} places"


def _short(text: str, longest: int) -> str:
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
