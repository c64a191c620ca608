"""What all recurrent layers share: the way in and out of `forward`, and the choice of a form."""

import torch
from torch import nn

from linattn_edu import validate
from linattn_edu.layers import packing
from linattn_edu.layers.cache import Cache

FORMS = ("recurrent", "parallel", "chunkwise", "fused")


class RecurrentLayer(nn.Module):
    """A layer whose memory has a fixed size.

    A subclass writes `mix(x, cache, cu_seqlens) -> (y, state, conv)`. It sees no padding: the sequences are the rows of
    x, or with `cu_seqlens` the pieces of its one row; and at their beginning it sees an empty cache, never None.
    """

    def __init__(self, width, form="fused"):
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"`form`: got {form!r}, expected one of {', '.join(FORMS)}")
        self.width, self.form = validate.count("width", width), form

    def forward(self, x, *, cache=None, mask=None, cu_seqlens=None):
        """Mix the tokens of x, and remember them.

        Args:
            x: [B, T, D].
            cache: what an earlier call returned; None at the beginning of the sequences.
            mask: [B, T] bool, True for a real token. Padding may stand anywhere; its outputs are 0.
            cu_seqlens: integers [N+1], the bounds of N sequences packed into one row (B = 1).

        Returns:
            y [B, T, D], and the new cache.

        Raises:
            ValueError: a wrong shape, dtype or device; `mask` together with `cu_seqlens`.
            TypeError: an argument that is no tensor, or a cache that is no Cache.
        """
        packing.check(x, self.width, cache, mask, cu_seqlens)
        padded = mask is not None and not mask.all()
        tokens, bounds = packing.pack(x, mask) if padded else (x, cu_seqlens)
        cache = cache or Cache()
        y, state, conv = self.mix(tokens, cache, bounds)
        seen = packing.lengths(tokens, bounds)
        seen = seen if cache.seen is None else cache.seen + seen
        return packing.scatter(y, mask) if padded else y, Cache(state, conv, seen)

    def run(self, operator, q, k, v, state, cu_seqlens, **arguments):
        """The operator in the form of this layer; for one more token of known sequences in the form `step`."""
        if state is None or cu_seqlens is not None or q.shape[1] != 1:
            rest = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
            return getattr(operator, self.form)(q, k, v, **arguments, **rest)
        for name, gate in arguments.items():
            if isinstance(gate, torch.Tensor) and gate.dim() > 1:  # a constant gate [HV] has no T axis
                arguments[name] = gate[:, 0]
        o, state = operator.step(q[:, 0], k[:, 0], v[:, 0], state, **arguments)
        return o[:, None], state
