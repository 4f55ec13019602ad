"""The code bases with a BERT script, each with the ways it is trained."""

from typing import NamedTuple

#: Who makes the train op: the checkout's own module as it was migrated, the same after a line was edited by hand, or
#: tfmp's kit.
COLUMNS = ("own", "edited", "kit")


class Configuration(NamedTuple):
    """A way to train.

    Attributes:
        name: What the table says.
        options: What the script is told beside what all runs are told.
        windows: Runs of the train op that make a step.
        resumes: Whether it goes on from a checkpoint with the names of TensorFlow 1.15.
        wrapped: Whether the script wraps its optimizer in that of tf.contrib, now tfmp's.
    """

    name: str
    options: tuple[str, ...] = ()
    windows: int = 1
    resumes: bool = False
    wrapped: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Who may make the train op: the line that is edited concerns the wrapper.

        Example:
            >>> Configuration("fp32 Adam").columns
            ('own', 'kit')
        """
        return COLUMNS if self.wrapped else (COLUMNS[0], COLUMNS[2])


class Source(NamedTuple):
    """A code base with a BERT script.

    Attributes:
        name: Whose it is.
        common: What its script is told in all configurations; `{}` is the directory of records.
        kit_import: What imports tfmp's kit for it; ` as` and a name follow.
        counts: How its own module advances the step.
        counts_once: The same, left out where tfmp's optimizer counts.
        configurations: How it is trained.
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
