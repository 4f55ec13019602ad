"""Two workers, each of which has a gradient that the other lacks: their sum would belong to neither variable."""

import importlib.util
import sys
from pathlib import Path

import pytest
import replica_processes
import uneven_training


@pytest.mark.parametrize("host", ["keras", "tf_keras", "v1"])
def test_gradient_that_one_worker_lacks_is_an_error_in_both(host: str, tmp_path: Path) -> None:
    if host == "tf_keras" and importlib.util.find_spec("tf_keras") is None:
        pytest.skip("needs tf_keras, which the lane `tf221` installs")
    program = [sys.executable, uneven_training.__file__, host]
    finished = replica_processes.run(program, tmp_path, 60, replica_processes.two_workers())
    assert finished.codes == [0, 0], str(finished)
    for log in finished.logs:
        assert "REFUSED" in log, str(finished)
        assert "differ in whether the gradients of these are None, or sparse:] [first" in log, str(finished)
