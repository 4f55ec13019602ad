"""The bridge's names for devices, processes and Estimator, which do nothing in one process and refuse several."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import tfmp.npu

pytestmark = pytest.mark.graph

#: What each name returns in one process.
_RETURNED: dict[str, Callable[[], bool]] = {
    "get_rank_size": lambda: tfmp.npu.get_rank_size() == tfmp.npu.get_rank_size(group="hccl_world_group") == 1,
    "get_local_rank_size": lambda: tfmp.npu.get_local_rank_size() == 1,
    "get_npu_rank_size": lambda: tfmp.npu.get_npu_rank_size() == 1,
    "get_rank_id": lambda: tfmp.npu.get_rank_id() == tfmp.npu.get_rank_id("hccl_world_group") == 0,
    "get_local_rank_id": lambda: tfmp.npu.get_local_rank_id() == 0,
    "get_npu_rank_id": lambda: tfmp.npu.get_npu_rank_id() == 0,
    "get_npu_local_rank_id": lambda: tfmp.npu.get_npu_local_rank_id() == 0,
    "ops_adapter.size": lambda: tfmp.npu.ops_adapter.size() == 1,
    "ops_adapter.rank": lambda: tfmp.npu.ops_adapter.rank() == 0,
    "npu_hooks_append": lambda: _is_returned(tfmp.npu.npu_hooks_append, "hooks_list"),
    "npu_callbacks_append": lambda: _is_returned(tfmp.npu.npu_callbacks_append, "callbacks_list"),
    "npu_tf_optimizer": lambda: _is_itself(tfmp.npu.npu_tf_optimizer),
    "npu_keras_optimizer": lambda: _is_itself(tfmp.npu.npu_keras_optimizer),
    "npu_distributed_optimizer_wrapper": lambda: _is_itself(tfmp.npu.npu_distributed_optimizer_wrapper),
    "NPUDistributedOptimizer": lambda: _is_itself(tfmp.npu.NPUDistributedOptimizer),
    "KerasDistributeOptimizer": lambda: _is_itself(tfmp.npu.KerasDistributeOptimizer),
    "npu_config_proto": lambda: tfmp.npu.npu_config_proto().allow_soft_placement,
    "init_resource": lambda: _is_opened_and_closed(*tfmp.npu.init_resource()),
}


def _is_returned(append: Callable[..., list[str]], keyword: str) -> bool:
    given = ["one"]
    return append(given) is given and append(**{keyword: given}) is given and append() == [] and append(("a",)) == ["a"]


def _is_itself(wrapper: Callable[[object], object]) -> bool:
    optimizer = tf.compat.v1.train.AdamOptimizer()
    return wrapper(optimizer) is optimizer


def _is_opened_and_closed(session: tf.compat.v1.Session, shutdown: tf.Operation) -> bool:
    session.run(shutdown)
    tfmp.npu.shutdown_resource(session, shutdown)
    tfmp.npu.close_session(session)
    with pytest.raises(RuntimeError, match="closed Session"):
        session.run(shutdown)
    return True


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with tf.Graph().as_default():
        yield


@pytest.mark.parametrize("size", [None, "", "0", "1", " 1 "])
@pytest.mark.parametrize("name", _RETURNED)
def test_one_process_needs_none_of_them(name: str, size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if size is None:
        monkeypatch.delenv("RANK_SIZE", raising=False)
    else:
        monkeypatch.setenv("RANK_SIZE", size)
    assert _RETURNED[name]()


_OF_ESTIMATOR = [getattr(tfmp.npu, name) for name in ("NPURunConfig", "NPUEstimator", "npu_run_config_init")]


@pytest.mark.parametrize("call", [*_RETURNED.values(), *_OF_ESTIMATOR])
def test_several_processes_are_refused(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_SIZE", "8")
    expected = r"RANK_SIZE is '8': .* RANK_SIZE to 1\. .* as hvd`, and in place of this name use .*(hvd|horovod)"
    with pytest.raises(RuntimeError, match=expected):
        call()


def test_configuration_of_a_session_stays_the_users() -> None:
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=3)
    config.graph_options.rewrite_options.custom_optimizers.add().name = "NpuOptimizer"
    assert tfmp.npu.npu_config_proto(config_proto=config) is config
    assert config.allow_soft_placement
    assert config.inter_op_parallelism_threads == 3
    # TensorFlow leaves out a graph pass that it does not know.
    with tf.compat.v1.Session(config=config) as session:
        assert session.run(tf.constant(2) + tf.constant(3)) == 5


def test_operations_are_those_of_tensorflow(session: tf.compat.v1.Session) -> None:
    values = tf.constant([-1.0, 0.0, 2.0])
    by_tanh = 0.5 * values * (1.0 + tf.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)))
    assert session.run(tfmp.npu.npu_unary_ops.gelu(values)).tolist() == pytest.approx(session.run(by_tanh).tolist())
    kept = session.run(tfmp.npu.npu_ops.dropout(tf.ones([1000]), 0.25, seed=1))
    assert set(kept.tolist()) == {0.0, 4.0}
    assert session.run([tfmp.npu.npu_ops.initialize_system(), tfmp.npu.npu_ops.shutdown_system()]) == [None, None]


def test_empty_hook_is_a_hook_that_does_nothing() -> None:
    hook = tfmp.npu.NpuEmptyHook()
    step = tf.compat.v1.train.get_or_create_global_step()
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
        assert session.run(step) == 0


@pytest.mark.skipif(not hasattr(tf.compat.v1.keras.backend, "set_session"), reason="Keras 3 has no sessions")
def test_keras_uses_the_session() -> None:
    backend = tf.compat.v1.keras.backend
    before = backend.get_session()
    session = tfmp.npu.set_keras_session_npu_config(config=tf.compat.v1.ConfigProto())
    try:
        assert backend.get_session() is session
    finally:
        backend.set_session(before)
        tfmp.npu.close_session(session)


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
    spec = model_fn(tf.ones([3]), "eval", {"factor": 2.0})
    assert type(spec) is tf.compat.v1.estimator.EstimatorSpec
    assert spec.mode == "eval"


@_with_estimator
def test_a_strategy_that_the_bridge_distributes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"distribute must be left out, got 'workers'.*RunConfig\(train_distribute="):
        tfmp.npu.NPURunConfig(distribute="workers")


@pytest.mark.skipif(_HAS_ESTIMATOR, reason="this TensorFlow has Estimator")
@pytest.mark.parametrize("name", ["NPURunConfig", "NPUEstimator", "NPUEstimatorSpec", "npu_run_config_init"])
def test_a_tensorflow_without_estimator_is_named(name: str) -> None:
    with pytest.raises(ImportError, match=r"need TensorFlow 2\.15, the last version with Estimator, got "):
        getattr(tfmp.npu, name)()
