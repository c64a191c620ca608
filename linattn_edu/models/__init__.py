"""Language models: a plain one with any mixers, and a small trained instance of it.

    >>> import torch
    >>> from linattn_edu import data, models
    >>> model = models.pretrained()
    >>> ids = data.encode("It is a truth universally acknowledged")[None]
    >>> logits, cache = model(ids)
    >>> logits.shape
    torch.Size([1, 38, 256])
    >>> [tuple(q.shape) for q, k, v in model.qkv(ids)]
    [(1, 38, 2, 32), (1, 38, 2, 32), (1, 38, 2, 32)]
"""

from linattn_edu.layers import rope
from linattn_edu.models.byte_lm import ByteLM, ByteLMConfig
from linattn_edu.models.causal_lm import Block, CausalLM
from linattn_edu.models.generation import choose, generate, stream
from linattn_edu.models.kimi_linear import KimiLinear, KimiLinearConfig
from linattn_edu.models.language_model import MIXERS, LanguageModel, LanguageModelConfig
from linattn_edu.models.qwen3_next import Qwen3Next, Qwen3NextConfig
from linattn_edu.models.storage import load, pretrained, pretrained_record, save

__all__ = [
    "MIXERS",
    "Block",
    "ByteLM",
    "ByteLMConfig",
    "CausalLM",
    "KimiLinear",
    "KimiLinearConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "Qwen3Next",
    "Qwen3NextConfig",
    "choose",
    "generate",
    "load",
    "pretrained",
    "pretrained_record",
    "rope",
    "save",
    "stream",
]
