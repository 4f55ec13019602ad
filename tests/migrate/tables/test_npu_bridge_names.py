"""The replacements of the NPU bridge's names."""

import importlib

from tfmp.migrate.tables.npu_bridge_names import LOSS_SCALES, MODULES, STAR, advice, import_lines, target


def test_the_loss_scaling_names_are_in_tfmp() -> None:
    for name in LOSS_SCALES:
        assert target(f"{STAR}.{name}") == "tfmp.npu"
        assert hasattr(importlib.import_module("tfmp.npu"), name)
    for module in MODULES:
        assert target(f"npu_bridge.estimator.npu.{module}") == "tfmp.npu"
        assert importlib.import_module(f"tfmp.npu.{module}")


def test_other_names_have_advice_in_place_of_a_target() -> None:
    assert target(f"{STAR}.npu_ops") is None
    assert advice("npu_ops")
    assert not advice("npu_ops").endswith(".")


def test_one_import_line_serves_all_names_of_a_module() -> None:
    names = ["session", "RewriterConfig", *LOSS_SCALES]
    assert import_lines(names) == [
        "from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig",
        "from tensorflow.python.client import session",
        f"from tfmp.npu import {', '.join(sorted(LOSS_SCALES))}",
    ]
