"""What the tests of ported projects share."""

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture
def session() -> Iterator[tf.compat.v1.Session]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session
