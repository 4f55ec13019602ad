"""The NPU bridge's names for Estimator, which TensorFlow has up to 2.15."""

import inspect
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from tfmp.npu.one_process import npu_config_proto, require_one_process

DumpConfig = ProfilingConfig = SimpleNamespace
"""Settings of the NPU, which nothing reads."""


def NPURunConfig(**settings: Any) -> Any:  # noqa: ANN401, N802 - the bridge's name; not each TensorFlow has the type
    """Return a `tf.compat.v1.estimator.RunConfig` without the settings that it does not know.

    These settings are the NPU's. Among them is `precision_mode`: to compute in float16 on CPU or GPU, build the model
    `with tfmp.autocast():`.

    Raises:
        ImportError: TensorFlow has no Estimator.
        RuntimeError: RANK_SIZE is greater than 1.
        ValueError: `distribute` is given.

    Examples:
        >>> NPURunConfig(save_checkpoints_steps=9, precision_mode="allow_mix_precision").save_checkpoints_steps
        9
    """
    require_one_process("hvd.DistributedOptimizer(opt)")
    if settings.get("distribute") is not None:
        raise ValueError(
            f"distribute must be left out, got {settings['distribute']!r}: the NPU bridge connects its workers. Use "
            "tf.compat.v1.estimator.RunConfig(train_distribute=strategy)."
        )
    config = _estimator().RunConfig
    known = inspect.signature(config.__init__).parameters
    return config(**{name: value for name, value in settings.items() if name in known})


def npu_run_config_init(run_config: Any = None) -> Any:  # noqa: ANN401 - not each TensorFlow has the type
    """Return the `RunConfig` itself, or a new one; its sessions are configured by `npu_config_proto`."""
    require_one_process("hvd.DistributedOptimizer(opt)")
    config = _estimator().RunConfig() if run_config is None else run_config
    npu_config_proto(config.session_config)
    return config


def NPUEstimator(*args: Any, job_start_file: str = "", **kwargs: Any) -> Any:  # noqa: ANN401, N802 - as above
    """Return a `tf.compat.v1.estimator.Estimator`; `job_start_file` is the NPU's."""
    del job_start_file
    require_one_process("hvd.DistributedOptimizer(opt)")
    return _estimator().Estimator(*args, **kwargs)


def NPUEstimatorSpec(*args: Any, host_call: Any = None, **kwargs: Any) -> Any:  # noqa: ANN401, N802 - as above
    """Return a `tf.compat.v1.estimator.EstimatorSpec`; `host_call` fetches summaries from the NPU, and is left out."""
    del host_call
    return _estimator().EstimatorSpec(*args, **kwargs)


def _estimator() -> Any:  # noqa: ANN401 - a module that not each TensorFlow has
    estimator = getattr(tf.compat.v1, "estimator", None)
    if estimator is None:
        raise ImportError(
            "The NPU bridge's names for Estimator need TensorFlow 2.15, the last version with Estimator, got "
            f"{tf.__version__}: pip install tensorflow==2.15.1."
        )
    return estimator
