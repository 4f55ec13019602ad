"""The results that a rule may yield: edits, moved names, needed imports, and findings."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

import libcst as cst


class Options(NamedTuple):
    """The options of the rewrite.

    Attributes:
        to_tfmp: True to replace the loss scales of TensorFlow's graph rewrite by managers of tfmp.
        tensorflow: The TensorFlow version, 1 or 2, to assume for a script that does not show its version; None to
            leave such a script alone.
    """

    to_tfmp: bool = False
    tensorflow: int | None = None


class Edit(NamedTuple):
    """A replacement of a piece of text.

    Attributes:
        rule: The rule that requires the edit, such as `R2`.
        start: The start of the piece, in characters from the start of the script.
        end: The end of the piece; equal to `start` for an insertion.
        text: The new text.
    """

    rule: str
    start: int
    end: int
    text: str


class NeededImport(NamedTuple):
    """A module that the text of an edit uses. It is imported once: `import module`.

    Attributes:
        rule: The rule whose edit uses the module.
        module: The dotted name of the module.
    """

    rule: str
    module: str


class MovedNames(NamedTuple):
    """Names of a `from` import that must be imported from another module.

    The script uses the same names as before. Several rules may move names of one statement; other names stay.

    Attributes:
        rule: The rule that this result comes from.
        statement: The import statement. It lists its names, without a star.
        targets: For each moved name its new module and its name there; the module is empty for a name that is a
            module itself: `import name as bound`.
    """

    rule: str
    statement: cst.ImportFrom
    targets: Mapping[str, tuple[str, str]]


class Level(enum.Enum):
    """How much a finding matters; the worst comes first."""

    #: The script runs, but trains wrongly without an error, until a person has changed it.
    WRONG = "wrong"
    #: The script fails, or cannot be rewritten, until a person has changed it.
    FAILS = "fails"
    #: The script runs; the finding is for information.
    NOTE = "note"


class Finding(NamedTuple):
    """A message to the user about code that the rewriter does not change.

    Attributes:
        rule: The rule that this result comes from.
        line: The line of the script, from 1.
        level: How much the finding matters.
        message: What is wrong, what happens, and the line to write. A message that many files share is reported once.
        detail: A sentence about this file alone, such as the names that the message is about; empty if there is none.
    """

    rule: str
    line: int
    level: Level
    message: str
    detail: str = ""

    @property
    def text(self) -> str:
        """The message with its detail."""
        return f"{self.message} {self.detail}".rstrip()


Result = Edit | MovedNames | NeededImport | Finding
