"""Inputs for every function that can be checked: from a setting to arguments by name."""

from dataclasses import dataclass, replace

import torch

from linattn_edu.algebra import l2norm
from linattn_edu.check.cases import CASES, REGIMES, VERY_STRONG, Case, inputs


@dataclass(frozen=True)
class Setting:
    """One input: its sizes, its gates, whether there is a state, lengths of packed sequences, options, dtype."""

    B: int = 2
    T: int = 32
    H: int = 2
    HV: int = 2
    K: int = 4
    V: int = 4
    regime: str = "weak"
    state: bool = False
    lengths: tuple = ()
    chunk_size: int | None = None
    beta_max: float = 1.0
    size: float = 1.0
    options: tuple = ()
    seed: int = 0
    dtype: torch.dtype = torch.float64

    @property
    def N(self):
        return len(self.lengths) or self.B

    def packed(self):
        """The setting with the sizes that its packed sequences have together."""
        return replace(self, B=1, T=sum(self.lengths)) if self.lengths else self


def sources(setting):
    """Two ways to draw a tensor: normal(*shape), uniform(low, high, *shape)."""
    draw, dtype = torch.Generator().manual_seed(setting.seed), setting.dtype

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64, device="cpu").to(dtype)

    def uniform(low, high, *shape):
        return (low + (high - low) * torch.rand(*shape, generator=draw, dtype=torch.float64, device="cpu")).to(dtype)

    return normal, uniform


def extras(setting):
    """The optional arguments that a setting asks for."""
    drawn = {"output_final_state": True}
    if setting.lengths:
        drawn["cu_seqlens"] = torch.tensor([0, *setting.lengths]).cumsum(0)
    if setting.chunk_size:
        drawn["chunk_size"] = setting.chunk_size
    return drawn


def first_token(arguments, over_time):
    """The arguments of a step: the first token, and the state under its own name."""
    del arguments["output_final_state"]
    state = arguments.pop("initial_state")
    return {key: x[:, 0] if key in over_time else x for key, x in arguments.items()} | {"state": state}


def variant(name, setting, options):
    """A sequence for a variant with the q, k, v signature."""
    s = setting.packed()
    sizes = {x: getattr(s, x) for x in "B T H HV K V N dtype seed state beta_max".split()}
    return inputs(Case(name, CASES[name].gates, options), s.regime, **sizes) | extras(s)


def variant_step(name, setting, options):
    return first_token(variant(name, replace(setting, T=1, state=True), options), {"q", "k", "v", *CASES[name].gates})


def variant_update(name, setting, options):
    """One token as the formula sees it: heads shared, no options."""
    plain = {"feature_map": "identity", "normalize": False} if name == "linear" else {}
    drawn = variant_step(name, replace(setting, H=setting.HV), plain)
    return {key: drawn[key] for key in ("q", "k", "v", *CASES[name].gates)} | {"S": drawn["state"]}


def variant_inter(name, data, setting, options):
    """What `intra` gives for a block, and the block's incoming state; `data` names them."""
    drawn = variant(name, replace(setting, H=setting.HV, state=False), options)
    block = [drawn[key].transpose(1, 2)[None] for key in ("q", "k", "v", *CASES[name].gates)]
    tensors = [x[0] for x in CASES[name].module.operator.intra(*block)]
    return dict(zip(data, [*tensors, variant_update(name, setting, options)["S"]]))


def softmax(setting, options):
    s = setting.packed()
    normal, _ = sources(s)
    drawn = {
        "q": s.size * normal(s.B, s.T, s.HV, s.K),
        "k": normal(s.B, s.T, s.H, s.K),
        "v": normal(s.B, s.T, s.H, s.V),
    }
    if s.state:
        drawn["initial_state"] = normal(s.B, 5, s.H, s.K), normal(s.B, 5, s.H, s.V)
    more = extras(s)
    if s.lengths:
        del more["output_final_state"]
    return drawn | more


def softmax_step(setting, options):
    return first_token(softmax(replace(setting, T=1, state=True), options), "qkv")


def merge(setting, options):
    """T queries over two blocks of six keys."""
    s, (normal, _) = setting, sources(setting)
    blocks = []
    for _ in "ab":
        scores, v = 5 * s.size * normal(s.T, 6), normal(6, s.V)
        m = scores.amax(-1, keepdim=True)
        p = (scores - m).exp()
        blocks.append((m, p.sum(-1, keepdim=True), p @ v))
    return dict(zip("ab", blocks))


def mamba(setting, options):
    """K channels with V states each; the regime is that of A, Delta lies around 1."""
    s, (normal, uniform) = setting, sources(setting)
    drawn = {"u": normal(s.B, s.T, s.K), "delta": uniform(0.5, 1.5, s.B, s.T, s.K)}
    drawn |= {"A": uniform(*(REGIMES | VERY_STRONG)[s.regime], s.K, s.V)}
    drawn |= {"B": normal(s.B, s.T, s.V), "C": normal(s.B, s.T, s.V)}
    if "D" in options:
        drawn["D"] = normal(s.K)
    if s.state:
        drawn["initial_state"] = normal(s.B, s.K, s.V)
    return drawn | extras(s)


def mamba_step(setting, options):
    return first_token(mamba(replace(setting, T=1, state=True), options), {"u", "delta", "B", "C"})


def convolution(setting, options):
    """K channels, V taps."""
    s = setting.packed()
    normal, _ = sources(s)
    drawn = {"x": normal(s.B, s.T, s.K), "weight": normal(s.K, s.V)}
    if "bias" in options:
        drawn["bias"] = normal(s.K)
    if s.state:
        drawn["initial_state"] = normal(s.N, s.K, s.V - 1)
    return drawn | extras(s)


def convolution_step(setting, options):
    return first_token(convolution(replace(setting, T=1, state=True), options), {"x"})


def plain(axes, setting, options):
    """Normal tensors by their axes, {"x": "B T HV"}; `g` is a log-decay in the regime, `a` in (0, 1)."""
    normal, uniform = sources(setting)
    drawn = {}
    for name, letters in axes.items():
        shape = [getattr(setting, x) for x in letters.split()]
        if name == "g":
            drawn[name] = uniform(*(REGIMES | VERY_STRONG)[setting.regime], *shape)
        else:
            drawn[name] = uniform(0, 1, *shape) if name == "a" else setting.size * normal(*shape)
    return drawn


def triangular(setting, options):
    """The system that DeltaNet solves in a block: A = tril(K K^T, -1) for unit keys, here and there nearly alike."""
    s, (normal, _) = setting, sources(setting)
    k = l2norm(normal(s.B, s.T, 16) + (30 * normal(s.B, 1, 16) if s.regime == "alike" else 0))
    return {"A": (k @ k.mT).tril(-1), "X": normal(s.B, s.T, s.V)}
