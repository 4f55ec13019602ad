"""What every test of the kit leaves behind: no graph rewrite, which is a setting of the whole process."""

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def _no_graph_rewrite_after() -> Iterator[None]:
    yield
    tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite()
