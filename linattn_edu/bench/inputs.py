"""What the operators are measured on: random queries and values, unit keys, weak gates, so that a state lives long."""

import torch

from linattn_edu import l2norm

GATES = {
    "decay": {"g": "HV"},
    "gla": {"g": "HV K"},
    "deltanet": {"beta": "HV"},
    "gated_deltanet": {"g": "HV", "beta": "HV"},
    "kda": {"g": "HV K", "beta": "HV"},
}


def arguments(name, *, B=1, T, H, K, HV=None, V=None, N=16, dtype=torch.float32, device="cpu", seed=0):
    """Keyword arguments for a form of the operator `name`; gates are float32. Mamba has H K channels of N states."""
    draw = torch.Generator(device).manual_seed(seed)
    HV, V = HV or H, V or K

    def uniform(*shape):
        return torch.rand(B, T, *shape, generator=draw, device=device)

    def normal(*shape):
        return torch.randn(B, T, *shape, generator=draw, device=device).to(dtype)

    if name == "mamba":
        A = -torch.arange(1.0, N + 1, device=device).expand(H * K, N).contiguous()
        return {"u": normal(H * K), "delta": 0.1 * uniform(H * K), "A": A, "B": normal(N), "C": normal(N)}
    a = {"q": normal(H, K), "k": l2norm(normal(H, K).float()).to(dtype), "v": normal(HV, V)}
    for gate, axes in GATES.get(name, {}).items():
        x = uniform(*({"HV": HV, "K": K}[letter] for letter in axes.split()))
        a[gate] = x if gate == "beta" else -0.1 * x
    return a


def state(name, *, B, H, K, HV=None, V=None, N=16, device="cpu", seed=0, **_):
    """A state in float32 for those arguments."""
    draw = torch.Generator(device).manual_seed(seed)
    shape = (B, H * K, N) if name == "mamba" else (B, HV or H, K, V or K)
    return torch.randn(shape, generator=draw, device=device)
