"""The bridge's names for Estimator are those of TensorFlow, without the settings of the NPU."""

from pathlib import Path

import pytest
import tensorflow as tf

import tfmp.npu

pytestmark = pytest.mark.graph

_HAS_ESTIMATOR = hasattr(tf.compat.v1, "estimator")
_with_estimator = pytest.mark.skipif(not _HAS_ESTIMATOR, reason="TensorFlow has Estimator up to 2.15")


@_with_estimator
def test_settings_of_the_npu_are_left_out(tmp_path: Path) -> None:
    session_config = tf.compat.v1.ConfigProto()
    config = tfmp.npu.NPURunConfig(
        model_dir=str(tmp_path),
        save_checkpoints_steps=7,
        session_config=session_config,
        iterations_per_loop=10,
        precision_mode="allow_mix_precision",
        dump_config=tfmp.npu.DumpConfig(enable_dump_debug=True, dump_path="out"),
        profiling_config=tfmp.npu.ProfilingConfig(enable_profiling=False),
    )
    assert type(config) is tf.compat.v1.estimator.RunConfig
    assert (config.model_dir, config.save_checkpoints_steps) == (str(tmp_path), 7)
    assert config.session_config is session_config
    assert tfmp.npu.npu_run_config_init(run_config=config) is config
    assert session_config.allow_soft_placement
    assert type(tfmp.npu.npu_run_config_init()) is tf.compat.v1.estimator.RunConfig


@_with_estimator
def test_estimator_and_its_spec_are_those_of_tensorflow(tmp_path: Path) -> None:
    def model_fn(features: tf.Tensor, mode: str, params: dict[str, float]) -> tf.compat.v1.estimator.EstimatorSpec:
        loss = tf.reduce_sum(features) * params["factor"]
        return tfmp.npu.NPUEstimatorSpec(mode, loss=loss, host_call=(print, [loss]))

    estimator = tfmp.npu.NPUEstimator(model_fn, str(tmp_path), params={"factor": 2.0}, job_start_file="job")
    assert type(estimator) is tf.compat.v1.estimator.Estimator
    with tf.Graph().as_default():
        spec = model_fn(tf.ones([3]), "eval", {"factor": 2.0})
    assert type(spec) is tf.compat.v1.estimator.EstimatorSpec
    assert spec.mode == "eval"


@_with_estimator
def test_a_strategy_that_the_bridge_distributes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"distribute must be left out, got 'workers'.*RunConfig\(train_distribute="):
        tfmp.npu.NPURunConfig(distribute="workers")


@pytest.mark.parametrize("name", ["NPURunConfig", "NPUEstimator", "npu_run_config_init"])
def test_several_processes_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"RANK_SIZE is '2': .* names for one process only"):
        getattr(tfmp.npu, name)()


@pytest.mark.skipif(_HAS_ESTIMATOR, reason="this TensorFlow has Estimator")
@pytest.mark.parametrize("name", ["NPURunConfig", "NPUEstimator", "NPUEstimatorSpec", "npu_run_config_init"])
def test_a_tensorflow_without_estimator_is_named(name: str) -> None:
    with pytest.raises(ImportError, match=r"need TensorFlow 2\.15, the last version with Estimator, got "):
        getattr(tfmp.npu, name)()
