"""What can be checked: each name, with the package's own function as the reference and a way to draw its inputs."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Callable

import torch

import linattn_edu
from linattn_edu import feature_maps, linear, softmax
from linattn_edu.check.blocks import merge
from linattn_edu.check.cases import CASES, Case, inputs, tree_map

FORMS = ("recurrent", "parallel", "chunkwise", "fused")


@dataclass(frozen=True)
class Setting:
    """One input: sizes, gates, whether there is an incoming state, lengths of packed sequences, dtype."""

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


@dataclass(frozen=True)
class Problem:
    """A function that a reader can write.

    `data` are the arguments that it cannot do without, in order; `over_time` those with a time axis, which is axis 1;
    `traits` what the theorems may ask of it; `letters` the sizes that describe an input; `known` is filled with true
    results by setting.
    """

    name: str
    reference: Callable
    draw: Callable
    data: tuple
    over_time: tuple = ()
    traits: frozenset = frozenset()
    letters: str = "B T H HV K V"
    results: tuple = ("o", "final state")
    options: dict = field(default_factory=dict)
    known: dict = field(default_factory=dict)

    def arguments(self, setting):
        """The arguments for a setting on the default device, with the options of the setting and of the check."""
        options = self.options | dict(setting.options)
        drawn = self.draw(setting, options) | options
        device = torch.get_default_device()
        if device.type == "mps":  # no float64 there
            device = torch.device("cpu")
        return {key: tree_map(lambda y: y.to(device) if isinstance(y, torch.Tensor) else y, x) for key, x in drawn.items()}

    def base(self, takes_chunk_size):
        """Sizes that any usual chunk divides."""
        if "chunk_size" not in self.traits:
            return Setting(regime="weak" if "g" in self.data else "zero")
        return Setting(T=32, chunk_size=8) if takes_chunk_size else Setting(T=128)


def without_chunk_size(recurrent, chunk_size=None, **arguments):
    return recurrent(**arguments)


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def by_position(step, q, k, v, state, **arguments):
    return step(q, k, v, state, **arguments)


def draw_sequence(variant, setting, options):
    s = replace(setting, B=1, T=sum(setting.lengths)) if setting.lengths else setting
    sizes = {x: getattr(s, x) for x in "B T H HV K V dtype seed state beta_max".split()}
    arguments = inputs(Case(variant, CASES[variant].gates, options), s.regime, N=len(s.lengths) or None, **sizes)
    if s.lengths:
        arguments["cu_seqlens"] = bounds(s.lengths)
    if s.chunk_size:
        arguments["chunk_size"] = s.chunk_size
    return arguments | {"output_final_state": True}


def draw_step(variant, setting, options):
    """One token and a state: the first token of a sequence."""
    drawn = draw_sequence(variant, replace(setting, T=1, state=True), options)
    del drawn["output_final_state"]
    state = drawn.pop("initial_state")
    return one_token(drawn, {"q", "k", "v", "g", "beta"}) | {"state": state}


def one_token(arguments, over_time):
    return {key: x[:, 0] if key in over_time else x for key, x in arguments.items()}


def draw_update(variant, setting, options):
    """One token as the formula sees it: heads already shared, no options."""
    s = replace(setting, H=setting.HV)
    drawn = draw_step(variant, s, {"feature_map": "identity", "normalize": False} if variant == "linear" else {})
    return {key: drawn[key] for key in ("q", "k", "v", *CASES[variant].gates)} | {"S": drawn["state"]}


def draw_inter(variant, setting, options):
    """A block after `intra`, and its incoming state."""
    module, token = CASES[variant].module, draw_update(variant, setting, options)
    drawn = draw_sequence(variant, replace(setting, H=setting.HV, state=False), options)
    blocks = [drawn[key].transpose(1, 2)[None] for key in ("q", "k", "v", *CASES[variant].gates)]
    tensors = [x[0] for x in module.operator.intra(*blocks)]
    return dict(zip(parameter_names(module.operator.inter), [*tensors, token["S"]]))


def parameter_names(function):
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def draw_softmax(setting, options):
    s = replace(setting, B=1, T=sum(setting.lengths)) if setting.lengths else setting
    draw = torch.Generator().manual_seed(s.seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64, device="cpu").to(s.dtype)

    arguments = {"q": s.size * normal(s.B, s.T, s.HV, s.K), "k": normal(s.B, s.T, s.H, s.K), "v": normal(s.B, s.T, s.H, s.V)}
    if s.state:
        arguments["initial_state"] = normal(s.B, 5, s.H, s.K), normal(s.B, 5, s.H, s.V)
    if s.lengths:
        return arguments | {"cu_seqlens": bounds(s.lengths)}
    if s.chunk_size:
        arguments["chunk_size"] = s.chunk_size
    return arguments | {"output_final_state": True}


def draw_softmax_step(setting, options):
    drawn = draw_softmax(replace(setting, T=1, state=True), options)
    return one_token({key: drawn[key] for key in "qkv"}, "qkv") | {"state": drawn["initial_state"]}


def variant_problems(variant):
    """The problems of a variant with the q, k, v signature: its forms, its step, its formulas."""
    module, gates = linattn_edu.VARIANTS[variant], tuple(CASES[variant].gates)
    data = ("q", "k", "v", *gates)
    traits = {"time", "causal", "heads", "widths", "state", "packed", "packed_state"} | set(gates)
    traits |= {"feature_map", "normalize"} if variant == "linear" else {"scale"}
    reference, draw = partial(without_chunk_size, module.recurrent), partial(draw_sequence, variant)
    names = ("o", "final state S", "final state z") if variant == "linear" else ("o", "final state")
    for form in FORMS:
        more = {"chunk_size"} if form in ("chunkwise", "fused") else set()
        yield Problem(f"{variant}.{form}", reference, draw, data, data, frozenset(traits | more), results=names)
    names = tuple(name.replace("final", "new") for name in names)
    yield Problem(
        f"{variant}.step",
        partial(by_position, module.step),
        partial(draw_step, variant),
        (*data[:3], "state", *gates),
        traits=frozenset({"heads", "widths", *gates} | ({"feature_map", "normalize"} if variant == "linear" else {"scale"})),
        letters="B H HV K V",
        results=names,
    )
    formula = {"traits": frozenset({"widths", *gates}), "results": ("o", "S")}
    update, inter = module.operator.update, module.operator.inter
    arguments = parameter_names(update)
    yield Problem(f"{variant}.update", update, partial(draw_update, variant), arguments, letters="B HV K V", **formula)
    arguments = parameter_names(inter)
    yield Problem(f"{variant}.inter", inter, partial(draw_inter, variant), arguments, letters="B T HV K V", **formula)


def softmax_problems():
    data = ("q", "k", "v")
    traits = {"time", "causal", "heads", "widths", "state", "packed", "large", "scale", "mask"}
    names = ("o", "cache of keys", "cache of values")
    reference = partial(without_chunk_size, softmax.recurrent)
    for form in FORMS:
        more = {"chunk_size"} if form in ("chunkwise", "fused") else set()
        yield Problem(f"softmax.{form}", reference, draw_softmax, data, data, frozenset(traits | more), results=names)
    yield Problem(
        "softmax.step", partial(by_position, softmax.step), draw_softmax_step, (*data, "state"), traits=frozenset({"heads", "widths", "large", "scale"}), letters="B H HV K V", results=names
    )
    yield Problem("softmax.merge", merge, draw_merge, ("a", "b"), traits=frozenset({"large"}), letters="T V", results=("m", "z", "o"))


def draw_merge(setting, options):
    """T queries over two blocks of keys, the second with the larger scores in half of the rows."""
    s, draw = setting, torch.Generator().manual_seed(setting.seed)
    blocks = []
    for _ in "ab":
        scores = 5 * s.size * torch.randn(s.T, 6, generator=draw, dtype=torch.float64, device="cpu").to(s.dtype)
        v = torch.randn(6, s.V, generator=draw, dtype=torch.float64, device="cpu").to(s.dtype)
        m = scores.amax(-1, keepdim=True)
        p = (scores - m).exp()
        blocks.append((m, p.sum(-1, keepdim=True), p @ v))
    return dict(zip("ab", blocks))


def bidirectional_problem():
    def draw(setting, options):
        drawn = draw_sequence("linear", setting, options)
        return {key: x for key, x in drawn.items() if key not in ("output_final_state", "chunk_size")}

    traits = frozenset({"time", "heads", "widths", "feature_map", "normalize"})
    return Problem("linear.bidirectional", linear.bidirectional, draw, ("q", "k", "v"), ("q", "k", "v"), traits, results=("o",))


def map_problems():
    def draw(setting, options):
        generator = torch.Generator().manual_seed(setting.seed)
        shape = setting.B, setting.T, setting.H, setting.K
        return {"x": setting.size * torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(setting.dtype)}

    for name, phi in feature_maps.FEATURE_MAPS.items():
        yield Problem(f"feature_maps.{name}", phi, draw, ("x",), traits=frozenset({"large"}), letters="B T H K", results=("phi(x)",))


def problems():
    """All problems by name."""
    found = [*softmax_problems(), bidirectional_problem(), *map_problems()]
    for variant in linattn_edu.VARIANTS:
        if variant != "softmax":
            found += variant_problems(variant)
    by_name = {problem.name: problem for problem in found}
    by_name["softmax.online"] = replace(by_name["softmax.chunkwise"], name="softmax.online")
    return by_name
