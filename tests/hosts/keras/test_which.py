"""Objects of Keras are told apart by the packages that are imported."""

import sys
import types

import keras
import pytest

from tfmp.hosts.keras.which import is_keras2, keras_of, module_for


def _package(name: str, version: str) -> types.ModuleType:
    package = types.ModuleType(name)
    vars(package)["__version__"] = version
    return package


@pytest.mark.parametrize(
    ("name", "version", "module", "is_2"),
    [
        ("keras", "3.15.1", "keras3", False),
        ("keras", "2.15.0", "keras215", True),
        ("tf_keras", "2.21.0", "tf_keras", True),
    ],
)
def test_each_keras_has_its_module(name: str, version: str, module: str, is_2: bool) -> None:
    package = _package(name, version)
    assert (module_for(package), is_keras2(package)) == (module, is_2)


def test_old_keras_is_refused() -> None:
    with pytest.raises(ImportError, match=r"needs Keras 3\.5 or newer"):
        module_for(_package("keras", "3.4.1"))


def test_objects_are_of_the_package_that_has_their_class() -> None:
    assert keras_of(keras.Sequential(), "Model") is keras
    assert keras_of(keras.Sequential(), "optimizers.Optimizer") is None


@pytest.mark.parametrize("version", ["", "3.15.1"])
def test_package_without_the_class_has_no_objects(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", _package("keras", version))
    monkeypatch.delitem(sys.modules, "tf_keras", raising=False)
    assert keras_of(object(), "layers.Layer") is None
