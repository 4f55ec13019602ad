"""Named places in a model's code whose activations and gradients can be looked at."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.storage.graph_variables import OncePerGraph


class Probe(NamedTuple):
    """A tensor with a name."""

    #: Several probes may have the same, such as those of a layer that is called twice.
    name: str
    #: The activation. Its gradient is that of all that is computed from it.
    tensor: tf.Tensor


_PROBES: OncePerGraph[list[Probe]] = OncePerGraph(list)
# State of the module, because a probe is a call in the user's code, to which nothing could be passed; by thread,
# because another thread may run the same code while one is checked.
_thread = threading.local()


def probe(x: tf.Tensor, name: str) -> tf.Tensor:
    """Name an activation, so that `tfmp.check_precision` and the logging hook can look at it and at its gradient.

    The value is not changed. In eager code the probe costs nothing, except while `tfmp.check_precision` runs the code.
    In a TF1 graph it is an identity op, and nothing is computed from it unless somebody looks. The layers of a Keras
    model need no probes, because they are looked at by their names.

    A probe is not seen within a `tf.function`, or within a loop or a conditional of a graph.

    Args:
        x: The activation, of a floating-point type and any shape.
        name: The name in reports. If several probes have the same name, their values are counted together.

    Returns:
        A tensor with the value of `x`.

    Raises:
        TypeError: `x` is not a tensor of a floating-point type, or `name` is not a string.

    Examples:
        >>> import tfmp
        >>> def forward(x):
        ...     hidden = tfmp.ranges.probe(tf.nn.relu(x * 2.0), "hidden")
        ...     return tf.reduce_sum(hidden)
        >>> float(forward(tf.constant([1.0, -1.0])))
        2.0
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r} of type {type(name).__name__}.")
    if not (isinstance(x, tf.Tensor | tf.Variable) and x.dtype.is_floating):
        given = x.dtype.name if isinstance(x, tf.Tensor | tf.Variable) else type(x).__name__
        raise TypeError(f"a probe takes a tensor of a floating-point type, got {given} for {name!r}.")
    recorder: list[Probe] | None = getattr(_thread, "recorder", None)
    in_eager_code = tf.executing_eagerly()
    if not in_eager_code and tf.compat.v1.get_default_graph().building_function:
        return x
    if in_eager_code and recorder is None:
        return x
    # A tensor of its own: `x` may also be used without the probe.
    found = Probe(name, tf.identity(x))
    if recorder is not None and in_eager_code:
        recorder.append(found)
    elif found.tensor.graph.is_fetchable(found.tensor):
        _PROBES.get().append(found)
    return found.tensor


@contextlib.contextmanager
def recorded_probes() -> Iterator[list[Probe]]:
    """Collect the probes that this thread's code passes."""
    outer = getattr(_thread, "recorder", None)
    _thread.recorder = []
    try:
        yield _thread.recorder
    finally:
        _thread.recorder = outer


def probes_of_graph() -> list[Probe]:
    """Return the probes of the current TF1 graph, in the order of building."""
    return list(_PROBES.get())
