"""tfmp.autocast: half precision for code that names no types."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from tfmp.core import settings
from tfmp.mixed_precision.autocast import hooks, state
from tfmp.mixed_precision.autocast.lists import AutocastLists, autocast_lists, half_dtype
from tfmp.mixed_precision.autocast.op_types import OpTypes
from tfmp.mixed_precision.autocast.state import Scope

if TYPE_CHECKING:
    from typing_extensions import Self

_Function = TypeVar("_Function", bound=Callable[..., Any])


class autocast:  # noqa: N801 - a context manager, with the name that it has in torch
    """Computes the ops of a scope in half precision where that is safe, and in float32 where it is not.

    The code in the scope needs to name no types: matrix products and convolutions get their inputs cast to half
    precision and return half precision; exponentials, logarithms, softmaxes, sums, norms and losses get theirs cast to
    float32; an op that is given several types computes in the widest of them (`tfmp.mixed_precision.autocast_lists`
    has all). A weight or a scalar does not make an op wider, so `x @ w + b` stays in half precision. Neither does a
    gate, a sigmoid or a tanh, though it is float32 itself: `x * tf.sigmoid(y)` stays in half precision. Variables stay
    float32, and so do their gradients. The scope does not scale the loss, which float16 needs and bfloat16 does not.

    Enter the scope for the forward pass and the loss. Compute gradients outside of it; within it they are computed in
    the same types. The scope acts on the thread that entered it: in eager code, in the trace of a `tf.function` (XLA
    too), and while a TF1 graph is built. Scopes can be nested, and an object can be entered again. As a decorator, the
    scope is entered in each call of the function; then `@tf.function` stands above it.

    The branches of a `tf.cond` return the wider type, and what a `tf.while_loop` carries keeps the type in which it
    began. A function with `tf.custom_gradient` computes its gradient in the scope that it was called in.

    Args:
        dtype: The type to compute in: "float16" or "bfloat16".
        enabled: False for a scope in which ops take the types that they are given.
        half: Names of further ops to compute in half precision.
        float32: Names of further ops to compute in float32.
        widest: Names of further ops to compute in the widest type of their inputs.

    Raises:
        TypeError: `enabled` is no bool; the names of ops are no list of strings; an argument is torch's (`device_type`,
            `cache_enabled`); or a decorated object is a `tf.function` already, or a generator or a coroutine.
        ValueError: `dtype` is no half-precision type; TensorFlow has no op of a name; or a name stands in two lists.
        RuntimeError: When it is entered: this TensorFlow is not known. Within it: a `tf.function` is traced that would
            keep the types of the scope, or `strategy.run` is called.

    Examples:
        >>> import tfmp
        >>> w = tf.Variable(tf.ones([4, 2]))
        >>> with tf.GradientTape() as tape:
        ...     with tfmp.autocast("bfloat16"):
        ...         logits = tf.ones([3, 4]) @ w
        ...         loss = tf.reduce_mean(tf.exp(logits))
        >>> logits.dtype.name, loss.dtype.name, tape.gradient(loss, w).dtype.name
        ('bfloat16', 'float32', 'float32')

    Source: torch.autocast; the lists are those of both torch and TensorFlow's pass for graphs.

    Provisional: a minor version may change it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "Self":  # noqa: ANN401 - the constructor's arguments
        """Refuse torch's arguments, of which Python would only say that there are too many."""
        if cls.__init__ is not autocast.__init__:
            # A subclass may have such arguments of its own.
            return super().__new__(cls)
        call = f"tfmp.autocast({kwargs.get('dtype', 'float16')!r})"
        settings.refuse_arguments_of_torch(call, args[0] if args else None, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        dtype: str | tf.DType = "float16",
        *,
        enabled: bool = True,
        half: Iterable[str] = (),
        float32: Iterable[str] = (),
        widest: Iterable[str] = (),
    ) -> None:
        if inspect.isroutine(dtype):
            raise TypeError(f"dtype must be a type, got {dtype!r}: as a decorator, write @tfmp.autocast().")
        dtype = half_dtype(dtype)
        lists = _changed_lists(autocast_lists(dtype), half=half, float32=float32, widest=widest)
        is_on = settings.flag("enabled", enabled)
        self._scope = Scope(_op_types(dtype, lists), entered=self) if is_on else None

    # Otherwise `inspect.signature` and `help` would show the parameters of `__new__`: (*args, **kwargs).
    __new__.__wrapped__ = __init__  # type: ignore[attr-defined] # as functools.wraps sets it

    def __enter__(self) -> None:
        """Enter the scope in this thread."""
        if self._scope is not None:
            hooks.open_scopes.add()
        state.push(self._scope)

    def __exit__(self, *error: object) -> None:
        """Leave the scope."""
        if state.pop() is not None:
            hooks.open_scopes.remove()

    def __call__(self, function: _Function) -> _Function:
        """Return a function that enters the scope in each call."""
        refuse_all_but_functions("tfmp.autocast", function)
        if hasattr(function, "get_concrete_function"):
            raise TypeError(
                "a tf.function would be traced within the scope, and keep it for ever: put @tf.function above "
                "@tfmp.autocast()."
            )

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the function
            with self:
                return function(*args, **kwargs)

        # Keras 2 looks at the arguments, and not at what was wrapped.
        within.__signature__ = inspect.signature(function)  # type: ignore[attr-defined] # `inspect` reads it
        return within  # type: ignore[return-value] # it has the signature of the function


def refuse_all_but_functions(scope: str, function: object) -> None:
    """Refuse to decorate anything but a function, and also what runs after the call: a generator or a coroutine."""
    if not callable(function) or inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{scope} decorates functions, got {function!r}. A generator or a coroutine would run outside of the "
            "scope: enter the scope within it, with no yield or await inside."
        )


@functools.cache
def _op_types(dtype: tf.DType, lists: AutocastLists) -> OpTypes:
    # One for all scopes of a kind: it remembers what it finds of each op.
    return OpTypes(dtype, lists, hooks.inputs_of)


def _changed_lists(lists: AutocastLists, **names: Iterable[str]) -> AutocastLists:
    moved: dict[str, frozenset[str]] = {}
    for argument, ops in names.items():
        if isinstance(ops, str) or not isinstance(ops, Iterable):
            raise TypeError(f"{argument} must be a list of names, got {ops!r} of type {type(ops).__name__}.")
        listed = list(ops)
        for op in listed:
            _validate(argument, op)
        moved[argument] = frozenset(listed)
    others = frozenset().union(*moved.values())
    if not others:
        return lists
    for op in sorted(others):
        named = [argument for argument, ops in moved.items() if op in ops]
        if len(named) > 1:
            raise ValueError(f"{op} stands in {' and '.join(named)}: leave it in one of them.")
    kept = AutocastLists(*(ops - others for ops in lists))
    return kept._replace(
        allow=kept.allow | moved["half"], deny=kept.deny | moved["float32"], infer=kept.infer | moved["widest"]
    )


def _validate(argument: str, op: object) -> None:
    if not isinstance(op, str):
        raise TypeError(f"{argument} must be a list of names, and has {op!r} of type {type(op).__name__}.")
    names = [name for name in dir(tf.raw_ops) if not name.startswith("_")]
    if op not in names:
        near = difflib.get_close_matches(op, names, n=3)
        raise ValueError(
            f"{argument} names {op!r}, and TensorFlow has no such op"
            + (f": did you mean {', '.join(near)}?" if near else ": see dir(tf.raw_ops).")
        )
    if op == "Cast":
        raise ValueError(f"{argument} names 'Cast', which returns the type that it is asked for: leave it out.")
