"""Gated attention: softmax attention whose output a sigmoid gate may switch off."""

from torch import nn

from linattn_edu.layers.attention import SoftmaxAttention

POSITIONS = ("G1", "G2", "G3", "G4", "G5")


class GatedAttention(SoftmaxAttention):
    """Softmax attention with one gate more, X -> X * sigmoid(W x), computed from the layer's input x.

        position   X                                        gates a token
        G1         o, the output of the heads               HQ x K, or headwise HQ
        G2         v                                        H x K, or headwise H
        G3         k, before its norm and position          H x K, or headwise H
        G4         q, before its norm and position          HQ x K, or headwise HQ
        G5         y, after W_O                             D

    W_V and W_O are together one linear map of rank K a head; G1 and G2 put a non-linearity between them. At G1 the gate
    belongs to the query: a head that finds nothing closes it, and need not attend to the first token instead.

    Args:
        width: D, channels of x and y.
        heads: HQ, query heads.
        position: "G1" to "G5".
        headwise: one gate a head instead of one a channel; not for G5, where the heads are mixed.
        options: the other arguments of `SoftmaxAttention`.

    Raises:
        ValueError: an unknown position, or sizes that do not fit.

    Source: Qiu et al. 2025 (2505.06708), eq. 5. Qwen3-Next has G1 with a gate a channel.
    """

    def __init__(self, width, heads, *, position="G1", headwise=False, **options):
        super().__init__(width, heads, **options)
        if position not in POSITIONS:
            raise ValueError(f"`position`: got {position!r}, expected one of {', '.join(POSITIONS)}")
        if position == "G5" and headwise:
            raise ValueError("`headwise`: got True with position G5, expected False where the heads are mixed")
        self.position = position
        gated = {"G2": self.kv_heads, "G3": self.kv_heads, "G5": width}.get(position, self.heads)
        each = 1 if headwise or position == "G5" else self.head_dim
        self.gate_proj = nn.Linear(width, gated * each, bias=options.get("bias", False))

    def _gated(self, position, X, x):
        """X [B, T, heads, K] times its gate, if it stands at this position."""
        if position != self.position:
            return X
        return X * self.gate_proj(x).sigmoid().unflatten(-1, (X.shape[2], -1))

    def project(self, x):
        q, k, v = super().project(x)
        return self._gated("G4", q, x), self._gated("G3", k, x), self._gated("G2", v, x)

    def leave(self, o, x):
        y = super().leave(self._gated("G1", o, x), x)
        return y * self.gate_proj(x).sigmoid() if self.position == "G5" else y
