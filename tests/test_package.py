"""The package as others get it: its wheel, what importing it costs, its setup cell, its doctor."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import linattn_edu
from linattn_edu import doctor, kernels

ROOT = Path(__file__).resolve().parents[1]
SETUP = (ROOT / "book" / "setup_cell.py").read_text()
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "MPLBACKEND": "agg"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that `make wheel` builds, from a copy of the sources."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "linattn_edu", source / "linattn_edu", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist), "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [built] = dist.glob("*.whl")
    return built


@pytest.fixture
def python(tmp_path):
    """A fresh environment: the installed third-party packages are visible, this checkout is not."""
    venv.create(tmp_path / "env", symlinks=True)
    executable = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    command = [executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    # As a plain path entry: .pth files in it, the editable install among them, are not read.
    (site / "installed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert run(executable, "import linattn_edu", tmp_path).returncode != 0
    return executable


def run(python, code, cwd, **environment):
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LINATTN_EDU_SOURCE")}
    return subprocess.run([python, "-c", code], cwd=cwd, capture_output=True, text=True, env={**clean, **OFFLINE, **environment})


def pip_install(python, *what):
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", *map(str, what)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **OFFLINE})


# Distribution.


def test_wheel_is_small_and_holds_the_whole_package(wheel):
    assert wheel.stat().st_size < 3_000_000
    packed = set(zipfile.ZipFile(wheel).namelist())
    ours = {p.relative_to(ROOT).as_posix() for p in (ROOT / "linattn_edu").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert ours <= packed, "missing in the wheel"
    assert {name.split("/")[0] for name in packed} == {"linattn_edu", f"linattn_edu-{linattn_edu.__version__}.dist-info"}


def test_wheel_imports_in_a_clean_environment_and_serves_its_data(wheel, python, tmp_path):
    pip_install(python, wheel)
    code = """
import torch, linattn_edu, linattn_edu.data, linattn_edu.doctor
print(linattn_edu.__file__)
q = k = v = torch.randn(1, 5, 2, 4)
for name, variant in linattn_edu.VARIANTS.items():
    if name in ("softmax", "linear"):
        variant.chunkwise(q, k, v)
linattn_edu.data.load_text("emma")
"""
    done = run(python, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "env") in done.stdout


def test_wheel_asks_for_loose_versions_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")]
    required = [line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(required) == ["numpy", "torch>=2.4"]


def test_one_version_everywhere():
    assert f"\nversion: {linattn_edu.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_requirements_are_pinned_and_the_constraints_agree():
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    frozen = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "book" / "constraints.txt").read_text(), re.MULTILINE))
    frozen = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in frozen.items()}
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(pins) == len(lines), "every requirement is pinned"
    for name, version in pins.items():
        if name != "setuptools":
            assert frozen[name] == version
    for line in (ROOT / "book" / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.]+", line), f"not a plain pin: {line}"


# Import.


def fresh(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def test_import_needs_torch_and_numpy_alone():
    before = "import sys, torch, numpy; before = set(sys.modules); import linattn_edu;"
    added = fresh(before + "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))")
    assert added.split() == ["linattn_edu"]
    for module in ("matplotlib", "triton", "IPython"):
        assert fresh(f"import sys, linattn_edu, linattn_edu.doctor; print('{module}' in sys.modules)") == "False"


def test_import_is_quick():
    code = "import torch, time; start = time.perf_counter(); import linattn_edu; print(time.perf_counter() - start)"
    assert min(float(fresh(code)) for _ in range(5)) < 0.3


# The setup cell, alone in a folder as in Colab. Twice, since readers run it twice.

TWICE = SETUP + "\n" + SETUP + "\nimport linattn_edu; print(linattn_edu.__file__)"


def test_setup_cell_is_readable():
    lines = SETUP.splitlines()
    assert len(lines) <= 25 and not re.search(r"torch[=<>]|triton[=<>]", SETUP)


def test_setup_cell_prefers_a_checkout_above(python):
    done = run(python, TWICE, ROOT / "book")
    assert done.returncode == 0, done.stderr
    assert str(ROOT / "linattn_edu" / "__init__.py") in done.stdout
    assert done.stdout.count(doctor.summary().split(",")[0]) == 2


def test_setup_cell_takes_an_installed_package(wheel, python, tmp_path):
    pip_install(python, wheel)
    done = run(python, TWICE, tmp_path, LINATTN_EDU_SOURCE="file:///nowhere.whl")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "env") in done.stdout


def test_setup_cell_installs_a_wheel_that_lies_beside_it(wheel, python, tmp_path):
    shutil.copy(wheel, tmp_path)
    done = run(python, TWICE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "env") in done.stdout


@pytest.mark.parametrize("form", ["{path}", "{uri}"])
def test_setup_cell_installs_the_wheel_it_is_told(wheel, python, tmp_path, form):
    source = form.format(path=wheel, uri=wheel.as_uri())
    done = run(python, TWICE, tmp_path, LINATTN_EDU_SOURCE=source)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "env") in done.stdout


def test_setup_cell_installs_from_a_git_url(wheel, python, tmp_path):
    repository = tmp_path / "repository"
    shutil.copytree(ROOT / "linattn_edu", repository / "linattn_edu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, repository)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "snapshot"]):
        subprocess.run([*git, *command], cwd=repository, check=True)
    done = run(python, TWICE, tmp_path, LINATTN_EDU_SOURCE=repository.as_uri(), PIP_NO_BUILD_ISOLATION="0")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "env") in done.stdout


def test_setup_cell_says_how_to_bring_the_package(python, tmp_path):
    done = run(python, SETUP, tmp_path)
    assert done.returncode != 0
    for word in ("make wheel", "upload", "Colab", "LINATTN_EDU_SOURCE"):
        assert word in done.stderr.splitlines()[-1]


# The doctor.


def test_doctor_reports_this_machine():
    done = subprocess.run([sys.executable, "-m", "linattn_edu.doctor"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    for word in (linattn_edu.__version__, torch.__version__, "threads", "memory", "recurrent", "parallel", "chunkwise", "fused", "step"):
        assert word in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "before, variable, mode",
    [
        ("", None, "gpu" if torch.cuda.is_available() else "no-gpu"),
        ("", "1", "interpret"),
        ("import triton;", "1", "interpret"),
        ("import triton, os; os.environ['TRITON_INTERPRET'] = '1';", None, "late"),
        ("import sys; sys.path[:] = [p for p in sys.path if 'packages' not in p]; sys.modules.pop('triton', None);", None, "missing"),
    ],
)
def test_doctor_knows_how_kernels_would_run(before, variable, mode):
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if variable:
        environment["TRITON_INTERPRET"] = variable
    code = f"import torch, numpy; from linattn_edu import doctor; {before} print(doctor.triton_mode())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.strip() == mode, done.stderr


@pytest.mark.parametrize(("version", "old"), [("3.0.0", True), ("3.3.1", True), ("3.4.0", False), ("3.4rc1", False), ("3.10.0+git1", False)])
def test_a_triton_that_cannot_compile_the_kernels_leaves_fused_to_pytorch(monkeypatch, version, old):
    """CompilationError with 3.3.1; 3.4.0 compiles all kernels for a T4, an A100 and an H100."""
    pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "version_of", lambda package: version)
    assert (doctor.triton_mode() == "old") == old
    monkeypatch.setattr(kernels, "present_mode", doctor.triton_mode)
    advice = kernels.obstacle(torch.zeros(1, 1, 1, 8), 8, 8)
    assert ("older than 3.4" in advice and "backend='torch'" in advice) == old


def test_doctor_does_not_import_triton():
    assert fresh("import sys; from linattn_edu import doctor; doctor.report(); print('triton' in sys.modules)") == "False"


def test_doctor_describes_a_gpu_that_lacks_bfloat16(monkeypatch):
    """A T4, as Colab lends it: compute capability 7.5, 64 KiB of shared memory."""

    class T4:
        name, major, minor, total_memory, shared_memory_per_block_optin = "Tesla T4", 7, 5, 15 * 2**30, 64 * 1024

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: T4.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: T4)
    report = doctor.report()
    assert "Tesla T4" in report and "7.5" in report and "64 KiB" in report
    assert "float16" in report and "smaller tiles" in report
    assert "Tesla T4" in doctor.summary()


class Device:
    """What torch tells of a GPU."""

    def __init__(self, name, major, minor, shared):
        self.name, self.major, self.minor, self.total_memory = name, major, minor, 15 * 2**30
        self.shared_memory_per_block_optin = shared


TABLE = {
    "about": {"triton": "3.7.1", "K": 128, "V": 128},
    "rows": [
        {"capability": c, "dtype": dtype, "kernels": family, "shared_bytes": shared, "registers": 255, "spilled_bytes": spilled}
        for c, dtype, family, shared, spilled in (
            ([7, 5], "float16", "chunk", 40 * 1024, 1000), ([7, 5], "float16", "step", 1024, 0),
            ([8, 0], "bfloat16", "chunk", 120 * 1024, 0), ([10, 0], "bfloat16", "chunk", 200 * 1024, 0),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "device, said",
    [
        (Device("T4", 7, 5, 65536), ["float16 training: 40 KiB of 64 shared, 1000 bytes a thread spilled", "one token: 1 KiB of 64 shared"]),
        (Device("T4", 7, 5, 65536), ["as compiled for 7.5 by Triton 3.7.1", "bfloat16 in PyTorch", "K up to 128, V up to 512"]),
        (Device("A100", 8, 0, 166912), ["bfloat16 training: 120 KiB of 163 shared", "float64 in PyTorch", "K up to 256, V up to 512"]),
        (Device("small", 8, 7, 65536), ["as compiled for 8.0", "120 KiB of 64 shared -> does not fit: backend='torch'"]),
        (Device("new", 12, 0, 101376), ["as compiled for 10.0", "200 KiB of 99 shared -> does not fit"]),
        (Device("old", 6, 1, 49152), ["(compute capability 7.5 or newer) -> `fused` is `chunkwise` here"]),
    ],
)
def test_doctor_says_what_the_kernels_ask_of_a_device(monkeypatch, device, said):
    monkeypatch.setattr(doctor.fitness, "read", lambda: (TABLE["about"], TABLE["rows"]))
    monkeypatch.setattr(doctor, "triton_mode", lambda: "gpu")
    printed = " ".join("\n".join(doctor._kernels_of(device, 0)).split())
    for words in said:
        assert words in printed


def test_doctor_without_a_gpu_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = doctor.report()
    assert "NVIDIA GPU of compute capability 7.5 or newer" in report and "compile_all((8, 0))" in report
    monkeypatch.setattr(doctor, "triton_mode", lambda: "missing")
    printed = "\n".join(doctor._kernels_of(Device("A100", 8, 0, 166912), 0))
    assert "pip install triton" in printed


def test_doctor_is_quick():
    code = "import torch, time; start = time.perf_counter(); from linattn_edu import doctor; doctor.report(); print(time.perf_counter() - start)"
    assert min(float(fresh(code)) for _ in range(3)) < 1
