"""What can be checked: each name, with the package's own function as the reference and a way to draw its inputs."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Callable

import torch

import linattn_edu
from linattn_edu import (
    algebra,
    decay,
    feature_maps,
    gates,
    linear,
    mamba,
    short_conv,
    softmax,
)
from linattn_edu.check import drawing
from linattn_edu.check.blocks import merge, solve
from linattn_edu.check.cases import CASES, tree_map
from linattn_edu.check.drawing import Setting

FORMS = ("recurrent", "parallel", "chunkwise", "fused")


@dataclass(frozen=True)
class Problem:
    """A function that a reader can write.

    `data` are the arguments that it cannot do without, in order; `over_time` those with a time axis; `traits` what the
    theorems may ask of it; `letters` the sizes that describe an input, "N:V" one that `Setting` calls otherwise;
    `adapt` makes a function of the package take these arguments; `known` is filled with true results by setting.
    """

    name: str
    reference: Callable
    draw: Callable
    data: tuple
    over_time: tuple = ()
    traits: frozenset = frozenset()
    letters: str = "B T H HV K V"
    results: tuple = ("o", "final state")
    time_axis: int = 1
    adapt: Callable = lambda function: function
    options: dict = field(default_factory=dict)
    known: dict = field(default_factory=dict)

    def arguments(self, setting):
        """The arguments for a setting on the default device, with the options of the setting and of the check."""
        options = self.options | dict(setting.options)
        drawn = options | self.draw(setting, options)
        device = torch.get_default_device()
        if device.type == "mps":  # no float64 there
            device = torch.device("cpu")
        return {
            key: tree_map(lambda y: y.to(device) if isinstance(y, torch.Tensor) else y, x) for key, x in drawn.items()
        }

    def with_options(self, options):
        """The problem with some options fixed: what they decide is no longer asked."""
        traits = self.traits - {"mask" if name == "causal" else name for name in options}
        if options.get("normalize") is False and "scale" not in options:
            traits |= {"scale"}
        if options.get("causal") is False:
            traits -= {"causal"}
        return replace(self, options=options, traits=traits)

    def base(self, takes_chunk_size):
        """Sizes that any usual chunk divides."""
        s = Setting(regime="weak" if "g" in self.traits else "zero")
        if "chunk_size" not in self.traits:
            return s
        return replace(s, chunk_size=8) if takes_chunk_size else replace(s, T=128)


def without_chunk_size(recurrent, chunk_size=None, **arguments):
    return recurrent(**arguments)


def by_position(step, data, **arguments):
    """Call a step, whose arguments are named q_t, ..., by the names without the mark."""
    first = [arguments.pop(name) for name in data]
    return step(*first, **arguments)


def forms(module, draw, data, over_time, traits, **more):
    """The problems of the forms of a variant: all have the same reference, the recurrence."""
    name = module.__name__.rpartition(".")[2]
    for form in FORMS:
        own = {"chunk_size"} if form in ("chunkwise", "fused") else set()
        reference = partial(without_chunk_size, module.recurrent)
        yield Problem(f"{name}.{form}", reference, draw, data, over_time, frozenset(traits | own), **more)


def step(module, draw, data, traits, **more):
    name = module.__name__.rpartition(".")[2]
    return Problem(
        f"{name}.step", partial(by_position, module.step, data), draw, data, traits=frozenset(traits), **more
    )


def variant_problems(variant):
    """The forms, the step and the formulas of a variant with the q, k, v signature."""
    module, own = linattn_edu.VARIANTS[variant], tuple(CASES[variant].gates)
    data = ("q", "k", "v", *own)
    traits = {"heads", "widths", *own} | ({"feature_map", "normalize"} if variant == "linear" else {"scale"})
    names = ("o", "final state S", "final state z") if variant == "linear" else ("o", "final state")
    whole = traits | {"time", "causal", "state", "packed", "packed_state"}
    yield from forms(module, partial(drawing.variant, variant), data, data, whole, results=names)
    names = tuple(name.replace("final", "new") for name in names)
    token = ("q", "k", "v", "state", *own)
    by_name = partial(by_position, module.step, token[:4])
    draw = partial(drawing.variant_step, variant)
    yield Problem(f"{variant}.step", by_name, draw, token, (), frozenset(traits), "B H HV K V", names)
    traits, update, inter = frozenset({"widths", *own}), module.operator.update, module.operator.inter
    data, draw = (*data, "S"), partial(drawing.variant_update, variant)
    yield Problem(f"{variant}.update", update, draw, data, (), traits, "B HV K V", ("o", "S"))
    data = inter.__code__.co_varnames[: inter.__code__.co_argcount]
    draw = partial(drawing.variant_inter, variant, data)
    yield Problem(f"{variant}.inter", inter, draw, data, (), traits, "B T HV K V", ("o", "S"))


def softmax_problems():
    data, letters = ("q", "k", "v"), "HQ:HV H K V"
    traits, names = {"heads", "widths", "large", "scale"}, ("o", "cache of keys", "cache of values")
    whole = traits | {"time", "causal", "mask", "state", "packed"}
    yield from forms(softmax, drawing.softmax, data, data, whole, results=names, letters=f"B T {letters}")
    yield step(softmax, drawing.softmax_step, (*data, "state"), traits, results=names, letters=f"B {letters}")
    yield Problem("softmax.merge", merge, drawing.merge, ("a", "b"), (), frozenset({"large"}), "T V", ("m", "z", "o"))


def mamba_problems():
    data, letters, traits = ("u", "delta", "A", "B", "C"), "D:K N:V", {"widths", "g", "discretization", "skip"}
    whole = traits | {"time", "causal", "state"}
    time, names = ("u", "delta", "B", "C"), ("y", "final state")
    yield from forms(mamba, drawing.mamba, data, time, whole, results=names, letters=f"B T {letters}")
    yield step(mamba, drawing.mamba_step, (*data, "state"), traits, results=("y", "new state"), letters=f"B {letters}")


def convolution_problems():
    data, letters, traits = ("x", "weight"), "D:K W:V", {"widths", "bias", "activation"}
    whole = frozenset(traits | {"time", "causal", "state", "packed", "packed_state"})
    names = ("y", "final state")
    conv = short_conv.causal_conv
    yield Problem("short_conv.causal_conv", conv, drawing.convolution, data, ("x",), whole, f"B T {letters}", names)
    names, draw = ("y", "new state"), drawing.convolution_step
    yield step(short_conv, draw, (*data, "state"), traits, results=names, letters=f"B {letters}")


def function(name, reference, axes, traits="", result="result", draw=None):
    """A function without state: its tensors with their axes."""
    letters = [x for x in "B T H HV K V".split() if any(x in letters.split() for letters in axes.values())]
    draw = draw or partial(drawing.plain, axes)
    return Problem(name, reference, draw, tuple(axes), (), frozenset(traits.split()), " ".join(letters), (result,))


def bidirectional(setting, options):
    drawn = drawing.variant("linear", setting, options)
    return {key: x for key, x in drawn.items() if key != "output_final_state"}


def function_problems():
    qkv = {"q": "B T H K", "k": "B T H K", "v": "B T HV V"}
    traits = "time heads widths feature_map normalize"
    yield replace(
        function("linear.bidirectional", linear.bidirectional, qkv, traits, "o", bidirectional),
        over_time=("q", "k", "v"),
    )
    traits = "time causal heads widths scale g"
    constant = function("decay.convolution", decay.convolution, qkv | {"g": "HV"}, traits, "o")
    yield replace(constant, over_time=("q", "k", "v"))
    kv = {"k": "B T H K", "v": "B T HV V"}
    yield function("decay.prefix_states", decay.prefix_states, kv | {"g": "B T HV"}, "time heads widths g", "S")
    for name, phi in feature_maps.FEATURE_MAPS.items():
        yield function(f"feature_maps.{name}", phi, {"x": "B T H K"}, "large", "phi(x)")
    head, channel = {"A_log": "HV", "dt_bias": "HV"}, {"A_log": "HV", "dt_bias": "HV K"}
    yield function("gates.mamba2_decay", gates.mamba2_decay, {"x": "B T HV"} | head, "", "g")
    yield function("gates.kda_decay", gates.kda_decay, {"x": "B T HV K"} | channel, "", "g")
    yield function("gates.kda_bounded_decay", gates.kda_bounded_decay, {"x": "B T HV K"} | channel, "", "g")
    yield function("gates.gla_decay", gates.gla_decay, {"x": "B T HV K"}, "large", "g")
    yield function("gates.write_strength", gates.write_strength, {"x": "B T HV"}, "large", "beta")
    yield function("algebra.l2norm", linattn_edu.l2norm, {"x": "B T H K"}, "large")
    yield function("algebra.decay_matrix", algebra.decay_matrix, {"g": "B T"}, "time g", "D")
    rows = {"q": "B T K", "k": "B T K", "g": "B T K"}
    yield function("algebra.channel_scores", algebra.channel_scores, rows, "time g", "P")
    yield function("algebra.scan", algebra.scan, {"a": "B T K", "x": "B T K"}, "time", "h")
    yield function(
        "algebra.solve_unit_lower", solve, {"A": "B T T", "X": "B T V"}, "time alike", "X", drawing.triangular
    )


def problems():
    """All problems by name."""
    found = [*softmax_problems(), *mamba_problems(), *convolution_problems(), *function_problems()]
    for variant in linattn_edu.VARIANTS:
        if variant != "softmax":
            found += variant_problems(variant)
    by_name = {problem.name: problem for problem in found}
    by_name["softmax.online"] = replace(by_name["softmax.chunkwise"], name="softmax.online")
    return by_name
