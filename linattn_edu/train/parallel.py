"""Data parallelism: every process holds the whole model, reads its share of each batch, and averages the gradients.

The processes start with equal weights and make equal steps, so that they never need to exchange weights. Without
`torchrun` there is one process, and all of this does nothing.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@contextlib.contextmanager
def processes(device):
    """The process group that `torchrun` asks for, if it does; yields the device of this process."""
    if "RANK" not in os.environ:
        yield device
        return
    gpu = torch.device(device).type == "cuda"
    if gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def place():
    """Number of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share(*batch):
    """The rows of each tensor that are this process's."""
    rank, size = place()
    return tuple(x.chunk(size)[rank] for x in batch)


def average(tensors):
    """Put the mean over all processes into each of `tensors`, in one exchange."""
    _, size = place()
    if size > 1:
        flat = parameters_to_vector(tensors)
        dist.all_reduce(flat)
        vector_to_parameters(flat / size, tensors)
