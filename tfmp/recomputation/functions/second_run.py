"""The second call of a function, which gets the variables of the first and leaves no traces in the graph."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

#: What TensorFlow itself keeps of the loops and conditionals of a graph.
_CONTROL_FLOW = (tf.compat.v1.GraphKeys.COND_CONTEXT, tf.compat.v1.GraphKeys.WHILE_CONTEXT)


class VariablesOfFirstRun:
    """What `get_variable` returned to the first call of a function, and returns again to the second.

    The order of the requests tells which is which. Names do not: layers that name themselves count on. `initializers`
    are the names of the ops that only give the variables of the first call their initial values.

    Examples:
        >>> def ask():
        ...     with tf.compat.v1.variable_scope(None, default_name="layer"):
        ...         return tf.compat.v1.get_variable("w", [])
        >>> with tf.Graph().as_default():
        ...     first = VariablesOfFirstRun("ask")
        ...     with first.noted():
        ...         w = ask()
        ...     with first.replayed():
        ...         again = ask()
        ...     w.op.name, again is w
        ('layer/w', True)
    """

    def __init__(self, function_name: str) -> None:
        self._function_name = function_name
        self._scope = tf.compat.v1.get_variable_scope()
        self._returned: list[tuple[str, object]] = []
        self.initializers: set[str] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what `get_variable` returns here, and the ops that initialize variables."""
        graph = tf.compat.v1.get_default_graph()

        def create(next_creator: Callable[..., object], **kwargs: object) -> object:
            before = len(graph.get_operations())
            variable = next_creator(**kwargs)
            self.initializers.update(op.name for op in graph.get_operations()[before:])
            return variable

        def note(getter: Callable[..., object], name: str, *args: object, **kwargs: object) -> object:
            inner = getter if others is None else lambda *args, **kwargs: others(getter, *args, **kwargs)
            variable = inner(name, *args, **kwargs)
            self._returned.append((_request(name, *args, **kwargs), variable))
            return variable

        # Entering a scope again would start its counters of names anew; so the getter is set on the scope itself.
        others = self._scope.custom_getter
        self._scope.set_custom_getter(note)
        try:
            with tf.variable_creator_scope(create):
                yield
        finally:
            self._scope.set_custom_getter(others)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Let `get_variable` return the same again, in the scope of the first call, and refuse other variables."""
        returned = iter(self._returned)

        def replay(getter: Callable[..., object], name: str, *args: object, **kwargs: object) -> object:
            request = _request(name, *args, **kwargs)
            noted, variable = next(returned, (None, None))
            if noted == request:
                return variable
            raise ValueError(
                f"{self._function_name} makes variables on its second run: it asks for {request}, where it asked for "
                f"{noted or 'none'} at first. It must ask for the same variables in the same order in each call."
            )

        scope = tf.compat.v1.variable_scope(self._scope, custom_getter=replay, auxiliary_name_scope=False)
        with scope, no_new_variables(self._function_name):
            yield


@contextlib.contextmanager
def no_new_variables(function_name: str) -> Iterator[None]:
    """Refuse to make variables here."""

    def refuse(next_creator: object, **kwargs: object) -> object:
        raise ValueError(
            f"{function_name} makes variables on its second run (name={kwargs.get('name')!r}). Make them outside, or "
            "only in the first call."
        )

    with tf.variable_creator_scope(refuse):
        yield


@contextlib.contextmanager
def collections_unchanged() -> Iterator[None]:
    """Take out of the graph's collections (losses, summaries, update ops) what is added to them here."""
    graph = tf.compat.v1.get_default_graph()
    before = {key: len(graph.get_collection_ref(key)) for key in graph.get_all_collection_keys()}
    try:
        yield
    finally:
        for key in graph.get_all_collection_keys():
            if key not in _CONTROL_FLOW:
                del graph.get_collection_ref(key)[before.get(key, 0) :]


def _request(name: str, shape: Any = None, *_: object, **__: object) -> str:  # noqa: ANN401 - as get_variable takes it
    return f"{name.rsplit('/', maxsplit=1)[-1]!r} of shape {None if shape is None else tf.TensorShape(shape)}"
