"""Models of Keras that compute in bfloat16, and need no loss scaling."""

from types import ModuleType

import numpy as np
import pytest
from kerases import dense_model, for_every_keras, wrap


@for_every_keras()
@pytest.mark.parametrize(("policy", "notices"), [("mixed_bfloat16", 1), ("mixed_float16", 0), ("float32", 0)])
def test_fit_is_told_once_that_bfloat16_needs_no_scaling(
    keras: ModuleType, policy: str, notices: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = dense_model(keras, wrap(keras.optimizers.SGD(0.125)), policy)
    for rows in (4, 6):
        model.fit(np.ones([rows, 3], np.float32), np.ones([rows, 1], np.float32), batch_size=rows, verbose=0)
    assert caplog.text.count("the loss is computed in bfloat16") == notices
    assert int(model.optimizer.applied_steps) == 2
