"""Mamba's selective scan without a GPU: interpreted in a process of its own, and compiled for every GPU a reader may have."""

import os
import subprocess
import sys

import pytest
import torch

from linattn_edu import kernels, mamba

WITHOUT_TRITON = pytest.mark.skipif(kernels.mode() == "missing", reason="no Triton on this system")


@WITHOUT_TRITON
def test_the_scan_in_the_interpreter(root):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_scan.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@WITHOUT_TRITON
def test_the_scan_fits_every_device(root, tmp_path):
    """All of a tile stays in registers, on a T4 too."""
    program = (
        "import torch; from linattn_edu.kernels import compile_all\n"
        "for capability in [(7, 5), (8, 6), (9, 0)]:\n"
        "    records = compile_all(capability, [torch.float16], families=['scan'])\n"
        "    assert {r.name.split()[0] for r in records} == {'selective_scan', 'selective_scan_backward'} and len(records) == 6\n"
        "    for r in records:\n"
        "        assert 0 < r.shared_bytes <= 16384 and r.spilled_bytes <= 64 and r.registers <= 255, r\n"
    )
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_without_a_gpu_fused_is_chunkwise_and_the_kernel_says_why():
    if kernels.mode() in ("gpu", "interpret"):
        pytest.skip("the kernel runs here")
    u, B = torch.randn(1, 9, 4), torch.randn(1, 9, 2)
    a = {"u": u, "delta": u.abs(), "A": -torch.rand(4, 2), "B": B, "C": B}
    for backend in (None, "torch"):
        assert torch.equal(mamba.fused(**a, backend=backend)[0], mamba.chunkwise(**a)[0])
    token = {"u_t": u[:, 0], "delta_t": u[:, 0].abs(), "A": a["A"], "B_t": B[:, 0], "C_t": B[:, 0], "state": torch.zeros(1, 4, 2)}
    for call in (lambda: mamba.fused(**a, backend="triton"), lambda: mamba.step(**token, backend="triton")):
        with pytest.raises(ValueError, match="`backend`: got 'triton', but (no CUDA device|Triton is not installed)"):
            call()
