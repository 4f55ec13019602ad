"""Trains the configurations of a migrated BERT script, each in a process of its own."""

import sys
import time
from pathlib import Path

import numpy as np
import port_bert_data as data
import port_bert_outcomes as outcomes
import tensorflow as tf
from port_bert_outcomes import Outcome
from port_bert_sources import COLUMNS, Configuration, Source
from port_bert_stubs import COUNTS_VARIABLE, write_counting, write_stubs
from processes import last_lines, run

_RECORDS = 512
#: The name of the training script, in both code bases.
SCRIPT = "run_pretraining.py"
_IMPORT = "import optimization"

_ALWAYS = (
    "--do_train",
    "--train_batch_size=8",
    f"--max_seq_length={data.SEQ_LENGTH}",
    f"--max_predictions_per_seq={data.PREDICTIONS}",
    "--learning_rate=0.005",
    "--num_warmup_steps=5",
    "--save_checkpoints_steps=1000",
)


class Bench:
    """A directory with the files that all trainings need.

    Args:
        directory: An empty directory.
        steps: The number of steps of a training.
        timeout: The seconds after which a process is ended.
    """

    def __init__(self, directory: Path, steps: int, timeout: float) -> None:
        self._directory = directory
        self._steps = steps
        self._timeout = timeout
        self._records = directory / "records"
        self._records.mkdir()
        for part in range(2):
            data.write_records(self._records / f"{part}.tfrecord", _RECORDS // 2)
        data.write_config(directory / "bert_config.json")
        write_stubs(directory / "stubs")

    def put_columns(self, source: Source, checkout: Path) -> None:
        """Write a variant of a migrated checkout's script for each column, and the modules that the variants import.

        Args:
            source: The code base of the checkout.
            checkout: The directory of the checkout.

        Raises:
            ValueError: The script does not import its optimizer in the way of both public scripts, or the optimizer's
                module does not have the known code that advances the step.
        """
        script = (checkout / SCRIPT).read_text().splitlines(keepends=True)
        if [line.strip() for line in script].count(_IMPORT) != 1:
            raise ValueError(f"{checkout / SCRIPT} must have one line `{_IMPORT}`; it may be another version.")
        own = (checkout / "optimization.py").read_text()
        if source.counts not in own:
            raise ValueError(f"{checkout / 'optimization.py'} must have `{source.counts}`; it may be another version.")
        imports = dict(
            zip(COLUMNS, ("import optimization", "import optimization_edited", source.kit_import), strict=True)
        )
        for column, imported in imports.items():
            lines = [_counted(column) + "\n" if line.strip() == _IMPORT else line for line in script]
            (checkout / _entry(column)).write_text("".join(lines))
            write_counting(checkout / f"counted_{column}.py", f"{imported} as measured")
        (checkout / "optimization_edited.py").write_text(own.replace(source.counts, source.counts_once))
        # The fused layer norm is for GPUs; without its module, the model uses the plain layer norm.
        (checkout / "fused_layer_norm.py").unlink(missing_ok=True)

    def train(self, source: Source, configuration: Configuration, column: str, checkout: Path) -> Outcome:
        """Train a configuration, and return its outcome.

        Args:
            source: The code base of the checkout.
            configuration: The configuration to train.
            column: The module that makes the train op, one of `COLUMNS`.
            checkout: The directory of the checkout, after its migration and `put_columns`.
        """
        place = self._directory / "_".join([source.name, configuration.name, column]).replace(" ", "_").replace(",", "")
        place.mkdir()
        started = 0
        if configuration.resumes:
            started = outcomes.RESUMED_STEP
            data.write_checkpoint(place / "model", _resumed_values(configuration))
        begin = time.monotonic()
        ended = self._launch(source, configuration, column, checkout, place, started)
        outcome = Outcome(ended, time.monotonic() - begin, outcomes.read_counts(place / "counts.txt"))
        if (place / "model").exists():
            outcome.step, outcome.scale = _saved(place / "model")
        outcome.problem = outcome.problem or outcomes.problem(outcome, started, self._steps, configuration)
        if ended:
            outcome.log = last_lines(place / "log.txt")
        return outcome

    def _launch(
        self, source: Source, configuration: Configuration, column: str, checkout: Path, place: Path, started: int
    ) -> str:
        common = [option.format(self._records) for option in source.common]
        command = [
            sys.executable,
            _entry(column),
            f"--bert_config_file={self._directory / 'bert_config.json'}",
            f"--output_dir={place / 'model'}",
            f"--num_train_steps={started + self._steps}",
            *_ALWAYS,
            *common,
            *configuration.options,
        ]
        variables = {COUNTS_VARIABLE: str(place / "counts.txt")}
        return run(command, checkout, place / "log.txt", [self._directory / "stubs"], self._timeout, variables)


def _entry(column: str) -> str:
    return f"port_bert_{column}.py"


def _counted(column: str) -> str:
    return f"import counted_{column} as optimization"


def _resumed_values(configuration: Configuration) -> dict[str, np.ndarray]:
    values = data.trained_values(outcomes.RESUMED_STEP, data.CONFIG)
    if configuration.wrapped:
        values |= data.scaling_values(outcomes.RESUMED_SCALE, outcomes.RESUMED_GOOD_STEPS)
    if configuration.windows > 1:
        values |= data.accumulation_values(data.CONFIG)
    return values


def _saved(model: Path) -> tuple[int | None, float | None]:
    """Return the global step and the loss scale in the latest checkpoint of a directory."""
    newest = tf.train.latest_checkpoint(str(model))
    if newest is None:
        return None, None
    reader = tf.train.load_checkpoint(newest)
    # The second name belongs to TensorFlow's own loss scale, which the mixed precision graph rewrite uses.
    names = [name for name in ("loss_scale", "current_loss_scale") if reader.has_tensor(name)]
    return int(reader.get_tensor("global_step")), float(reader.get_tensor(names[0])) if names else None
