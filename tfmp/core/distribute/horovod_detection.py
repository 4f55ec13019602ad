"""Finds out whether Horovod runs, and which optimizers are Horovod's."""

import inspect
import sys
from types import ModuleType


def running_horovod() -> ModuleType | None:
    """Return the module `horovod.tensorflow` if the program has initialized it."""
    # A program that uses Horovod has imported it already. It is not imported here, because it may not be installed.
    horovod = sys.modules.get("horovod.tensorflow")
    return horovod if horovod is not None and horovod.is_initialized() else None


def is_horovods(opt: object) -> bool:
    """Return whether an optimizer is one of Horovod's, which average gradients over the processes themselves."""
    return type(opt).__module__.partition(".")[0] == "horovod"


def refuse_unsupported_horovods(opt: object) -> None:
    """Raise an error if an optimizer is one of Horovod's that does not average the gradients of each step."""
    # These names are private: Horovod (0.28.1) has no public way to ask.
    if is_horovods(opt) and getattr(opt, "_agg_helper", None) is not None:
        raise ValueError(
            "hvd.DistributedOptimizer(..., backward_passes_per_step=n) sums scaled gradients over n steps, and the "
            "scale may change between them: leave backward_passes_per_step at 1."
        )
    if is_horovods(opt) and type(opt).__name__ == "_DistributedAdasumOptimizer":
        raise ValueError("hvd.DistributedOptimizer(..., op=hvd.Adasum) does not average gradients: use op=hvd.Average.")


def without_horovods(opt: object) -> object:
    """Return the optimizer inside a Horovod optimizer, or the optimizer itself if it is not one of Horovod's."""
    # Private: the public part of the class (Horovod 0.28.1) gives no access to the optimizer or its attributes.
    return getattr(opt, "_optimizer", opt) if is_horovods(opt) else opt


def called_by_horovods(opt: object) -> bool:
    """Return whether a method of the Horovod optimizer that wraps an optimizer made this call.

    An optimizer does not know what wraps it, so the calling frames are searched.
    """
    frame = inspect.currentframe()
    while frame is not None:
        # The owner of the method decides, not the module of the code: AutoGraph runs a converted copy of the code.
        owner = frame.f_locals.get("self")
        if is_horovods(owner) and getattr(owner, "_optimizer", None) is opt:
            return True
        frame = frame.f_back
    return False
