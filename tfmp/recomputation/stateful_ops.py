"""Ops that would do something else when a function is computed a second time."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfmp.core.tensorflow_internals import op_definition

#: Ops that TensorFlow calls stateful, and that do the same both times: they read, or write only for people.
_HARMLESS = frozenset({
    *("VarHandleOp", "Variable", "VariableV2", "ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd"),
    *("VarIsInitializedOp", "IsVariableInitialized", "LookupTableFind", "LookupTableFindV2", "LookupTableSizeV2"),
    *("Print", "PrintV2", "Assert", "CheckNumerics", "CheckNumericsV2", "StatelessRandomGetAlg"),
    *("_Arg", "_Retval"),
})  # fmt: skip

#: An array of the second computation is another one than that of the first, so its state does no harm.
_HARMLESS_PREFIXES = ("TensorArray", "Stack")

#: Ops that are as stateful as the functions that they call.
_CALLS = frozenset({"StatefulPartitionedCall", "If", "While", "Case"})

#: Ops that draw random numbers although TensorFlow calls them stateless.
_RANDOM = frozenset({"FractionalMaxPool", "FractionalAvgPool"})


def refuse_state(operations: Iterable[tf.Operation], function_name: str) -> None:
    """Check that ops give the same results and leave the same state when they are computed a second time.

    Reading a variable or a table, printing and asserting are allowed. All else that TensorFlow declares as stateful is
    refused: stateful random ops, assignments, queues, iterators, Python functions, collectives.

    Examples:
        >>> with tf.Graph().as_default() as graph:
        ...     noise = tf.random.normal([2])
        >>> refuse_state(graph.get_operations(), "noisy")
        Traceback (most recent call last):
        ValueError: noisy cannot be recomputed: its op 'random_normal/RandomStandardNormal' (RandomStandardNormal) draws
        other random numbers the second time. Use tf.random.stateless_* or tf.nn.experimental.stateless_dropout with a
        seed that is drawn outside and passed as an argument.
    """
    for name, op_type in _stateful(operations):
        raise ValueError(f"{function_name} cannot be recomputed: its op {name!r} ({op_type}) {_what_to_do(op_type)}")


def _stateful(operations: Iterable[tf.Operation]) -> Iterator[tuple[str, str]]:
    """Yield the name and type of each op that is not harmless, also within the functions that the ops call."""
    for op in operations:
        if op.type in _CALLS:
            yield from _stateful_in_called(op)
        elif not _is_harmless(op.type) or (_writes_reference(op) and not op.type.startswith(("Ref", "IsVariable"))):
            yield op.name, op.type


def _stateful_in_called(op: tf.Operation) -> Iterator[tuple[str, str]]:
    library = {each.signature.name: each for each in op.graph.as_graph_def().library.function}
    called = list(_functions_named_in(op.node_def.attr))
    seen = set()
    while called:
        name = called.pop()
        if name in seen or name not in library:
            continue
        seen.add(name)
        for node in library[name].node_def:
            if node.op in _CALLS:
                called += _functions_named_in(node.attr)
            elif not _is_harmless(node.op):
                yield f"{op.name}/{node.name}", node.op


def _functions_named_in(attributes: Mapping[str, Any]) -> Iterator[str]:  # a map of protocol buffers, without types
    for value in attributes.values():
        yield from (each.name for each in (value.func, *value.list.func) if each.name)


def _is_harmless(op_type: str) -> bool:
    if op_type in _RANDOM:
        return False
    is_stateful = getattr(op_definition(op_type), "is_stateful", False)
    return not is_stateful or op_type in _HARMLESS or op_type.startswith(_HARMLESS_PREFIXES)


def _writes_reference(op: tf.Operation) -> bool:
    # Assignments to variables of TF1 are not declared as stateful.
    return any(argument.is_ref for argument in op.op_def.input_arg)


def _what_to_do(op_type: str) -> str:
    if op_type in _RANDOM or any(word in op_type for word in ("Random", "Rng", "Multinomial", "Sampler", "Stateful")):
        return (
            "draws other random numbers the second time. Use tf.random.stateless_* or "
            "tf.nn.experimental.stateless_dropout with a seed that is drawn outside and passed as an argument."
        )
    if any(word in op_type for word in ("Assign", "Scatter", "Apply", "CountUpTo")):
        return (
            "changes a variable, which would happen twice. Return the new value from the function, and assign it "
            "outside."
        )
    return (
        "keeps state or acts outside of the graph, which would happen twice. Move it out of the function, and pass its "
        "results as arguments."
    )
