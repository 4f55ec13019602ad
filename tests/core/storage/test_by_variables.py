"""What is kept for each list of variables."""

import tensorflow as tf

from tfmp.core.storage.by_variables import ByVariables


def test_each_list_of_variables_has_an_object_of_its_own() -> None:
    kept = ByVariables(lambda names: tf.Variable(len(names)))
    first, second = kept.of(["kernel", "bias"]), kept.of(["bias", "kernel"])
    assert kept.of(("kernel", "bias")) is first
    assert first is not second
    assert list(kept) == [first, second]


def test_objects_are_in_a_saved_model_and_in_no_checkpoint() -> None:
    kept = ByVariables(lambda names: tf.Module())
    kept.of(["kernel"])
    assert kept._trackable_children() == {}
    assert "_each" in kept._trackable_children("savedmodel")
