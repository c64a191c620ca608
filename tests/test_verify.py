"""The script that records the kernels' errors on a GPU, tried in the interpreter in a process of its own."""

import os
import subprocess
import sys

import pytest

from linattn_edu import kernels


@pytest.mark.skipif(kernels.mode() == "missing", reason="no Triton on this system")
def test_verify_in_the_interpreter(root):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_verify.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
