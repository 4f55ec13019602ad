"""Two workers, each with a gradient that the other lacks: adding them up would mix gradients of two variables."""

import importlib.util
import sys
from pathlib import Path

import replica_processes
import uneven_training


def test_gradient_that_one_worker_lacks_is_an_error_in_both(tmp_path: Path) -> None:
    # Only the environment `tf221` has tf_keras. All hosts share one launch, because starting takes longer than the
    # steps.
    hosts = ["keras", *(["tf_keras", "tf_keras/legacy"] if importlib.util.find_spec("tf_keras") else []), "v1"]
    program = [sys.executable, uneven_training.__file__, *hosts]
    finished = replica_processes.run(program, tmp_path, 60, replica_processes.two_workers())
    assert finished.codes == [0, 0], str(finished)
    for log in finished.logs:
        refused = [line for line in log.splitlines() if line.startswith("REFUSED")]
        assert [line.split(":")[0] for line in refused] == [f"REFUSED {host}" for host in hosts], str(finished)
        for line in refused:
            assert "differ in whether the gradients of these are None, or sparse:] [first" in line, str(finished)
