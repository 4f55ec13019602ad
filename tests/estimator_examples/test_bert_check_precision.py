"""Tests of the command that checks what float16 does to the BERT example."""

import contextlib
import io
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from estimator_examples.bert import check_precision

SMALL = [
    *("--vocab_size=200", "--hidden_size=16", "--num_layers=1", "--num_heads=2"),
    *("--seq_length=32", "--batch_size=8", "--dupe_factor=2"),
]


@pytest.mark.estimator
def test_report_has_the_probes_and_the_weights_of_the_model(tmp_path: Path) -> None:
    text = tmp_path / "numbers.txt"
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    lines = [" ".join(words[int(digit)] for digit in str(7919 * number)) for number in range(200)]
    text.write_text("\n".join(f"{line.capitalize()} is a number." for line in lines), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert check_precision.main([f"--model_dir={tmp_path / 'model'}", f"--input={text}", *SMALL]) == 0
    rows = {line.split()[0]: line for line in printed.getvalue().splitlines() if line}
    probes = ["embeddings", "layer_0/attention/scores", "layer_0/attention", "layer_0/feed_forward", "encoder_output"]
    assert [name for name in rows if name in probes] == probes
    assert "bert/layer_0/feed_forward/intermediate/kernel" in rows
    # The loss of the same weights in float16 was compared.
    assert "in float16." in rows["Loss:"]
    assert (tmp_path / "model" / "ranges.png").stat().st_size > 10_000


def test_missing_text_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_precision.main([f"--model_dir={tmp_path}", f"--input={tmp_path / 'none.txt'}"]) == 2
    assert "check_precision: error: " in capsys.readouterr().err
