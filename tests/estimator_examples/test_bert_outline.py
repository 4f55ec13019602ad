"""Tests of the description that is printed before a run begins."""

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from estimator_examples.bert import outline
from estimator_examples.bert.options import parse_options
from estimator_examples.bert.preparation import Sizes

SIZES = Sizes(vocab_size=2000, training_examples=11038, held_out_examples=594)


def test_the_outline_tells_what_trains_how_the_scale_adapts_and_how_long_it_takes() -> None:
    text = outline.outline(parse_options([]), SIZES, 697042, workers=1, first_step=0, loss_scale=2.0**32)
    assert text == (
        "Training\n"
        "  model      BERT, 2 layers of width 128, 2000 word pieces, 697042 weights\n"
        "  data       11038 training and 594 held-out examples of 64 tokens\n"
        "  precision  O2, dynamic loss scale\n"
        "  steps      1200 of 32 examples\n"
        "  time       about 3 minutes on two free CPU cores\n"
        "The loss scale starts at 4294967296. A step whose gradients overflow is skipped. Two such steps halve the "
        "scale, 100 finite ones double it."
    )


def test_the_outline_of_a_resumed_run_counts_what_is_left() -> None:
    options = parse_options(["--num_layers=1", "--precision=O0"])
    text = outline.outline(options, SIZES, 497000, workers=2, first_step=1000, loss_scale=1.0)
    assert "BERT, 1 layer of width 128" in text
    assert text.endswith(
        "  precision  O0, fixed loss scale 1\n"
        "  steps      200 of 64 examples\n"
        "  time       about 1 minute on two free CPU cores"
    )
