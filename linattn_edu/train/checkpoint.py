"""Checkpoints from which training goes on bit for bit, and files that are whole or not there."""

import dataclasses
import os
import re
from pathlib import Path

import torch


def replace(path, write):
    """Call `write(file)` for a new file beside `path`, then put it in the place of `path` in one step.

    A process that is killed in between leaves the old file as it was.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def identity(model):
    """Which model it is, in plain strings by name: two models with weights of equal shapes may compute differently.

    Addresses, which a function among its options shows, are left out: no two processes share them.
    """
    parts, config = {"model": type(model).__name__}, getattr(model, "config", None)
    if dataclasses.is_dataclass(config):
        parts |= {f"config.{field.name}": getattr(config, field.name) for field in dataclasses.fields(config)}
    else:
        parts |= {"model": model, "config": config}
    parts["dtype"] = next(model.parameters()).dtype
    return {name: re.sub(r" at 0x[0-9a-fA-F]+", "", f"{x!s}") for name, x in parts.items()}


def save(path, model, optimizer, records, recipe):
    """Write all that the next step depends on: weights, optimizer, random numbers, the log so far, and the recipe.

    A recipe holds plain numbers and strings, which `torch.load(weights_only=True)` reads.
    """
    content = {
        "recipe": recipe,
        "records": records,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    replace(path, lambda file: torch.save(content, file))


def resume(path, model, optimizer, recipe):
    """Load what `save` wrote, if there is such a file, and return the records so far.

    Raises:
        ValueError: the file belongs to a run of another recipe.
    """
    if not Path(path).exists():
        return []
    content = torch.load(path, map_location="cpu", weights_only=True)
    theirs = content["recipe"]
    differing = [name for name in theirs if theirs[name] != recipe.get(name)]  # files of earlier versions name no model
    if differing:
        told = ", ".join(f"{name} = {theirs.get(name)} where now {recipe.get(name)}" for name in sorted(differing))
        raise ValueError(f"`checkpoint`: got one of another run, {told}: expected that of this one")
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    torch.set_rng_state(content["cpu"])
    if content["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(content["cuda"])
    return content["records"]
