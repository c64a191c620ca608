"""How kernels run in this process. A module of its own, since the decorator below loads the compiler and with it Triton."""

import functools
import os
import sys

import torch

from linattn_edu.doctor import triton_mode


@functools.cache
def _mode(triton_imported, interpret):
    return triton_mode()


@torch.compiler.assume_constant_result
def mode():
    """One of the words of `doctor.triton_mode`, asked again only if the answer may have changed."""
    return _mode("triton" in sys.modules, os.environ.get("TRITON_INTERPRET"))
