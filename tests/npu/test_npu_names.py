"""The package defines the names of the NPU bridge; of one that it does not have, it says what to use."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tfmp
import tfmp.npu
from tfmp.npu import npu_loss_scale_manager as lsm_lib
from tfmp.npu import npu_loss_scale_optimizer as lso
from tfmp.npu.advice import ADVICE

pytestmark = pytest.mark.graph


def test_alias_modules_hold_the_names_of_the_package() -> None:
    assert tfmp.npu.NPULossScaleOptimizer is lso.NPULossScaleOptimizer
    assert tfmp.npu.FixedLossScaleManager is lsm_lib.FixedLossScaleManager
    assert tfmp.npu.ExponentialUpdateLossScaleManager is lsm_lib.ExponentialUpdateLossScaleManager
    names: dict[str, Any] = {}
    exec("from tfmp.npu import *", names)
    assert set(names) - {"__builtins__"} == set(tfmp.npu.__all__)
    assert set(dir(tfmp.npu)) == {*tfmp.npu.__all__, "npu_loss_scale_manager", "npu_loss_scale_optimizer"}


def test_alias_modules_are_read_where_only_the_package_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("npu_loss_scale_manager", "npu_loss_scale_optimizer"):
        # Importing the module has added this attribute to the package.
        monkeypatch.delattr(tfmp.npu, name)
        assert getattr(tfmp.npu, name) is importlib.import_module(f"tfmp.npu.{name}")


def test_names_that_nobody_knows_are_missing_as_anywhere() -> None:
    with pytest.raises(AttributeError, match=r"module 'tfmp\.npu' has no attribute 'NPUThing'"):
        _ = tfmp.npu.NPUThing
    with pytest.raises(ImportError, match="cannot import name 'NPUThing'"):
        exec("from tfmp.npu import NPUThing", {})
    probed = ("__wrapped__", "__file__", "__path__", "__test__", "pytest_plugins", "__bases__", "setup_module")
    assert [hasattr(tfmp.npu, name) for name in probed] == [False, True, True, False, False, False, False]
    assert importlib.reload(tfmp.npu).__all__ == tfmp.npu.__all__


@pytest.mark.parametrize("name", ["NpuExecutePlacement", "NPUOptimizer", "npu_init", "hccl_ops", "util", "DynamicRNN"])
def test_names_that_are_not_here_say_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=rf"^tfmp\.npu has no {name}: ") as caught:
        exec(f"from tfmp.npu import {name}", {})
    assert str(caught.value) == f"tfmp.npu has no {name}: {ADVICE[name]}."
    with pytest.raises(ImportError, match=rf"tfmp\.npu has no {name}"):
        getattr(tfmp.npu, name)


def test_advice_is_given_for_no_name_that_is_here() -> None:
    assert not set(ADVICE) & {*tfmp.npu.__all__, "npu_loss_scale_manager", "npu_loss_scale_optimizer"}
    assert not [advice for advice in ADVICE.values() if advice.endswith(".") or not advice]


def test_advice_needs_no_tensorflow() -> None:
    root = Path(tfmp.__file__).parent.parent
    code = (
        f"import sys; sys.path[:0] = [{str(root)!r}]\n"
        "import tfmp.npu.advice\n"
        "assert not {'tensorflow', 'numpy'} & set(sys.modules)\n"
        "sys.path[:] = [entry for entry in sys.path if 'site-packages' not in entry]\n"
        "from tfmp.npu import NPUOptimizer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ImportError: tfmp.npu has no NPUOptimizer: use the optimizer inside it; " in done.stderr
