"""The benchmark of autocast, with a tiny net."""

import keras
import pytest

if not keras.__version__.startswith("3."):
    pytest.skip("the benchmark is about Keras 3", allow_module_level=True)

from benchmarks import autocast


@pytest.mark.parametrize("name", ["raw, autocast", "raw, float32", "Keras, mixed_float16"])
def test_contender_is_measured(name: str) -> None:
    try:
        peak, seconds = autocast.peak_and_time(name, "tiny", rounds=1)
    finally:
        keras.config.set_dtype_policy("float32")
    assert seconds > 0
    assert peak is None or peak >= 0


def test_ops_are_measured_before_within_and_after_a_scope() -> None:
    ratios = autocast.op_ratios(rounds=1, calls=5)
    assert list(ratios) == ["never", "after a scope", "scope that is off", "scope"]
    assert ratios["never"] == 1
