"""A description, in words, of what a run is about to do."""

from estimator_examples.bert.options import Options
from estimator_examples.bert.preparation import Sizes
from estimator_examples.bert.report import scale_text

# Measured at the default settings, on two cores of a server's CPU. The time for other sizes is assumed to be
# proportional.
_SECONDS_TO_START_AND_EVALUATE = 25
_SECONDS_A_STEP = 0.02
_SECONDS_A_WEIGHT_AND_TOKEN = 7e-11


def outline(options: Options, sizes: Sizes, weights: int, workers: int, first_step: int, loss_scale: float) -> str:
    """Describe what is trained, with which settings, and about how long it takes.

    Args:
        options: The settings of the run.
        sizes: The sizes of the data.
        weights: The number of trained weights.
        workers: The number of processes that train together.
        first_step: The global step that training starts from.
        loss_scale: The loss scale that training starts from.

    Returns:
        The description, as lines of text.
    """
    steps = options.num_train_steps - first_step
    rows = [
        ("model", f"{model_text(options)}, {sizes.vocab_size} word pieces, {weights} weights"),
        (
            "data",
            f"{sizes.training_examples} training and {sizes.held_out_examples} held-out examples of "
            f"{options.seq_length} tokens",
        ),
        ("precision", f"{options.precision}, {options.loss_scaling}"),
        ("steps", f"{steps} of {options.batch_size * workers} examples"),
        ("time", f"{duration_text(_seconds(options, weights, steps))} on two free CPU cores"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = ["Training", *(f"  {name:<{width}}  {value}" for name, value in rows)]
    return "\n".join([*lines, *_rule(options, loss_scale)])


def model_text(options: Options) -> str:
    """Describe the model by its size."""
    layers = "1 layer" if options.num_layers == 1 else f"{options.num_layers} layers"
    return f"BERT, {layers} of width {options.hidden_size}"


def duration_text(seconds: float) -> str:
    """Format an estimated duration, rounded as coarsely as the estimate is.

    Examples:
        >>> duration_text(20), duration_text(170), duration_text(9000)
        ('about 1 minute', 'about 3 minutes', 'about 2.5 hours')
    """
    minutes = max(1, round(seconds / 60))
    if minutes >= 100:
        return f"about {seconds / 3600:.1f} hours"
    return f"about {minutes} minute{'s' if minutes > 1 else ''}"


def _seconds(options: Options, weights: int, steps: int) -> float:
    tokens = options.batch_size * options.seq_length
    return _SECONDS_TO_START_AND_EVALUATE + steps * (_SECONDS_A_STEP + tokens * weights * _SECONDS_A_WEIGHT_AND_TOKEN)


def _rule(options: Options, loss_scale: float) -> list[str]:
    if not options.dynamic:
        return []
    return [
        f"The loss scale starts at {scale_text(loss_scale)}. A step whose gradients overflow is skipped. Two such "
        f"steps halve the scale, {options.incr_every_n_steps} finite ones double it."
    ]
