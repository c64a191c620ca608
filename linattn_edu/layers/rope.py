"""Rotary position embedding: scores that depend on how far apart two tokens are."""

import torch

from linattn_edu import validate
from linattn_edu.forms import computing_dtype
from linattn_edu.validate import Sizes


@validate.named
def rope(x, *, base=10_000.0, start=0, positions=None, channels=None):
    """Rotate the channels (i, i + R/2), i < R/2, of the token at position t by the angle t * base^(-2i/R).

    Then q_s . k_t depends on the positions through s - t alone. R = K rotates every channel; with a smaller R the last
    K - R channels pass as they are, and speak of content alone (partial RoPE).

    Args:
        x: [B, T, H, K].
        base: the slowest pair turns by about 1/base a token.
        start: position of the first token, a whole number; not used where `positions` are given.
        positions: integers [T] or [B, T].
        channels: R, even; K if None.

    Returns:
        The rotated x. Angles are computed in float32, or in float64 for float64 inputs.

    Raises:
        ValueError: a wrong shape, dtype, device or value.
        TypeError: an argument that is missing, or is no tensor or number.

    Source: Su et al. 2021 (RoFormer), which pairs (2i, 2i + 1): the same up to a permutation of the channels.
    """
    sizes = Sizes()
    validate.floating_tensor("x", x, "B T H K", sizes)
    T, K = sizes["T"], sizes["K"]
    R = K if channels is None else validate.count("channels", channels)
    if R % 2 or R > K:
        raise ValueError(f"`channels`: got {R} of K = {K}, expected an even number of at most K")
    base, exact = validate.number("base", base, positive=True), computing_dtype(x)
    start = validate.count("start", start, least=None)
    if positions is None:
        positions = torch.arange(start, start + T, device=x.device)
    else:
        axes = "T" if isinstance(positions, torch.Tensor) and positions.dim() == 1 else "B T"
        validate.integer_tensor("positions", positions, axes, sizes, like=("x", x))
    frequency = base ** (-torch.arange(0, R, 2, device=x.device, dtype=exact) / R)
    angle = (positions.to(exact)[..., None] * frequency)[..., None, :]  # [T, 1, R/2] or [B, T, 1, R/2]
    cos, sin = (f.to(x.dtype) for f in (angle.cos(), angle.sin()))
    a, b = x[..., :R].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, x[..., R:]), dim=-1)


def check_turning(base, name, channels):
    """Check `rope_base` of a layer and return it, with the number of channels that will turn, given as `name`.

    Without a base nothing turns.
    """
    if base is None:
        return None
    if channels < 2 or channels % 2:
        raise ValueError(f"`{name}`: got {channels}, expected an even number of channels, which turn in pairs")
    return validate.number("rope_base", base, positive=True)
