"""How the replicas of one step act together; there is a module for each way of running several replicas."""

import tensorflow as tf

from tfmp.core.distribute.base import Distribution as Distribution
from tfmp.core.distribute.base import SingleProcess as SingleProcess
from tfmp.core.distribute.horovod import Horovod as Horovod
from tfmp.core.distribute.horovod_detection import running_horovod
from tfmp.core.distribute.mirrored import Mirrored as Mirrored
from tfmp.core.distribute.mirrored import MirroredWorkers as MirroredWorkers

_STRATEGIES_OF_WORKERS = (
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy,
)

#: The strategies with which tests have shown that the replicas agree. Any other strategy is refused by its name.
_SUPPORTED_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    tf.compat.v1.distribute.MirroredStrategy,
    tf.compat.v1.distribute.OneDeviceStrategy,
    *_STRATEGIES_OF_WORKERS,
)


def current_distribution(is_distributed: bool) -> Distribution:
    """Return the distribution of the step being built; `is_distributed` if the user says several devices train."""
    horovod = running_horovod()
    if not tf.distribute.has_strategy():
        if not is_distributed:
            return SingleProcess()
        if horovod is None:
            raise ValueError(
                "is_distributed=True, and nothing distributes: call hvd.init() of horovod.tensorflow before this, or "
                "build the step under a tf.distribute strategy (Estimator: RunConfig(train_distribute=...)), or leave "
                "is_distributed=False for one device."
            )
        return Horovod(horovod) if horovod.size() > 1 else SingleProcess()
    strategy = tf.distribute.get_strategy()
    if horovod is not None and horovod.size() > 1:
        raise NotImplementedError(
            f"Horovod runs {horovod.size()} processes, and {type(strategy).__name__} is active in this one: tfmp does "
            "not support both together. Use only one of them."
        )
    if not isinstance(strategy, _SUPPORTED_STRATEGIES):
        raise NotImplementedError(
            f"tfmp does not support {type(strategy).__name__}: use MirroredStrategy, MultiWorkerMirroredStrategy or "
            "OneDeviceStrategy."
        )
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            f"the step was built in the cross-replica context of {type(strategy).__name__}: call this on the "
            "replicas, inside strategy.run or Estimator's model_fn."
        )
    return MirroredWorkers() if isinstance(strategy, _STRATEGIES_OF_WORKERS) else Mirrored()


def current_replica() -> int | None:
    """Return the number of the replica on which the running code is called; None outside of replicas."""
    # Not by its thread: a strategy uses new threads in each run, with numbers that other threads had before.
    context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    # A strategy that is refused later may not know the number while a function is traced.
    number = None if context is None else tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)
