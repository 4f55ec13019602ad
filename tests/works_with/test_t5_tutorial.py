"""The tutorial on T5 runs on the libraries of this environment, and shows what its text says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.typed_blocks import blocks_of

transformers = pytest.importorskip(
    "transformers", reason="needs transformers, which the tox environment works_with_keras2 installs"
)

# It is T5's mask, in float16, that NumPy warns of.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")

_PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "t5.md"


def test_page_shows_nan_with_keras_own_wrapper_and_the_curve_of_float32_with_what_the_check_names() -> None:
    names: dict[str, Any] = {}
    exec("\n".join(block.source for block in blocks_of(_PAGE)), names)
    assert np.isnan(names["stock"]).all()
    assert float(names["own"].loss_scale) == 1
    # Measured: 3e-4.
    np.testing.assert_allclose(names["in_float16"], names["in_float32"], rtol=1e-3)
    assert (names["again"].remaining, int(names["optimizer"].skipped_steps)) == ([], 0)
    first = names["report"].keep_float32[0]
    assert first.endswith("SelfAttention")
    assert names["report"][first].keep_float32 == "its activations reach 1e+09, and float16 ends at 65504"
    assert any(name.endswith("DenseReluDense/wi") for name in names["in_half"])
    # With a shorter list by hand. Measured: 5e-4 to 9e-4.
    np.testing.assert_allclose(names["losses"], names["in_float32"], rtol=2e-3)
    assert set(names["feed_forward"]) == {"mixed_float16"}
