"""The device that a launch goes to: Triton takes the current one, wherever the tensors are."""

import contextlib

import torch

STAY = contextlib.nullcontext()


def on_device(x):
    """Make the device of `x` the current one, if it is another."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return STAY
    return torch.cuda.device(x.device)
