"""Inputs for every variant: what the theorems are checked on, in the tests and on a reader's function alike.

Usual test inputs hide faults: with gates drawn as logsigmoid(randn) a block of 64 tokens keeps e^-52 of its incoming
state, so that dropping the state changes nothing. Hence three gate regimes, signed keys, a state that is not zero,
lengths that no block divides, and K != V.
"""

from dataclasses import dataclass, field

import torch

import linattn_edu

REGIMES = {"strong": (-8.0, -2.0), "weak": (-0.02, -0.001), "zero": (0.0, 0.0)}
VERY_STRONG = {"very strong": (-1000.0, -1000.0)}


@dataclass(frozen=True)
class Case:
    """A variant with its options: `gates` maps a gate argument to its axes, without B and T."""

    variant: str
    gates: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    @property
    def module(self):
        return linattn_edu.VARIANTS[self.variant]

    @property
    def tuple_state(self):
        return self.variant == "linear" and self.options.get("normalize", True)


CASES = {
    "linear": Case("linear"),
    "linear-softmax-map": Case("linear", options={"feature_map": "softmax"}),
    "linear-plain": Case("linear", options={"feature_map": "identity", "normalize": False}),
    "linear-plain-relu2": Case("linear", options={"feature_map": "relu2", "normalize": False}),
    "decay": Case("decay", {"g": "HV"}),
    "gla": Case("gla", {"g": "HV K"}),
    "deltanet": Case("deltanet", {"beta": "HV"}),
    "gated_deltanet": Case("gated_deltanet", {"g": "HV", "beta": "HV"}),
    "kda": Case("kda", {"g": "HV K", "beta": "HV"}),
}
CASES = {name: case for name, case in CASES.items() if case.variant in linattn_edu.VARIANTS}
GATED = [name for name, case in CASES.items() if "g" in case.gates]
REGIMES_OF = [(name, regime) for name, case in CASES.items() for regime in (REGIMES if "g" in case.gates else ["zero"])]


def inputs(
    name,
    regime="weak",
    *,
    B=2,
    T=37,
    H=2,
    HV=4,
    K=5,
    V=7,
    N=None,
    dtype=torch.float64,
    seed=0,
    state=True,
    beta_max=1.0,
):
    """Keyword arguments for the forms of a case or of its name: q, k, v, gates, options and a state for N sequences."""
    case, draw = CASES[name] if isinstance(name, str) else name, torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64, device="cpu")

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=draw, dtype=torch.float64, device="cpu")

    sizes = {"HV": HV, "K": K}
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    if "beta" in case.gates:
        k = linattn_edu.l2norm(k)
    arguments = {"q": q, "k": k, "v": v}
    for gate, axes in case.gates.items():
        low, high = (REGIMES | VERY_STRONG)[regime] if gate == "g" else (0.05 * beta_max, beta_max)
        arguments[gate] = uniform(low, high, B, T, *(sizes[x] for x in axes.split()))
    if state:
        N = B if N is None else N
        S = normal(N, HV, K, V)
        arguments["initial_state"] = (S, uniform(0.5, 2.0, N, HV, K)) if case.tuple_state else S
    arguments = {key: tree_map(lambda x: x.to(dtype), x) for key, x in arguments.items()}
    return arguments | case.options


def tree_map(f, x):
    return tuple(f(y) for y in x) if isinstance(x, tuple) else f(x)


def leaves(x):
    return [] if x is None else list(x) if isinstance(x, tuple) else [x]


def is_floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def tensors(arguments):
    """The tensors among the arguments, in order, those of a tuple state included."""
    return [y for x in arguments.values() for y in leaves(x) if is_floating(y)]


def with_gradients(arguments):
    """A copy of the arguments whose floating tensors are leaves that require a gradient."""
    return {
        key: tree_map(lambda y: y.detach().clone().requires_grad_() if is_floating(y) else y, x)
        for key, x in arguments.items()
    }
