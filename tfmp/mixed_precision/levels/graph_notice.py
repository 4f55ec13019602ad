"""Says that nothing of what a graph of TensorFlow 1 got in the scope of a level is in half precision."""

import contextlib
import logging
from collections.abc import Iterator

import tensorflow as tf

from tfmp.core.dtypes import HALF_TYPES
from tfmp.core.graph_search import calls_functions
from tfmp.core.storage.graph_variables import OncePerGraph
from tfmp.mixed_precision.levels.keras_hooks import levels
from tfmp.mixed_precision.levels.level import Level

_logger = logging.getLogger("tfmp")

#: The levels of which that was said in a graph.
_TOLD: OncePerGraph[list[str]] = OncePerGraph(list)


@contextlib.contextmanager
def notice_if_nothing_is_half(level: Level) -> Iterator[None]:
    """Log once for a graph if the ops that it gets in a scope compute with floating-point numbers, and none in half.

    There is no notice if that may be wrong: Ops within functions that the graph calls are not seen, and layers of Keras
    that are made in the scope may be called after it.
    """
    graph = tf.compat.v1.get_default_graph()
    num_ops, num_layers = len(graph.get_operations()), levels.num_layers
    yield
    if graph.building_function or levels.num_layers != num_layers or _TOLD.get():
        return
    made = graph.get_operations()[num_ops:]
    types = {tensor.dtype.base_dtype for op in made for tensor in (*op.inputs, *op.outputs)}
    is_computed = any(each.is_floating for each in types)
    if not is_computed or types.intersection(HALF_TYPES) or any(map(calls_functions, made)):
        return
    _TOLD.get().append(str(level))
    _logger.warning(
        "nothing that the graph got in the scope of tfmp.precision(%r) is in half precision. At this level, ops and "
        "tf.compat.v1.layers compute in the type of what they take, and only a variable that get_variable makes "
        "without a type is in half precision: cast the inputs of the model with the scope's `cast`, and leave the "
        "types of variables open. At O1, each op casts what it takes itself.",
        str(level),
    )
