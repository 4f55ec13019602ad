"""The names of the modules below `tensorflow.python` in TensorFlow 2.15.

These modules are private: they change from one version to the next. `tools/api_names.py` writes the table.
"""

from collections.abc import Mapping, Sequence
from functools import cache

from tfmp.migrate.tables import starts, table_lines
from tfmp.migrate.tables.api_names import Standing, public_name, standing

# What to write for names without a public name of the same word.
_SUCCESSORS = {
    "util.nest.is_sequence": "tf.nest.is_nested",
    "framework.ops.RegisterShape": "nothing: TensorFlow takes shapes from the op's definition",
    "training.distribution_strategy_context": "tf.distribute, as in tf.distribute.get_replica_context()",
    "training.tracking": "tensorflow.python.trackable or tensorflow.python.checkpoint",
}


def missing_part(name: str) -> str:
    """Return the part of a name that TensorFlow 2.15 lacks, up to its first missing word; empty if it has the name.

    Args:
        name: The words after `tensorflow.python.`.

    Examples:
        >>> missing_part("util.nest.is_sequence"), missing_part("util.nest.flatten"), missing_part("ops.old.f")
        ('util.nest.is_sequence', '', 'ops.old')
    """
    missing = next((part for part in starts(name) if part not in _table()), "")
    module, _, word = missing.rpartition(".")
    return "" if not missing or not _names(module).isdisjoint((word, "*")) else missing


def replacement(name: str) -> str:
    """Return what to write for a missing name; empty if that is not known.

    Examples:
        >>> replacement("pywrap_tensorflow.NewCheckpointReader"), replacement("distribute.all_reduce")
        ('tf.compat.v1.train.NewCheckpointReader', 'tensorflow.python.distribute.v1.all_reduce')
    """
    word = name.rpartition(".")[2]
    public = public_name(word)
    modules = [f"tensorflow.python.{module}" for module in _table() if module.rpartition(".")[2] == word]
    if name in _SUCCESSORS or not public:
        return _SUCCESSORS.get(name, modules[0] if len(modules) == 1 else "")
    return f"tf.{public}" if standing(public) is Standing.NEW else f"tf.compat.v1.{public}"


@cache
def _table() -> Mapping[str, Sequence[str]]:
    lines = (line.partition(" ") for line in table_lines("python_names.txt"))
    return {module: names.split() for module, _, names in lines}


@cache
def _names(module: str) -> frozenset[str]:
    """Return the names of a module, with those of its star imports; `*` stands for names that are not known."""
    names = set(_table().get(module, "*"))
    for one in [name[1:] for name in names if name.startswith("*") and name != "*"]:
        names |= {name for name in _names(one) if not name.startswith("_")}
    return frozenset(names)
