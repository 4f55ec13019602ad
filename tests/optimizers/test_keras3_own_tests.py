"""Keras' own tests of its wrapper, which are in its wheel, with tfmp's class in the place of Keras'."""

import importlib
import importlib.util
import unittest

import keras
import pytest

import tfmp

_TESTS = "keras.src.optimizers.loss_scale_optimizer_test"

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)


# Of NumPy 2, where Keras makes an array of a variable.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_tests_of_keras_wrapper_pass_with_tfmps(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(_TESTS) is None:
        pytest.skip(f"the wheel of Keras {keras.__version__} does not hold its tests")
    tests = importlib.import_module(_TESTS)
    monkeypatch.setattr(tests, "LossScaleOptimizer", tfmp.LossScaleOptimizer)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(tests).run(result)
    faults = {case.id().rpartition(".")[2]: trace for case, trace in [*result.failures, *result.errors]}
    # The configuration has entries of tfmp's.
    assert set(faults) <= {"test_serialization"}, "\n".join(faults.values())
    assert result.testsRun - len(result.skipped) - len(faults) >= 10
