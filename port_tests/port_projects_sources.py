"""The projects of TensorFlow 1 that are ported, and what a person edits in each after the migration."""

import re
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """A replacement that a person makes in a file.

    Attributes:
        file: The file, below the checkout.
        pattern: A regular expression, which must be found once.
        text: The text that replaces what was found; it may name groups of the pattern.
    """

    file: str
    pattern: str
    text: str


class Project(NamedTuple):
    """A project of TensorFlow 1.

    Attributes:
        name: The name in tables.
        variable: The environment variable that names a checkout.
        script: A file that a checkout has, by which it is known.
        training: The training in `port_projects_training.py`.
        imports_from: The directory that the project's modules are imported from, below the parent of the checkout;
            `{}` stands for the checkout.
        to_run: What a person edits after the migration so that the project runs at all.
        to_scale: What a person edits so that the project scales its loss.
        bound: The largest relative difference between a loss at O1 and the same in float32. It is two to three times
            the largest difference for six seeds.
        noted: A rule of the migration whose note has to be followed for float16; without that, each loss at O1 is NaN.
    """

    name: str
    variable: str
    script: str
    training: str
    imports_from: str
    to_run: tuple[Edit, ...]
    to_scale: tuple[Edit, ...]
    bound: float
    noted: str = ""


#: The scale is so large at first that the first steps overflow.
_MANAGER = "tfmp.ExponentialUpdateLossScaleManager(2**32, 1000, 1, decr_ratio=0.5)"
_TF = "import tensorflow.compat.v1 as tf\n"


def _import(file: str) -> Edit:
    return Edit(file, rf"(?m)^{re.escape(_TF)}", f"{_TF}import tfmp\n")


def _scales(file: str, before: str) -> tuple[Edit, ...]:
    """Return the edits of an `optimization.py` that is derived from BERT's: wrap the optimizer, and do not count twice.

    Args:
        file: The file.
        before: A regular expression for the line that the optimizer is complete at.
    """
    return (
        _import(file),
        Edit(file, rf"(?m)^  {before}$", rf"  optimizer = tfmp.LossScaleOptimizer(optimizer, {_MANAGER})\n\g<0>"),
        Edit(file, r"\n.*global_step\.assign\(new_global_step\).*", ""),
    )


def _of_bert(file: str) -> tuple[Edit, ...]:
    gradients = r"grads = tf\.gradients\((?P<arguments>[^()]*)\)"
    computed = r"grads, tvars = zip(*optimizer.compute_gradients(\g<arguments>))"
    return (*_scales(file, r"tvars = tf\.trainable_variables\(\)"), Edit(file, gradients, computed))


_TRAIN = "tf/train_gpu.py"

PROJECTS = (
    Project(
        name="BERT",
        variable="TFMP_GOOGLE_BERT",
        script="run_pretraining.py",
        training="bert",
        imports_from="{}",
        to_run=(),
        to_scale=_of_bert("optimization.py"),
        bound=2.5e-4,
    ),
    Project(
        name="ALBERT",
        variable="TFMP_ALBERT",
        script="lamb_optimizer.py",
        training="albert",
        imports_from="",
        to_run=(),
        to_scale=_of_bert("optimization.py"),
        bound=4e-5,
    ),
    Project(
        name="ELECTRA",
        variable="TFMP_ELECTRA",
        script="configure_pretraining.py",
        training="electra",
        imports_from="{}",
        to_run=(),
        to_scale=_of_bert("model/optimization.py"),
        bound=5e-4,
    ),
    Project(
        name="XLNet",
        variable="TFMP_XLNET",
        script="xlnet.py",
        training="xlnet",
        imports_from="{}",
        to_run=(),
        to_scale=(
            *_scales("model_utils.py", "if grads_and_vars is None:"),
            Edit(
                "train_gpu.py",
                r"get_train_op\(FLAGS, None,\s+grads_and_vars=grads_and_vars\)",
                "get_train_op(FLAGS, loss)",
            ),
        ),
        bound=2.5e-4,
    ),
    Project(
        name="Transformer-XL",
        variable="TFMP_TRANSFORMER_XL",
        script=_TRAIN,
        training="transformer_xl",
        imports_from="{}/tf",
        to_run=(),
        to_scale=(
            _import(_TRAIN),
            Edit(
                _TRAIN,
                r"optimizer = (?P<plain>tf\.train\.AdamOptimizer\(.*\))",
                rf"optimizer = tfmp.LossScaleOptimizer(\g<plain>, {_MANAGER})\n"
                "  grads, all_vars = zip(*optimizer.compute_gradients(loss))\n"
                "  clipped, gnorm = tf.clip_by_global_norm(grads, FLAGS.clip)\n"
                "  grads_and_vars = list(zip(clipped, all_vars))",
            ),
        ),
        bound=5e-5,
    ),
    Project(
        name="GPT-2",
        variable="TFMP_GPT2",
        script="src/model.py",
        training="gpt2",
        imports_from="{}/src",
        to_run=(
            Edit(
                "src/model.py",
                r"from tensorflow\.contrib\.training import HParams",
                "from types import SimpleNamespace as HParams",
            ),
        ),
        to_scale=(Edit("src/model.py", r"tf\.cast\(1e10, w\.dtype\)", "tf.cast(6e4, w.dtype)"),),
        bound=1.5e-4,
        noted="R16",
    ),
)


def edit(checkout: Path, edits: tuple[Edit, ...]) -> None:
    """Edit files of a migrated checkout as a person would.

    Args:
        checkout: The directory of the checkout.
        edits: The edits.

    Raises:
        ValueError: A file does not have the text to edit; it may be another version.
    """
    for file, pattern, text in edits:
        path = checkout / file
        edited, count = re.subn(pattern, text, path.read_text())
        if count != 1:
            raise ValueError(f"{path} must have one `{pattern}`, and has {count}; it may be another version.")
        path.write_text(edited)
