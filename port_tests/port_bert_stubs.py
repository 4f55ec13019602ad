"""Writes stand-ins for modules that a BERT script imports and a CPU lacks, and the module that counts its steps."""

import importlib.util
from pathlib import Path

#: The environment variable that names the file which the counting module writes to.
COUNTS_VARIABLE = "PORT_BERT_COUNTS"

_DLLOGGER = '''"""Stands in for NVIDIA's logger."""


class Verbosity:
    OFF, DEFAULT, VERBOSE = -1, 0, 1


class Logger:
    def __init__(self, backends):
        pass

    def metadata(self, metric, metadata):
        pass

    def log(self, step, data, verbosity=Verbosity.DEFAULT):
        print(step, data)

    def flush(self):
        pass


class StdOutBackend:
    def __init__(self, *args, **kwargs):
        pass


JSONStreamBackend = StdOutBackend
'''

_PYNVML = '''"""Stands in for the library that reads the state of NVIDIA's devices; there are none."""


def nvmlInit():
    pass
'''

_HOROVOD = '''"""Stands in for Horovod; a single process only needs this function."""


def is_initialized():
    return False
'''

_COMPRESSION = '''"""Stands in for Horovod's compression."""


class Compression:
    none = fp16 = None
'''

# The script imports this module in place of the module that makes its train op. An applied step changes Adam's first
# moments whatever the learning rate is, so a step counts as applied if it changed them. The counters are local
# variables, which no checkpoint has.
_COUNTING = '''"""Makes the train op of another module, then counts the runs that changed Adam's first moments."""

import os

import tensorflow.compat.v1 as tf

{import_line}


def create_optimizer(loss, *args, **kwargs):
    train_op = measured.create_optimizer(loss, *args, **kwargs)
    (moments,) = [each for each in tf.global_variables() if each.op.name.endswith("pooler/dense/bias/adam_m")]
    before = _local("before", tf.zeros_like(moments.initial_value))
    runs, applied = _local("runs", 0), _local("applied", 0)
    with tf.control_dependencies([train_op]):
        now = tf.identity(moments.read_value())
        moved = tf.reduce_any(tf.not_equal(now, before.read_value()))
        counted = [runs.assign_add(1), applied.assign_add(tf.cast(moved, tf.int32))]
        with tf.control_dependencies([moved]):
            kept = before.assign(now)
        step = tf.train.get_global_step().read_value()
        counts = "file://" + os.environ["{variable}"]
        written = tf.print(*counted, step, _scale(), loss, output_stream=counts)
    return tf.group(train_op, kept, written)


def _local(name, initial_value):
    return tf.Variable(
        initial_value, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES], name="port_bert/" + name
    )


def _scale():
    try:
        scale = tf.get_default_graph().get_tensor_by_name("loss_scale:0")
    except KeyError:
        return 0
    # An integer is printed with all its digits.
    return tf.cast(scale, tf.int64)
'''


def write_stubs(directory: Path) -> None:
    """Write stand-ins for dllogger and pynvml, and for Horovod's modules where Horovod is not installed.

    Args:
        directory: The directory to write to; the training's process has it on its import path.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "dllogger.py").write_text(_DLLOGGER)
    (directory / "pynvml.py").write_text(_PYNVML)
    if importlib.util.find_spec("horovod") is None:
        package = directory / "horovod"
        (package / "tensorflow").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "tensorflow" / "__init__.py").write_text(_HOROVOD)
        (package / "tensorflow" / "compression.py").write_text(_COMPRESSION)


def write_counting(path: Path, import_line: str) -> None:
    """Write the module that a script imports in place of the one with `create_optimizer`.

    Each run of the module's train op writes a line with five fields: the number of runs, the number of runs that
    changed Adam's first moments, the global step, the loss scale as an integer (0 if there is none), and the loss.

    Args:
        path: The file of the module.
        import_line: The line that imports the original module as `measured`.
    """
    path.write_text(_COUNTING.format(import_line=import_line, variable=COUNTS_VARIABLE))
