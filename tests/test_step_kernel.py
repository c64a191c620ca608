"""The step kernel without a GPU: interpreted in a process of its own, and compiled for every GPU a reader may have."""

import os
import subprocess
import sys

import pytest
from operators import CASES, inputs

from linattn_edu import kernels

WITHOUT_TRITON = pytest.mark.skipif(kernels.mode() == "missing", reason="no Triton on this system")


@WITHOUT_TRITON
def test_steps_in_the_interpreter(root):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_step.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@WITHOUT_TRITON
def test_steps_fit_every_device(root, tmp_path):
    """A state tile stays in registers, and three programs or more fit a multiprocessor."""
    program = (
        "import torch; from linattn_edu.kernels import compile_all\n"
        "for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)]:\n"
        "    every = capability in [(7, 5), (9, 0)]\n"
        "    more = {} if every else {'variants': [('none', False), ('channel', True)]}\n"
        "    records = compile_all(capability, [torch.float32], families=['step'], **more)\n"
        "    assert len(records) == (7 if every else 3)\n"
        "    for r in records:\n"
        "        assert r.shared_bytes <= 16384 and r.spilled_bytes <= 64 and r.registers <= 168, r\n"
    )
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", CASES)
def test_without_a_gpu_step_is_pytorch_and_the_kernel_says_why(name):
    if kernels.mode() in ("gpu", "interpret"):
        pytest.skip("the kernel runs here")
    a = inputs(name, T=1)
    state = a.pop("initial_state")
    x = {f"{key}_t" if key in "qkv" else key: y[:, 0] if key in "qkv" or key in CASES[name].gates else y for key, y in a.items()}
    x = {key: y.float() if hasattr(y, "float") else y for key, y in x.items()}
    state = tuple(y.float() for y in state) if isinstance(state, tuple) else state.float()
    CASES[name].module.step(**x, state=state)
    with pytest.raises(ValueError, match="`backend`: got 'triton', but (no CUDA device|Triton is not installed)"):
        CASES[name].module.step(**x, state=state, backend="triton")
