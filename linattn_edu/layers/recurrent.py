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
    x, or with `cu_seqlens` the pieces of its one row. Its cache is never None: before the first token it is zero.

    Attributes:
        width: D.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes; may be changed at any time.
        state_shapes: the shape of each tensor of the state, for one sequence.
        conv_shape: the same for the short convolution; None without one.
        undecayed: names of parameters that weight decay must leave alone, whatever their number of axes.
    """

    state_shapes = ()
    conv_shape = None
    undecayed = ()

    def __init__(self, width, form="fused"):
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"`form`: got {form!r}, expected one of {', '.join(FORMS)}")
        self.width, self.form = validate.count("width", width), form

    def forward(self, x, *, cache=None, mask=None, cu_seqlens=None):
        """Mix the tokens of x, and remember them.

        Args:
            x: [B, T, D], in the dtype of the weights unless `torch.autocast` is on.
            cache: what an earlier call returned; None at the beginning of the sequences.
            mask: [B, T] bool, True for a real token. Padding may stand anywhere; its outputs are 0.
            cu_seqlens: integers [N+1], the bounds of N sequences packed into one row (B = 1).

        Returns:
            y [B, T, D], and the new cache.

        Raises:
            ValueError: a wrong shape, dtype or device; `mask` together with `cu_seqlens`.
            TypeError: an argument that is no tensor, or a cache that is no Cache.
        """
        N = packing.check(self, x, cache, mask, cu_seqlens)
        cache = self.initial_cache(N, dtype=x.dtype, device=x.device) if cache is None else self._own(cache)
        padded = mask is not None and not mask.all()
        tokens, bounds = packing.pack(x, mask) if padded else (x, cu_seqlens)
        y, state, conv = self.mix(tokens, cache, bounds)
        new = Cache(state, conv, cache.seen + packing.lengths(tokens, bounds))
        return packing.scatter(y, mask) if padded else y, new

    def initial_cache(self, N, *, dtype=torch.float32, device=None):
        """What the layer remembers of N sequences before their first token: zeros.

        Args:
            N: number of sequences.
            dtype: of the convolution's inputs; the state is in float32, or in float64 if this is.
            device: of all tensors; torch's default if None.
        """
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        state = tuple(torch.zeros(N, *shape, dtype=exact, device=device) for shape in self.state_shapes)
        conv = None if self.conv_shape is None else torch.zeros(N, *self.conv_shape, dtype=dtype, device=device)
        seen = torch.zeros(N, dtype=torch.int64, device=device)
        return Cache(state if len(state) > 1 else state[0] if state else None, conv, seen)

    def cache_bytes(self, T=0, *, dtype=torch.float32):
        """Memory of the cache of one sequence of T tokens of this dtype, in bytes: the same for every T."""
        validate.count("T", T, least=0)
        return self.initial_cache(1, dtype=dtype, device="meta").bytes

    def _own(self, cache):
        """The cache, if it has the shapes of this layer's."""
        N, got = len(cache.seen), [list(x.shape) for x in cache.tensors]
        expected = [[N, *shape] for shape in (*self.state_shapes, *filter(None, [self.conv_shape]), ())]
        if got != expected:
            raise ValueError(f"`cache`: got tensors of shapes {got}, expected {expected}: that of another layer?")
        return cache

    def run(self, operator, q, k, v, state, cu_seqlens, **arguments):
        """The operator in the form of this layer, or for a single token a sequence in the form `step`."""
        if cu_seqlens is not None or q.shape[1] != 1:
            rest = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
            return getattr(operator, self.form)(q, k, v, **arguments, **rest)
        for name, gate in arguments.items():
            if isinstance(gate, torch.Tensor) and gate.dim() > 1:  # a constant gate [HV] has no T axis
                arguments[name] = gate[:, 0]
        o, state = operator.step(q[:, 0], k[:, 0], v[:, 0], state, **arguments)
        return o[:, None], state
