"""A value in a `tf.train.Checkpoint` that is not a variable there, but is saved as one."""

from collections.abc import Callable, Mapping

import tensorflow as tf

from tfmp.types import Done

#: The name that a checkpoint has for the value of every variable.
_VALUE = "VARIABLE_VALUE"


class InCheckpoint(tf.Module):
    """A value that checkpoints hold like that of a variable: `read` returns it, `restore` gets a saved one.

    The value has no shape or type of its own, so a checkpoint of a variable is restored whatever these are. What
    `restore` returns is run when a session restores the checkpoint.
    """

    def __init__(self, read: Callable[[], tf.Tensor], restore: Callable[[tf.Tensor], Done]) -> None:
        super().__init__()
        # Functions are no parts of a checkpoint, unlike a variable that was an attribute here.
        self._read = read
        self._restore = restore

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_VALUE: self._read()}

    def _restore_from_tensors(self, restored: Mapping[str, tf.Tensor]) -> Done:
        return self._restore(restored[_VALUE])
