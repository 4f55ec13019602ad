"""The replacements of the NPU bridge's names."""

import pytest

import tfmp.npu
from tfmp.migrate.tables.npu_bridge_names import MEMBERS, STAR, advice, import_lines, target


@pytest.mark.parametrize("name", dir(tfmp.npu))
def test_a_name_that_tfmp_has_is_imported_from_it(name: str) -> None:
    for module in (STAR, "npu_bridge.estimator.npu", "npu_bridge.estimator.npu.npu_optimizer", "hccl.manage.api"):
        assert target(f"{module}.{name}") == "tfmp.npu"
    assert advice(name) == "import it from tfmp.npu"


def test_members_of_modules_are_those_of_tfmp() -> None:
    assert {name: set(vars(getattr(tfmp.npu, name))) for name in MEMBERS} == {
        name: set(members) for name, members in MEMBERS.items()
    }


def test_other_names_have_advice_in_place_of_a_target() -> None:
    assert target(f"{STAR}.npu_rnn") is None
    assert advice("npu_rnn")
    assert not advice("npu_rnn").endswith(".")


def test_one_import_line_serves_all_names_of_a_module() -> None:
    names = ["session", "RewriterConfig", "npu_config_proto", "NPULossScaleOptimizer"]
    assert import_lines(names) == [
        "from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig",
        "from tensorflow.python.client import session",
        "from tfmp.npu import NPULossScaleOptimizer, npu_config_proto",
    ]
