"""The code bases with a BERT script, and the configurations in which each is trained."""

from typing import NamedTuple

#: The module that makes the train op: the checkout's own `optimization.py` as it was migrated, the same module after a
#: line was edited as by hand, or tfmp's kit.
COLUMNS = ("own", "edited", "kit")


class Configuration(NamedTuple):
    """The settings of a training.

    Attributes:
        name: The name in tables.
        options: The options of the script, beside those of all configurations.
        windows: The number of runs of the train op that make one step.
        resumes: Whether the training resumes from a checkpoint with the variable names of TensorFlow 1.15.
        wrapped: Whether the script wraps its optimizer: originally in tf.contrib's wrapper, after the migration in
            tfmp's.
    """

    name: str
    options: tuple[str, ...] = ()
    windows: int = 1
    resumes: bool = False
    wrapped: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of this configuration; "edited" differs from "own" only if there is a wrapper.

        Examples:
            >>> Configuration("fp32 Adam").columns
            ('own', 'kit')
        """
        return COLUMNS if self.wrapped else (COLUMNS[0], COLUMNS[2])


class Source(NamedTuple):
    """A code base with a BERT script.

    Attributes:
        name: The name of its owner.
        common: The options of the script in all configurations; `{}` is replaced by the directory of records.
        kit_import: The import of tfmp's kit for this script, up to ` as` and a name.
        counts: The code of its own `optimization.py` that advances the step; empty if that code is not edited.
        counts_once: The edited code, which does not advance the step where tfmp's optimizer does.
        configurations: The configurations to train.
    """

    name: str
    common: tuple[str, ...]
    kit_import: str
    counts: str
    counts_once: str
    configurations: tuple[Configuration, ...]


_ADAM = ("--optimizer_type=adam",)
_LAMB = ("--optimizer_type=lamb",)
_FP16 = ("--manual_fp16",)
_FOUR = ("--num_accumulation_steps=4",)

NVIDIA = Source(
    name="NVIDIA",
    common=("--input_files_dir={}", "--nouse_xla", "--report_loss", "--dllog_path=/dev/null"),
    kit_import="import tfmp.bert",
    counts="[global_step.assign(new_global_step)]",
    counts_once="[] if manual_fp16 else [global_step.assign(new_global_step)]",
    configurations=(
        Configuration("fp32 Adam", ("--noamp", *_ADAM)),
        Configuration("manual_fp16 Adam", ("--noamp", *_ADAM, *_FP16), wrapped=True),
        Configuration("fp32 LAMB", ("--noamp", *_LAMB)),
        Configuration("manual_fp16 LAMB", ("--noamp", *_LAMB, *_FP16), wrapped=True),
        Configuration("amp Adam", ("--amp", *_ADAM)),
        Configuration("manual_fp16 Adam, accumulation 4", ("--noamp", *_ADAM, *_FP16, *_FOUR), windows=4, wrapped=True),
        Configuration("manual_fp16 Adam, resumed", ("--noamp", *_ADAM, *_FP16), resumes=True, wrapped=True),
        Configuration(
            "manual_fp16 Adam, accumulation 4, resumed",
            ("--noamp", *_ADAM, *_FP16, *_FOUR),
            windows=4,
            resumes=True,
            wrapped=True,
        ),
    ),
)

GOOGLE = Source(
    name="Google",
    common=("--input_file={}/*", "--nouse_tpu"),
    kit_import="from tfmp.bert import google",
    counts="",
    counts_once="",
    configurations=(Configuration("fp32 Adam"), Configuration("fp32 Adam, resumed", resumes=True)),
)
