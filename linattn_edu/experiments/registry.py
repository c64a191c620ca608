"""What an experiment is: a function of a seed that returns rows, its settings, and how its table is recorded."""

import importlib
import inspect
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from linattn_edu.bench import record as tables

EXPERIMENTS = {
    name: theme
    for theme, names in {
        "memory": ("capacity", "overwriting", "rebinding", "correlation", "repetition", "forgetting"),
        "state_tracking": ("parity", "swaps"),
        "recall": ("mqar", "mqar_rebinding", "gate_start"),
        "language": ("language", "equal_state", "short_convolution", "attention_gate"),
        "extrapolation": ("extrapolation", "yarn", "sink"),
        "images": ("pixels", "flow"),
        "tips": ("training_tips", "division_order", "half_precision"),
    }.items()
    for name in names
}
"""The name of every experiment, and the module of this package that defines it."""


def experiment(*, gpu=None, parts=None):
    """Declare a function `f(seed, *, device, ...) -> rows` an experiment.

    Its default arguments are the short setting, for one CPU core in less than a minute; `gpu` is what the larger
    setting changes. `parts` names an argument, a sequence, each element of which has rows that depend on no other.
    """

    def declare(f):
        f.gpu, f.parts = gpu or {}, parts
        return f

    return declare


def find(name):
    """The function of an experiment."""
    if name not in EXPERIMENTS:
        raise ValueError(f"`name`: got {name!r}, expected one of {', '.join(EXPERIMENTS)}")
    return getattr(importlib.import_module(f"linattn_edu.experiments.{EXPERIMENTS[name]}"), name)


def settings(name, setting="short"):
    """The arguments of an experiment in its setting "short" or "gpu", by name."""
    if setting not in ("short", "gpu"):
        raise ValueError(f"`setting`: got {setting!r}, expected 'short' or 'gpu'")
    f = find(name)
    defaults = {key: p.default for key, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
    return defaults if setting == "short" else defaults | {"device": "cuda"} | f.gpu


def run(name, seeds=(0,), *, setting="short", workers=1, **changes):
    """Run an experiment once a seed.

    Args:
        name: a key of `EXPERIMENTS`.
        seeds: whole numbers; each draws its own data and weights.
        setting: "short" for a CPU, "gpu" for the larger one.
        workers: parts of the experiment, or seeds, that run at a time; if more than 1, in processes of one thread each.
        changes: arguments of the experiment that differ from the setting.

    Returns:
        a list of rows (dicts), each with its seed.

    Raises:
        ValueError: an unknown name or setting.
    """
    jobs = [(name, seed, part) for seed in seeds for part in _parts(name, settings(name, setting) | changes)]
    if workers == 1:
        found = [_one(job) for job in jobs]
    else:
        with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            found = list(pool.map(_one, jobs))
    return [{"seed": seed, **row} for (_, seed, _), rows in zip(jobs, found) for row in rows]


def _parts(name, arguments):
    """The arguments of each part of an experiment."""
    each = find(name).parts
    return [arguments] if each is None else [arguments | {each: (x,)} for x in arguments[each]]


def _one(job):
    name, seed, arguments = job
    return find(name)(seed, **arguments)


def record(path, rows, *, command, arguments):
    """Write rows as CSV below the command, the settings, the machine, the versions and the date."""
    about = tables.provenance(arguments["device"]) | {"command": command}
    tables.write(path, rows, about | {key: x for key, x in arguments.items() if key not in about})


def recorded(name):
    """The rows of an experiment's recorded table and the facts above it; None where there is no such table."""
    return tables.recorded(Path("experiments", name))


def spread(rows, value, by):
    """Least, mean and greatest of the column `value` over the seeds, for each combination of the columns `by`.

    Args:
        rows: what `run` returns, or `recorded(name)[0]`.
        value: the name of a column of numbers.
        by: the name of a column, or a list of names.

    Returns:
        {key: (least, mean, greatest)}, in the order of the rows; key is a tuple where `by` is a list.
    """
    groups = {}
    for row in rows:
        key = row[by] if isinstance(by, str) else tuple(row[name] for name in by)
        groups.setdefault(key, []).append(row[value])
    return {key: (min(xs), sum(xs) / len(xs), max(xs)) for key, xs in groups.items()}
