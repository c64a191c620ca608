"""Checkpoints from which training goes on bit for bit, and files that are whole or not there."""

import os
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


def save(path, model, optimizer, records, recipe):
    """Write all that the next step depends on: weights, optimizer, random numbers, the log so far, and the recipe."""
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
    differing = [name for name in theirs.keys() | recipe.keys() if theirs.get(name) != recipe.get(name)]
    if differing:
        told = ", ".join(f"{name} = {theirs.get(name)} where now {recipe.get(name)}" for name in sorted(differing))
        raise ValueError(f"`checkpoint`: got one of another run, {told}: expected that of this one")
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    torch.set_rng_state(content["cpu"])
    if content["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(content["cuda"])
    return content["records"]
