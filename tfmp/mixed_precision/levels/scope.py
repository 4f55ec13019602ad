"""tfmp.precision: layers and variables that are made at a level of precision."""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import tensorflow as tf

from tfmp.mixed_precision.autocast.scope import autocast, refuse_all_but_functions
from tfmp.mixed_precision.levels import keras_hooks
from tfmp.mixed_precision.levels.graph_notice import notice_if_nothing_is_half
from tfmp.mixed_precision.levels.graph_variables import variables_at
from tfmp.mixed_precision.levels.level import level_of
from tfmp.mixed_precision.storage import FLOAT32_OR_HALF

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Entered(threading.local):
    """What a thread has to leave, the innermost at the end."""

    def __init__(self) -> None:
        self.stacks: list[contextlib.ExitStack] = []


class precision(contextlib.ContextDecorator):  # noqa: N801 - a context manager, as tfmp.autocast is
    """Makes layers of Keras, and variables of TensorFlow 1's graphs, at a level of precision.

    | level | layers compute in | weights |
    |---|---|---|
    | O0 | float32 | float32 |
    | O1 | float16; softmax, normalizations and averages over many values in float32 | float32 |
    | O2 | float16; batch and layer normalization in float32, as Keras does it without being told | float32 |
    | O3 | float16 | float16 |

    "O1-bfloat16" and so on are the same levels in bfloat16. At O1 and O2 the loss of float16 must be scaled, and so it
    should be at O3: with a `tfmp.LossScaleOptimizer` or a `tfmp.GradScaler`.

    Of Keras (Keras 3, Keras 2.15, tf_keras), a layer that is made in the scope gets one of Keras' own policies, unless
    it is given a `dtype`; a layer that Keras' layers make themselves gets the policy of these. So layers are saved,
    loaded and cloned with their level, also where tfmp is not installed. `compile` of Keras scales the loss of a model
    whose own policy is "mixed_float16", and warns if the loss of another model with float16 layers is not scaled.

    In a graph of TensorFlow 1, enter the scope within the graph. There, O1 is `tfmp.autocast`. At O2 and O3,
    `tf.compat.v1.get_variable` makes half-precision variables, stored in float32 at O2. Cast the inputs with `cast`;
    `tf.compat.v1.layers` compute in the type of these.

    Levels can be nested: the innermost one acts. A scope acts on the thread that entered it. It can be a decorator of
    the function that builds the model.

    Args:
        level: "O0", "O1", "O2" or "O3"; with "-bfloat16" behind it for bfloat16.

    Raises:
        TypeError: `level` is no string; or a decorated object is a generator or a coroutine.
        ValueError: There is no such level.

    Examples:
        >>> import keras
        >>> import tfmp
        >>> with tfmp.precision("O2"):
        ...     body = keras.layers.Dense(4)
        ...     with tfmp.precision("O0"):
        ...         head = keras.layers.Dense(2)
        >>> body.compute_dtype, body.variable_dtype, head.compute_dtype
        ('float16', 'float32', 'float32')

    Source: the levels of NVIDIA's apex.

    Provisional, but for the name and its argument: a minor version may change what a level does to layers.
    """

    def __init__(self, level: str) -> None:
        self._level = level_of(level)
        # Threads share an object that decorates a function.
        self._entered = _Entered()

    @property
    def level(self) -> str:
        """The name of the level, such as "O2" or "O2-bfloat16"."""
        return str(self._level)

    def cast(self, inputs: Any) -> Any:  # noqa: ANN401 - any structure of tensors
        """Cast the inputs of a model that is written with TensorFlow's own functions to the type of the level.

        Args:
            inputs: A tensor, or a structure of tensors. Those of other types than float32, float16 and bfloat16 are
                returned as they are.

        Returns:
            The same structure: in float32 at O0, in the half-precision type at O2 and O3. At O1 it is unchanged, since
            autocast casts what needs it.

        Examples:
            >>> import tfmp
            >>> with tfmp.precision("O2") as level:
            ...     inputs = level.cast({"image": tf.ones([2, 3]), "label": tf.constant([1, 2])})
            >>> inputs["image"].dtype.name, inputs["label"].dtype.name
            ('float16', 'int32')
        """
        if self._level.number == 1:
            return inputs
        to = tf.as_dtype(self._level.half) if self._level.number else tf.float32

        def cast(each: Any) -> Any:  # noqa: ANN401 - a tensor, or anything else
            return tf.cast(each, to) if tf.is_tensor(each) and each.dtype in FLOAT32_OR_HALF else each

        return tf.nest.map_structure(cast, inputs)

    def __call__(self, func: _Function) -> _Function:
        """Return a function that enters the scope in each call."""
        refuse_all_but_functions("tfmp.precision", func)
        return super().__call__(func)

    def __enter__(self) -> "precision":
        """Enter the scope in this thread."""
        keras_hooks.wrap_keras()
        with contextlib.ExitStack() as entered:
            keras_hooks.levels.open.append(self._level)
            entered.callback(keras_hooks.levels.open.pop)
            if not tf.executing_eagerly():
                entered.enter_context(autocast(self._level.half, enabled=self._level.number == 1))
                entered.enter_context(variables_at(self._level))
                if self._level.number >= 2:
                    entered.enter_context(notice_if_nothing_is_half(self._level))
            self._entered.stacks.append(entered.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the scope."""
        self._entered.stacks.pop().__exit__(kind, error, traceback)
