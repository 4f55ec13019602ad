"""The successors of the names of `tf.contrib`.

The successors are below `tf.compat.v1` and take the arguments that the names took in TensorFlow 1.15. Successors below
`estimator` exist only in TensorFlow 2.15; those below `nn.rnn_cell` need Keras 2 or tf_keras.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from tfmp.migrate.tables import starts, table_lines


class Successor(NamedTuple):
    """The successor of a name of `tf.contrib`.

    Attributes:
        name: The name below `tf`, or below `module` if that is given.
        module: The module to import, which has the name; empty for `tf.compat.v1`.
        keywords: The only keyword arguments with which a call may be rewritten; None allows all, and uses
            that are not calls.
        positional: The largest number of positional arguments with which a call may be rewritten, with `keywords`.
        minus_ones: Keyword arguments that must have the value -1 where a call gives them.
        given: Keyword arguments that a call must give, because their defaults differ.
    """

    name: str
    module: str = ""
    keywords: frozenset[str] | None = None
    positional: int = 0
    minus_ones: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()


_XAVIER = Successor("glorot_uniform_initializer", "", frozenset(("seed", "dtype")), 0)
_LAST = frozenset(("begin_norm_axis", "begin_params_axis"))
_LAYER_NORM = Successor(
    "layer_norm", "tfmp.bert", frozenset(("inputs", "scope")) | _LAST, 1, _LAST, frozenset(("begin_norm_axis",))
)
_CHECKED = {
    "layers.xavier_initializer": _XAVIER,
    "layers.xavier_initializer_conv2d": _XAVIER,
    "layers.layer_norm": _LAYER_NORM,
    "layers.recompute_grad": Successor("recompute", "tfmp", frozenset(), 1),
    # Their arguments have other names, so that calls must give them by position.
    "framework.list_variables": Successor("train.list_variables", "", frozenset(), 1),
    "framework.load_checkpoint": Successor("train.load_checkpoint", "", frozenset(), 1),
    "framework.load_variable": Successor("train.load_variable", "", frozenset(), 2),
}


def _plain() -> Iterator[tuple[str, Successor]]:
    """Yield the successors of the table, whose lines are `old = new`, or `old.* = new.*: name name ...`."""
    for line in table_lines("contrib_successors.txt"):
        (old, new), names = line.partition(":")[0].split(" = "), line.partition(":")[2].split()
        yield from ((old.replace("*", name), Successor(new.replace("*", name))) for name in names or [""])


#: The successors, by the words after `tf.contrib.`.
SUCCESSORS: Mapping[str, Successor] = {**dict(_plain()), **_CHECKED}
#: Advice for names that have no successor, or one with other arguments; `{name}` stands for the last word. The name
#: `contrib` stands for `tf.contrib` itself.
ADVICE: Mapping[str, str] = {
    name: text
    for names, _, text in (line.partition(": ") for line in table_lines("contrib_advice.txt"))
    for name in names.split()
}


def is_package(word: str) -> bool:
    """Tell whether a word names a package of `tf.contrib`.

    Examples:
        >>> is_package("mixed_precision"), is_package("layers"), is_package("auth")
        (True, True, False)
    """
    return word in _packages()


def find_successor(name: str) -> tuple[str, Successor] | None:
    """Return the longest part of a dotted name that has a successor, with the successor; None without one.

    Examples:
        >>> find_successor("tpu.InputPipelineConfig.PER_HOST_V2")[0]
        'tpu.InputPipelineConfig'
    """
    return next(((part, SUCCESSORS[part]) for part in reversed(starts(name)) if part in SUCCESSORS), None)


def advice(name: str) -> str:
    """Return the advice for a name: the end of a sentence, without a full stop; empty if there is none."""
    found = next((ADVICE[part] for part in reversed(starts(name or "contrib")) if part in ADVICE), "")
    successor = SUCCESSORS.get(name)
    if found or successor is None:
        return found.format(name=name.rpartition(".")[2])
    return f"write tf.{successor.name}{', its arguments without their names' if successor.keywords is not None else ''}"


@cache
def _packages() -> frozenset[str]:
    names = (name.partition(".")[0] for name in (*SUCCESSORS, *ADVICE))
    return frozenset(names) - {"contrib"} | {"mixed_precision"}
