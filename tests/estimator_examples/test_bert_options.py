"""Tests of the command-line options."""

import pathlib
import re

import pytest

from estimator_examples.bert import options, run_pretraining


def test_by_default_the_loss_scale_is_dynamic_and_starts_high() -> None:
    parsed = options.parse_options([])
    assert parsed.precision == "O2"
    assert parsed.dynamic
    assert parsed.fixed_loss_scale is None
    assert parsed.init_loss_scale == 2.0**32
    assert parsed.num_warmup_steps == parsed.num_train_steps // 10


@pytest.mark.parametrize(
    ("arguments", "fixed"),
    [
        (["--loss_scale", "2**15"], 2.0**15),
        (["--loss_scale", "1"], 1.0),
        (["--loss_scale", "0"], None),
        (["--precision", "O0"], 1.0),
    ],
)
def test_precision_and_loss_scale_decide_the_fixed_scale(arguments: list[str], fixed: float | None) -> None:
    assert options.parse_options(arguments).fixed_loss_scale == fixed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num_train_steps -5", "--num_train_steps: must be 1 or more, got -5"),
        ("--num_train_steps many", "must be a whole number, got 'many'"),
        ("--num_train_steps 10 --num_warmup_steps 10", "less than --num_train_steps, got 10 and 10"),
        ("--num_warmup_steps -1", "--num_warmup_steps: must be 0 or more, got -1"),
        ("--loss_scale 0.5", "--loss_scale: must be 1 or more, .*got 0.5. 0 chooses a dynamic"),
        ("--loss_scale -1", "--loss_scale: must be 1 or more, .*got -1"),
        ("--loss_scale nan", "--loss_scale: must be 1 or more, .*got nan"),
        ("--loss_scale 2**x", r"--loss_scale: must be a number, got '2\*\*x'"),
        ("--init_loss_scale inf", "--init_loss_scale: must be 1 or more, and finite in float32"),
        ("--init_loss_scale 2**9999", "--init_loss_scale: must be 1 or more, and finite in float32"),
        ("--init_loss_scale 0", "--init_loss_scale: must be 1 or more"),
        ("--learning_rate 0", "--learning_rate: must be a finite number above 0, got 0"),
        ("--dropout 1", "--dropout: must be at least 0 and less than 1, got 1"),
        ("--hidden_size 10 --num_heads 4", "multiple of --num_heads, got 10 and 4"),
        ("--seq_length 8", "--seq_length must be 16 or more, got 8"),
        ("--precision O0 --loss_scale 8", "float32 needs no loss scale, got 8: leave out --loss_scale"),
        ("--aggregation_dtype float16", "--aggregation_dtype is for --distribute horovod, got --distribute none"),
        ("--aggregation_dtype float32 --distribute horovod", "invalid choice: 'float32'"),
        ("--precision fp8", "invalid choice: 'fp8'"),
        (f"--model_dir {__file__}", "--model_dir must be a directory"),
    ],
)
def test_a_wrong_argument_ends_the_program_with_what_is_wrong(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_pretraining.main(arguments.split())
    assert re.search(message, capsys.readouterr().err)


def test_a_wrong_input_file_ends_the_program_before_anything_is_written(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = tmp_path / "model"
    arguments = ["--model_dir", str(model_dir), "--input", str(tmp_path / "missing.txt")]
    assert run_pretraining.main(arguments) == 2
    assert "run_pretraining: error: cannot read" in capsys.readouterr().err
    assert not model_dir.exists()
