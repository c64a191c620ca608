"""What this machine can run, and why not: ``python -m linattn_edu.doctor``.

``summary()`` is what every notebook prints first; ``report()`` is the whole answer.
Nothing is imported to find out whether it is there: triton reads TRITON_INTERPRET once, at its first
import, so a probe that imported it would decide the mode for the reader.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys

import torch

from linattn_edu import __version__, kernels
from linattn_edu.extras import EXTRAS
from linattn_edu.kernels import fitness

ADVICE = {
    "missing": "pip install triton (Linux only); without it `fused` is `chunkwise`",
    "old": "the kernels need Triton 3.4, which comes with torch 2.8; without it `fused` is `chunkwise`",
    "late": "TRITON_INTERPRET was set after triton's first import: restart Python (the kernel) and set it first",
    "interpret": "kernels run in triton's interpreter on the CPU: exact, slow, no bfloat16; for tests only",
    "no-gpu": "no CUDA device, so `fused` is `chunkwise`; to try kernels here, set TRITON_INTERPRET=1 before Python starts",
    "gpu": "kernels run on the CUDA device",
}

FUSED = {
    "missing": "plain PyTorch (chunkwise)",
    "old": "plain PyTorch (chunkwise)",
    "late": "plain PyTorch (chunkwise)",
    "no-gpu": "plain PyTorch (chunkwise)",
    "gpu": "Triton kernels",
    "interpret": "interpreted Triton kernels",
}


def triton_mode() -> str:
    """How Triton kernels would run in this process: one of the keys of ``ADVICE``.

    "missing", "old" (before 3.4, whose compiler takes the kernels), "late" (TRITON_INTERPRET set too late), "interpret",
    "no-gpu" or "gpu".
    """
    if importlib.util.find_spec("triton") is None:
        return "missing"
    installed = version_of("triton")
    if installed and [int(part) for part in re.findall(r"\d+", installed)[:2]] < [3, 4]:
        return "old"
    wanted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    if "triton" in sys.modules:
        import triton

        # triton's own functions were built for one of the two modes when it was first imported.
        built = type(triton.language.cdiv).__name__ == "InterpretedFunction"
        if wanted and not built:
            return "late"
        wanted = built
    if wanted:
        return "interpret"
    return "gpu" if torch.cuda.is_available() else "no-gpu"


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory_gib() -> float | None:
    """Physical memory in GiB, or None where the system does not tell (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):
        return None


def summary() -> str:
    """Two lines for the top of a notebook: versions and device, and how ``fused`` runs here."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
    else:
        threads = torch.get_num_threads()
        device = f"CPU with {threads} thread{'s' * (threads > 1)}"
    mode = triton_mode()
    versions = f"linattn_edu {__version__}, torch {torch.__version__}, {device}"
    return f"{versions}\n`fused` forms run as {FUSED[mode]} here"


def report() -> str:
    """The full answer as plain text: system, devices, triton, and which forms run where."""
    parts = [_system(), _devices(), _triton(), *_kernels(), _forms(), _extras()]
    return "\n".join([f"linattn_edu {__version__}", *("\n".join(["", *part]) for part in parts)])


def _row(name: str, value: object, advice: str = "") -> str:
    return f"  {name:<18}{value}" + (f"   -> {advice}" if advice else "")


def _system() -> list[str]:
    memory = memory_gib()
    return [
        "System",
        _row("platform", f"{platform.system()} {platform.machine()}"),
        _row("Python", platform.python_version()),
        _row("torch", torch.__version__),
        _row("numpy", version_of("numpy")),
        _row("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"),
        _row("memory", "unknown" if memory is None else f"{memory:.1f} GiB"),
    ]


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        reason = "this torch was built without CUDA" if torch.version.cuda is None else "no driver or no device"
        advice = "every PyTorch form runs on the CPU; in Colab choose Runtime > Change runtime type > GPU"
        return ["CUDA devices", _row("none", f"({reason})", advice)]
    return ["CUDA devices"] + [line for i in range(torch.cuda.device_count()) for line in _device(i)]


def _device(index: int) -> list[str]:
    p = torch.cuda.get_device_properties(index)
    shared = getattr(p, "shared_memory_per_block_optin", None)
    native_bf16 = (p.major, p.minor) >= (8, 0)
    small = shared is not None and shared < 96 * 1024
    return [
        _row(f"cuda:{index}", p.name),
        _row("  capability", f"{p.major}.{p.minor}"),
        _row("  memory", f"{p.total_memory / 2**30:.1f} GiB"),
        _row("  bfloat16", "yes" if native_bf16 else "emulated", "" if native_bf16 else "use float16 or float32 here"),
        _row("  shared memory", "unknown" if shared is None else f"{shared / 1024:.0f} KiB a block",
             "kernels use smaller tiles here" if small else ""),
    ]


def _triton() -> list[str]:
    mode = triton_mode()
    return ["Triton", _row("version", version_of("triton") or "none"), _row("mode", mode, ADVICE[mode])]


def _kernels() -> list[list[str]]:
    """For each device what the kernels ask of it and what it has; without one, what would be needed."""
    if not torch.cuda.is_available():
        rows = [_row("none", "(no CUDA device)", "they need an NVIDIA GPU of compute capability 7.5 or newer, and Triton (Linux)")]
        return [["Kernels", *rows, _row("without a GPU", "kernels.compile_all((8, 0)) compiles them, TRITON_INTERPRET=1 runs them, slowly")]]
    return [_kernels_of(torch.cuda.get_device_properties(i), i) for i in range(torch.cuda.device_count())]


def _kernels_of(p, index: int) -> list[str]:
    """The recorded needs of the kernels beside what a device has."""
    about, rows = fitness.read()
    capability, rows = fitness.rows_for((p.major, p.minor), rows)
    title = f"Kernels on cuda:{index}"
    if capability is None:
        return [title, _row("none", "(compute capability 7.5 or newer)", "`fused` is `chunkwise` here")]
    if triton_mode() == "missing":
        return [title, _row("none", "(Triton is missing)", ADVICE["missing"])]
    lines = [f"{title} (as compiled for {'.'.join(map(str, capability))} by Triton {about['triton']}, K = {about['K']}, V = {about['V']})"]
    shared = getattr(p, "shared_memory_per_block_optin", None)
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        lines += [_fit(row, shared) for row in rows if row["dtype"] == dtype]
    if (p.major, p.minor) < (8, 0):
        lines.append(_row("bfloat16", "in PyTorch", "no tensor cores for it before 8.0: use float16 or float32"))
    most = kernels.MOST_K if (p.major, p.minor) >= (8, 0) else kernels.MOST_K_BEFORE_AMPERE
    return [*lines, _row("float64", "in PyTorch"), _row("sizes", f"K up to {most}, V up to {kernels.MOST_V - 1}", "beyond: PyTorch")]


def _fit(row: dict, shared: int | None) -> str:
    """One line: what a family of kernels asks for in a dtype, and whether it fits."""
    purpose = {"chunk": "training", "step": "one token", "scan": "mamba"}[row["kernels"]]
    need = f"{row['shared_bytes'] / 1024:.0f} KiB" + (f" of {shared / 1024:.0f}" if shared else "")
    spills = f", {row['spilled_bytes']} bytes a thread spilled" if row["spilled_bytes"] > 256 else ""
    fits = shared is None or row["shared_bytes"] <= shared
    return _row(row["dtype"], f"{purpose}: {need} shared{spills}", "" if fits else "does not fit: backend='torch'")


def _forms() -> list[str]:
    everywhere = [_row(form, "yes") for form in ("recurrent", "parallel", "chunkwise")]
    by = FUSED[triton_mode()]
    step = "PyTorch" if by.startswith("plain") else f"{by}, by PyTorch where a gradient is wanted"
    return ["Forms", *everywhere, _row("fused", f"yes, by {by}"), _row("step", f"yes, by {step}")]


def _extras() -> list[str]:
    rows = []
    for module, extra in EXTRAS.items():
        found = importlib.util.find_spec(module) is not None
        rows.append(_row(module, version_of(module) if found else "none", "" if found else f"pip install linattn_edu[{extra}]"))
    return ["Extras", *rows]


if __name__ == "__main__":
    print(report())
