import tensorflow as tf

from tfmp.core.distribute import SingleProcess


def test_single_process_has_the_total_and_the_maximum_itself() -> None:
    values = tf.constant([1, -2], tf.int64)
    assert SingleProcess().total(values, "values") is SingleProcess().maximum(values, "values") is values
