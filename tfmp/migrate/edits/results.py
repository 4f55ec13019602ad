"""What a rule has to say about a script."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

import libcst as cst


class Options(NamedTuple):
    """What the user asked for.

    Attributes:
        to_tfmp: Whether the loss scales of TensorFlow's graph rewrite become tfmp's.
        tensorflow: The generation of TensorFlow, 1 or 2, that a script is taken for which tells none by itself; None to
            leave such a script alone.
    """

    to_tfmp: bool = False
    tensorflow: int | None = None


class Edit(NamedTuple):
    """A piece of text to be replaced.

    Attributes:
        rule: The rule that says so, as `R2`.
        start: Where the piece starts, in characters from the start of the script.
        end: Where it ends; the same as `start` to insert.
        text: What takes its place.
    """

    rule: str
    start: int
    end: int
    text: str


class NeededImport(NamedTuple):
    """A module that an edit's text names, to be imported once: `import module`.

    Attributes:
        rule: The rule whose edit needs it.
        module: The dotted name of the module.
    """

    rule: str
    module: str


class MovedNames(NamedTuple):
    """Names of a `from` import that are to come from elsewhere; several rules may move names of one statement.

    The script calls them as before. Names that no rule moves stay.

    Attributes:
        rule: The rule that says so.
        statement: The import, which lists its names.
        targets: For each name that moves its new module and its name there; the module is empty for a name that is a
            module itself: `import name as bound`.
    """

    rule: str
    statement: cst.ImportFrom
    targets: Mapping[str, tuple[str, str]]


class Level(enum.Enum):
    """How much a finding matters."""

    #: The script does not run, or trains wrongly, until a person has changed it.
    TODO = "todo"
    #: It runs; this is good to know.
    NOTE = "note"


class Finding(NamedTuple):
    """Something that a tool does not change, said to the user.

    Attributes:
        rule: The rule that says so.
        line: The line of the script, from 1.
        level: How much it matters.
        message: What it is, why it matters, and what to do.
    """

    rule: str
    line: int
    level: Level
    message: str


Result = Edit | MovedNames | NeededImport | Finding
