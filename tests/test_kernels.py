"""The kernels without a GPU: interpreted in a process of their own, and compiled for every GPU a reader may have."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from operators import CASES, inputs

from linattn_edu import kernels

WITHOUT_TRITON = pytest.mark.skipif(kernels.mode() == "missing", reason="no Triton on this system")


@WITHOUT_TRITON
def test_kernels_in_the_interpreter(root):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", CASES)
def test_without_a_gpu_fused_is_chunkwise_and_the_kernels_say_why(name):
    if kernels.mode() in ("gpu", "interpret"):
        pytest.skip("the kernels run here")
    arguments = inputs(name, dtype=torch.float32)
    module = CASES[name].module
    for backend in (None, "torch"):
        assert torch.equal(module.fused(**arguments, backend=backend)[0], module.chunkwise(**arguments)[0])
    with pytest.raises(ValueError, match="`backend`: got 'triton', but (no CUDA device|Triton is not installed)"):
        module.fused(**arguments, backend="triton")
    with pytest.raises(ValueError, match="`backend`: got 'cuda', expected None, 'triton' or 'torch'"):
        module.fused(**arguments, backend="cuda")


@pytest.mark.parametrize(
    ("dtype", "capability", "K", "V", "served"),
    [
        (torch.bfloat16, (9, 0), 5, 6, True),
        (torch.bfloat16, (8, 0), 256, 512, True),
        (torch.float16, (7, 5), 128, 64, True),
        (torch.bfloat16, (7, 5), 64, 64, False),
        (torch.float16, (7, 5), 256, 64, False),
        (torch.float32, (9, 0), 257, 64, False),
        (torch.float32, (9, 0), 64, 514, False),
    ],
)
def test_what_a_gpu_cannot_do_goes_to_pytorch(monkeypatch, dtype, capability, K, V, served):
    monkeypatch.setattr(kernels, "mode", lambda: "gpu")
    monkeypatch.setattr(kernels, "capability_of", lambda device: capability)
    q = SimpleNamespace(dtype=dtype, is_cuda=True, device="cuda:0", shape=(1, 64, 2, K))
    assert kernels.serve(None, q, K, V) == served
    if not served:
        with pytest.raises(ValueError, match="`backend`: got 'triton', but"):
            kernels.serve("triton", q, K, V)


class Recorder:
    """A kernel that writes down how it is called, in the place of Triton's."""

    arg_names = ["x", "y", "n", "C", "GATE"]

    def __init__(self, said, way):
        self.said, self.way = said, way

    def __getitem__(self, grid):
        def call(*arguments, **constants):
            self.said.append((self.way, grid, arguments, constants))
            return Recorder(self.said, "compiled")

        return call


@WITHOUT_TRITON
def test_a_launch_is_compiled_once_for_each_kind_of_arguments():
    """Triton compiles anew for a dtype, for None and for an odd address; for nothing else."""
    from linattn_edu.kernels.launch import Launch

    said = []
    start = Launch(Recorder(said, "Triton"), (3, 2), GATE="none", num_warps=4, C=16)
    x, odd = torch.zeros(64), torch.zeros(65)[1:]
    calls = [(x, None, 5), (x + 1, None, 6), (x, x, 5), (x.half(), None, 5), (odd, None, 5), (odd, None, 7)]
    for arguments in calls:
        start(*arguments)
    assert [way for way, *_ in said] == ["Triton", "compiled", "Triton", "Triton", "Triton", "compiled"]
    assert all(grid == (3, 2, 1) for _, grid, *_ in said)
    assert said[0][3] == {"GATE": "none", "num_warps": 4, "C": 16}
    assert said[1][2][2:] == (6, 16, "none") and said[1][3] == {}


@WITHOUT_TRITON
def test_side_by_side_every_kernel_is_compiled_and_none_runs():
    from linattn_edu.kernels.launch import Launch, side_by_side

    class Ahead(Recorder):
        def warmup(self, *arguments, grid, **constants):
            self.said.append(("warmup", grid, arguments, constants))
            return self

        def __getitem__(self, grid):
            self.said.append(("loaded", grid))
            return super().__getitem__(grid)

    said, x = [], torch.zeros(4)
    first, second = (Launch(Ahead(said, "Triton"), (n,), C=16) for n in (2, 3))
    with side_by_side(x):
        first(x, None, 1)
        second(x, x, 1)
        assert said == []
    assert {(way, grid) for way, grid, *_ in said} == {(way, (n, 1, 1)) for way in ("warmup", "loaded") for n in (2, 3)}
    with pytest.raises(KeyError), side_by_side(x):
        raise KeyError
    first(x, None, 1)
    assert said[-1][0] == "Triton"


def printed_when_compiled(program, root, cache):
    """What a program prints in a process of its own, where kernels are compiled and not interpreted."""
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# A gate of each kind and both rules, in the dtype that the device is used with; `compile_all` alone makes all of them.
DEVICES = {
    (7, 5): torch.float16,
    (8, 0): torch.bfloat16,
    (8, 6): torch.bfloat16,
    (8, 9): torch.float32,
    (9, 0): torch.bfloat16,
    (10, 0): torch.bfloat16,
}


@WITHOUT_TRITON
@pytest.mark.parametrize("capability", DEVICES)
def test_kernels_fit_the_device(root, tmp_path, capability):
    program = (
        "import torch; from linattn_edu.kernels.compiling import compile_all, SHARED_LIMIT\n"
        f"records = compile_all({capability}, [{DEVICES[capability]}], variants=[('none', False), ('channel', True)], families=['chunk'])\n"
        "names = {r.name.split()[0] for r in records}\n"
        "assert len(records) >= 8 and names >= {'walk', 'delta_intra', 'delta_inter', 'channel_intra', 'channel_intra_backward'}\n"
        "for r in records:\n"
        "    assert r.shared_bytes > 0 or r.name.startswith('carry '), r  # which only adds up\n"
        f"    assert r.shared_bytes <= SHARED_LIMIT[{capability}], r\n"
        "    assert r.registers > 0 and r.spilled_bytes <= 2048, r\n"
    )
    printed_when_compiled(program, root, tmp_path)


@WITHOUT_TRITON
@pytest.mark.parametrize(("dtype", "variant"), [("float32", ("none", True)), ("bfloat16", ("scalar", False))])
def test_with_256_features_registers_are_used(root, tmp_path, dtype, variant):
    """The assembler settled for 32 of them here, and spilled 6.2 and 4.7 kB; with Triton 3.6 and 3.9 with 128 features too."""
    program = (
        "import torch; from linattn_edu.kernels.compiling import compile_all\n"
        f"records = compile_all((8, 0), [torch.{dtype}], sizes=[(256, 512)], variants=[{variant}], families=['chunk'])\n"
        "assert len(records) >= 4\n"
        "for r in records:\n"
        "    assert r.spilled_bytes <= 2048, r\n"
    )
    printed_when_compiled(program, root, tmp_path)


@WITHOUT_TRITON
def test_beside_a_normaliser_the_gradient_of_q_keeps_more_digits(root, tmp_path):
    """dq_i = sum_j (dN_i^T v_j + dD_i) k_j is what is left of two sums: dO meets the values and the state as TF32."""
    program = (
        "import torch; from linattn_edu.kernels import compiling\n"
        "with compiling.compiling_for((9, 0)) as compiled:\n"
        "    compiling.train('none', False, torch.bfloat16, 64, 65, torch.float32)\n"
        "dots = [[line for line in k.asm['ttir'].splitlines() if 'tt.dot' in line] for n, k in compiled if n == 'walk']\n"
        "assert sum(map(len, dots)) >= 12\n"
        "print([sum('xf32> * tensor' in dot for dot in each) for each in dots if any('xf32> * tensor' in dot for dot in each)])\n"
    )
    assert printed_when_compiled(program, root, tmp_path).strip() == "[2]"


@WITHOUT_TRITON
def test_bfloat16_on_a_t4_is_refused(root):
    program = "import torch, linattn_edu.kernels as k; k.compile_all((7, 5), [torch.bfloat16])"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert "bfloat16 needs compute capability 8.0" in done.stderr


@WITHOUT_TRITON
@pytest.mark.parametrize("capability", ["8.0", 8.0, (8,), [8, 0], (8, "0")])
def test_a_capability_is_a_pair(capability):
    with pytest.raises(ValueError, match=r"`capability`: got .*, expected a pair of whole numbers, as \(8, 0\)"):
        kernels.compile_all(capability)


@WITHOUT_TRITON
def test_a_first_call_does_not_load_the_compiler_of_torch(root):
    """It takes seconds to import, nearly half of the first call that verify times on a GPU, and eager mode has no use for it."""
    program = (
        "import sys, torch; from linattn_edu import gla; x = torch.rand(1, 20, 1, 16).requires_grad_();"
        "gla.fused(x, x, x, g=-x, backend='triton')[0].sum().backward(); assert x.grad.abs().sum() > 0;"
        "assert 'torch._dynamo' not in sys.modules"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
