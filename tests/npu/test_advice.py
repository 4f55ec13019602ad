"""A name of the NPU bridge that tfmp does not have raises an error that says what to use."""

import subprocess
import sys
from pathlib import Path

import pytest

import tfmp
import tfmp.npu
from tfmp.npu.advice import ADVICE

pytestmark = pytest.mark.graph


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
