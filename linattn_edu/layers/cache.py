"""What a layer remembers of the tokens it has seen, from one call of `forward` to the next."""

import dataclasses
from dataclasses import dataclass

import torch

Tensors = torch.Tensor | tuple[torch.Tensor, ...] | None


@dataclass(frozen=True, eq=False)
class Cache:
    """The memory of one layer for N sequences; every tensor in it has the N sequences as its first axis.

    `forward` returns a new cache and leaves the one that it was given as it was: a prompt read once may be continued
    many times.

    Attributes:
        state: the recurrent state, a tensor or a tuple of tensors in float32; in attention the keys and values (or
            MLA's latent) of all tokens, in the dtype of the layer.
        conv: the last W - 1 inputs of the short convolution, [N, channels, W-1]; None without one.
        seen: [N] int64, how many real tokens each sequence has had; padding does not count.
        mask: [N, S] bool, which stored keys are real; attention alone has it, and None means all.
    """

    state: Tensors = None
    conv: Tensors = None
    seen: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    @property
    def tensors(self):
        """All tensors in it, in the order of the attributes."""
        found = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found.extend(value if isinstance(value, tuple) else () if value is None else (value,))
        return found

    @property
    def bytes(self):
        """Memory of all its tensors, in bytes."""
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def map(self, f):
        """A cache of f(x) for every tensor x: `cache.map(lambda x: x[rows])` picks or repeats sequences."""

        def apply(value):
            if value is None:
                return None
            return tuple(f(x) for x in value) if isinstance(value, tuple) else f(value)

        return Cache(*(apply(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def detach(self):
        """The same memory without its gradient: training then sees no further back than this call."""
        return self.map(torch.Tensor.detach)
