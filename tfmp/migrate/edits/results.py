"""The results that a rule may yield: edits, moved names, needed imports, and findings."""

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import libcst as cst


class Edit(NamedTuple):
    """A replacement of a piece of text."""

    rule: str  #: The rule that requires the edit, such as `R2`.
    start: int  #: The start of the piece, in characters from the start of the script.
    end: int  #: The end of the piece; equal to `start` for an insertion.
    text: str  #: The new text.


class NeededImport(NamedTuple):
    """A module that the text of an edit uses. It is imported once: `import module`."""

    rule: str  #: The rule whose edit uses the module.
    module: str  #: The dotted name of the module.


class MovedNames(NamedTuple):
    """Names of a `from` import that must be imported from another module.

    The script uses the same names as before. Several rules may move names of one statement; other names stay.
    """

    rule: str
    statement: cst.ImportFrom  #: It lists its names, without a star.
    #: For each moved name its new module and its name there. The module is empty for a name that is a module itself;
    #: both are empty for a name that is removed.
    targets: Mapping[str, tuple[str, str]]


class Level(enum.Enum):
    """How much a finding matters; the worst comes first."""

    WRONG = "wrong"  #: The script runs, but trains wrongly without an error, until a person has changed it.
    FAILS = "fails"  #: The script fails, or cannot be rewritten, until a person has changed it.
    NOTE = "note"  #: The script runs; the finding is for information.


class Finding(NamedTuple):
    """A message to the user about code that the rewriter does not change."""

    rule: str
    line: int  #: The line of the script, from 1.
    level: Level
    message: str  #: What is wrong, what happens, and the line to write. One that many files share is reported once.
    detail: str = ""  #: A sentence about this file alone, such as the names that the message is about.

    @property
    def text(self) -> str:
        """The message with its detail."""
        return f"{self.message} {self.detail}".rstrip()


def at_first_lines(rule: str, places: Iterable[tuple[str, int]]) -> Iterator[Finding]:
    """Yield a failure for each message, at the first of its lines; the detail names the other lines.

    Examples:
        >>> finding, = at_first_lines("R13", [("tf.mul is gone.", 9), ("tf.mul is gone.", 3), ("tf.mul is gone.", 7)])
        >>> finding.line, finding.text
        (3, 'tf.mul is gone. It is also in lines 7, 9.')
    """
    lines: dict[str, set[int]] = {}
    for message, line in places:
        lines.setdefault(message, set()).add(line)
    for message, found in lines.items():
        first, *others = sorted(found)
        also = f"It is also in line{'s' if others[1:] else ''} {', '.join(map(str, others))}." if others else ""
        yield Finding(rule, first, Level.FAILS, message, also)


Result = Edit | MovedNames | NeededImport | Finding
