"""The benchmark of the BERT example, at sizes that take seconds; the tests do not look at its times."""

import json
from pathlib import Path

import pytest
import tensorflow as tf

pytest.importorskip("tokenizers")

from benchmarks import bert_speed

_EXAMPLE = (
    "--vocab_size=200 --hidden_size=16 --num_layers=1 --num_heads=2 --seq_length=16 --batch_size=4 --dupe_factor=1 "
    "--input"
)


@pytest.mark.estimator
def test_all_contenders_train_alike(tmp_path: Path) -> None:
    text, path = tmp_path / "numbers.txt", tmp_path / "bert.json"
    text.write_text("\n".join(f"The square of {i} is {i * i}." for i in range(200)))
    options = ["--precisions", "fp32", "--rounds", "1", "--steps", "3", "--memory-turns", "1", "--json", str(path)]
    assert bert_speed.main([*options, "--", *_EXAMPLE.split(), str(text)]) == 0
    figures = json.loads(path.read_text())["figures"]["fp32"]
    assert list(figures) == ["bare", "tf.contrib's formula", "tfmp"]
    for figure in figures.values():
        assert figure["losses"] == pytest.approx(figures["bare"]["losses"], rel=1e-3)
        assert figure["skipped"] == [0]
        assert figure["steps_per_second"][0] > 0


@pytest.mark.skipif(hasattr(tf, "estimator"), reason=f"TensorFlow {tf.__version__} has tf.estimator")
def test_without_estimator_the_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bert_speed.main([]) == 2
    assert "needs tf.estimator" in capsys.readouterr().err
