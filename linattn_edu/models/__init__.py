"""Language models: so far a plain one over bytes, and a small trained instance of it.

    >>> import torch
    >>> from linattn_edu import data, models
    >>> model = models.pretrained()
    >>> ids = data.encode("It is a truth universally acknowledged")[None]
    >>> model(ids).shape
    torch.Size([1, 38, 256])
    >>> [tuple(q.shape) for q, k, v in model.qkv(ids)]
    [(1, 38, 2, 32), (1, 38, 2, 32), (1, 38, 2, 32)]
"""

from linattn_edu.models.byte_lm import ByteLM, ByteLMConfig, rope
from linattn_edu.models.storage import load, pretrained, pretrained_record, save

__all__ = ["ByteLM", "ByteLMConfig", "load", "pretrained", "pretrained_record", "rope", "save"]
