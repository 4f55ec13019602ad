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


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the program of the page leaves in its names."""
    found: dict[str, Any] = {}
    exec("\n".join(block.source for block in blocks_of(_PAGE)), found)
    return found


def test_keras_own_wrapper_has_nan_from_the_first_step(names: dict[str, Any]) -> None:
    assert np.isnan(names["stock"]).all()
    assert float(names["own"].loss_scale) == 1


def test_what_the_check_names_trains_as_in_float32(names: dict[str, Any]) -> None:
    # Measured: 3e-4.
    np.testing.assert_allclose(names["in_float16"], names["in_float32"], rtol=1e-3)
    assert (names["again"].remaining, int(names["optimizer"].skipped_steps)) == ([], 0)
    first = names["report"].keep_float32[0]
    assert first.endswith("SelfAttention")
    assert names["report"][first].keep_float32 == "its activations reach 1e+09, and float16 ends at 65504"


def test_a_shorter_list_by_hand_does_so_too(names: dict[str, Any]) -> None:
    # Measured: 5e-4 to 9e-4.
    np.testing.assert_allclose(names["losses"], names["in_float32"], rtol=2e-3)
    assert set(names["feed_forward"]) == {"mixed_float16"}


def test_part_of_the_model_is_in_float16_where_the_check_decides(names: dict[str, Any]) -> None:
    assert any(name.endswith("DenseReluDense/wi") for name in names["in_half"])
