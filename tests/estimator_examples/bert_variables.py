"""Runs the BERT example, and prints a digest of each worker's variables at the end."""

import hashlib
import json
import sys

import tensorflow as tf

from estimator_examples.bert import hooks, run_pretraining


class _Hook(hooks.StepHook):
    def begin(self) -> None:
        self._values = {variable.op.name: variable.read_value() for variable in tf.compat.v1.global_variables()}

    def end(self, session: tf.compat.v1.Session) -> None:
        values = session.run(self._values)
        digests = {name: hashlib.md5(value).hexdigest() for name, value in values.items()}
        print("STATE variables", json.dumps(digests))  # noqa: T201 - a command line prints


if __name__ == "__main__":
    hooks.StepHook = _Hook
    sys.exit(run_pretraining.main())
