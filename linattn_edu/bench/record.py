"""Recorded tables: CSV below a head that says on which machine, with which versions, when and by which command."""

import csv
import datetime
import platform
import shlex
import sys
from pathlib import Path

import torch


def provenance(device, **settings):
    """Machine, versions, date and settings, for the head of a recorded table."""
    gpu = torch.device(device).type == "cuda"
    about = {
        "machine": torch.cuda.get_device_name(device) if gpu else f"{cpu_model()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", program(), *sys.argv[1:]]),
        **settings,
    }
    if gpu:
        about["cuda"] = torch.version.cuda
    return about


def program():
    """The module that was started with ``python -m``."""
    parts = Path(sys.argv[0]).with_suffix("").parts
    parts = parts[-parts[::-1].index("linattn_edu") - 1 :] if "linattn_edu" in parts else parts[-1:]
    return ".".join(part for part in parts if part != "__main__")


def cpu_model():
    """The name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(": ")[1] for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor() or "CPU"


def write(path, rows, about):
    """Write rows as CSV, below one comment line for each fact in `about`."""
    for _ in stream(path, rows, about):
        pass


def stream(path, rows, about):
    """Write rows as they come, and pass each on: a process that is stopped leaves what it had measured."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {x}\n" for key, x in about.items())
        table = None
        for row in rows:
            if table is None:
                table = csv.DictWriter(file, row.keys(), lineterminator="\n")
                table.writeheader()
            table.writerow(row)
            file.flush()
            yield row


def read(path):
    """The rows of a table that `write` wrote, numbers as numbers, and the facts above it."""
    lines = Path(path).read_text().splitlines()
    about = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = csv.DictReader(line for line in lines if not line.startswith("# "))
    return [{key: value(x) for key, x in row.items()} for row in rows], about


def value(text):
    """A cell of a table as an int or float if it is one."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def recorded(name):
    """A table of the repository's `book/data`, or None where the package is used without the book."""
    path = Path(__file__).resolve().parents[2] / "book" / "data" / f"{name}.csv"
    return read(path) if path.is_file() else None
