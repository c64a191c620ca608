"""Every recorded table of the book, read from its head: what it shows, on which machine, with what, when, by which command."""

import inspect
import re
import sys
import tomllib
from pathlib import Path

from linattn_edu import experiments

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "book" / "data"
PACKAGES = ("python", "torch", "cuda", "triton", "fla", "transformers", "linattn_edu")

SHOWS = {
    "bench_cpu": "every operator's forms on a CPU: time, memory, error",
    "bench_h200": "every operator's kernels beside SDPA and, in the same run, FLA: wall and device time, memory, error",
    "cpu_forms": "every form on a CPU, and how time and memory grow with the tokens",
    "decode_eager_h200": "one token after a context, with the step in plain PyTorch",
    "decode_h200_bfloat16": "one token after a context: the KV cache against the state",
    "decode_kernels_h200": "one token with every operator's kernel, beside FLA's and a copy of the state",
    "h200_decode": "decoding with whole models after contexts up to a million tokens",
    "h200_hybrid": "training a hybrid of Gated DeltaNet and gated attention: loss by step",
    "h200_layers": "a model of every layer, trained a step: loss and gradients of the kernels in bfloat16 beside float32",
    "kernel_versions": "versions of the kernels: prediction, time, reason",
    "kernels_h200": "errors of the kernels' outputs, states and gradients against float64",
    "kernels_h200_speed": "first timing of the kernels beside SDPA",
    "mamba_h200": "Mamba's scan as a kernel beside its chunks in PyTorch: time, memory, error",
    "notebooks_h200": "seconds that every notebook runs, compilation included",
    "sanitizer_h200": "accesses outside of memory that compute-sanitizer finds in one small call of every kernel",
    "sweep_h200_bfloat16": "time and memory of softmax and linear attention against the tokens, bfloat16",
    "sweep_h200_float32": "the same in float32",
}
"""What the tables of `book/data` show; those of `experiments` say it in their own docstrings."""


def head(path):
    """The facts above a table; a head that is one sentence is taken apart into machine, versions and date."""
    lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
    facts = dict(line.split(": ", 1) for line in lines if re.match(r"\w+: ", line))
    for line in lines if "machine" not in facts else ():
        parts = re.split("[,;] ", line)
        facts |= {"machine": parts[0]} | dict(part.split(" ") for part in parts if part.split(" ")[0] in PACKAGES)
        facts |= {"date": part for part in parts if re.fullmatch(r"\d{4}-\d\d-\d\d", part)}
    return facts


def row(path, shows):
    facts = head(path)
    made = [facts["machine"], *(f"{name} {facts[name]}" for name in PACKAGES if name in facts), facts["date"]]
    command = facts["command"].removesuffix(f" --out {path.relative_to(ROOT)}") if "command" in facts else ""
    shows = f"{shows} ({facts['load']})" if "load" in facts else shows
    return [f"`{path.stem}`", shows, ", ".join(made), f"`{command}`" if command else "–"]


HEADER = ["File", "Shows", "Made on, with, at", "Command"]


def benchmarks():
    """The files of `book/data`."""
    return [HEADER, *(row(path, SHOWS.get(path.stem, "")) for path in sorted(DATA.glob("*.csv")))]


def of_experiments():
    """The files of `book/data/experiments` and, with their larger settings, `experiments_gpu`: the experiment's first sentence."""
    paths = sorted((DATA / "experiments").glob("*.csv")) + sorted((DATA / "experiments_gpu").glob("*.csv"))
    return [HEADER, *(row(path, inspect.getdoc(experiments.find(path.stem)).splitlines()[0]) for path in paths)]


def packages():
    """What `requirements.txt` pins, and the least that `pyproject.toml` asks for, of what the package itself can use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {}
    for use, wanted in {"everything": project["dependencies"], **project["optional-dependencies"]}.items():
        for name, version in (re.fullmatch(r"([\w-]+)(?:\[.*\])?(.*)", text).groups() for text in wanted):
            asked.setdefault(name, (version or "any", use))
    pins = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    python = [["Python", ".".join(map(str, sys.version_info[:3])), project["requires-python"], "everything"]]
    asked["triton"] = ("what torch brings", "the kernels on a GPU")
    return [["Package", "Tested", "Asked for", "For"], *python, *([name, version, *asked[name]] for name, version in pins if name in asked)]
