"""The theorems that every form of every variant obeys, each a sentence and a statement of a few lines.

A statement is made of a function (`run`, a `Reader`) on one input (a `Setting`): it yields what the function gave
beside what it should have given. The same list judges the package, its mutants and a reader's function.
"""

from dataclasses import dataclass, replace
from typing import Any, Callable

import torch

from linattn_edu.check.cases import is_floating, leaves, tree_map
from linattn_edu.check.reader import Stop, copy, in_words, named_results


@dataclass(frozen=True)
class Comparison:
    """One quantity: what the function gave and what is true."""

    what: str
    got: Any
    expected: Any


@dataclass(frozen=True, eq=False)
class Theorem:
    """`key` is its short name; `inputs` are the fields in which the settings to try differ from the base one.

    `needs` are traits of the problem, without which the theorem says nothing; `takes` are arguments of the function,
    without which it cannot be tested, as without a state returned if `returns_state`.
    """

    key: str
    sentence: str
    statement: Callable
    inputs: tuple = ({},)
    needs: str = ""
    takes: str = ""
    returns_state: bool = False

    def settings(self, base):
        return [replace(base, **change) for change in self.inputs]


def comparisons(theorem, run, setting):
    """What a theorem looks at on one input: a list of comparisons, or a `Stop` if there is nothing to compare."""
    key = theorem, setting
    if key not in run.seen:
        try:
            run.seen[key] = list(theorem.statement(run, setting))
        except Stop as stop:
            run.seen[key] = stop
    return run.seen[key]


def truth(run, s):
    """The results of the package's own function, by name; computed once for each setting."""
    if s not in run.problem.known:
        run.problem.known[s] = reference(run, run.problem.arguments(s))
    return run.problem.known[s]


def reference(run, arguments):
    return named_results(run.problem.reference(**arguments), run.problem.results)


def all_results(run, s, results=slice(None)):
    expected, got = truth(run, s), run(run.problem.arguments(s))
    for name in run.problem.results[results]:
        if name in got and name in expected:
            yield Comparison(f"`{name}`", got[name], expected[name])


def output(run, s):
    return all_results(run, s, slice(1))


def final_state(run, s):
    return all_results(run, s, slice(1, None))


def shapes(run, s):
    for c in all_results(run, s):
        yield Comparison(f"the shape of {c.what}", list(c.got.shape), list(c.expected.shape))
        yield Comparison(f"the dtype of {c.what}", c.got.dtype, c.expected.dtype)


def resumed(run, s):
    arguments = run.problem.arguments(s)
    o, *states = run.problem.results
    expected = truth(run, s)[o]
    for cut in inner_cuts(s.T):
        first = run(part(run, arguments, 0, cut))
        state = tuple(first[name] for name in states if name in first)
        state = state[0] if len(state) == 1 else state
        second = run(part(run, arguments, cut, s.T) | {"initial_state": state})
        joined = torch.cat([first[o], second[o]], run.problem.time_axis)
        yield Comparison(f"`{o}`, cut before token {cut},", joined, expected)


def part(run, arguments, start, stop):
    """The arguments of tokens `start` to `stop`."""
    return {key: tokens(run, x, start, stop) if key in run.problem.over_time else x for key, x in arguments.items()}


def tokens(run, x, start, stop):
    return x.narrow(run.problem.time_axis, start, stop - start)


def inner_cuts(T):
    return sorted({1, T // 2, T - 1} & set(range(1, T)))


def no_later_token(run, s):
    arguments, other = (run.problem.arguments(replace(s, seed=seed)) for seed in (0, 1))
    o, time = run.problem.results[0], run.problem.time_axis
    before = run(arguments)[o]
    for cut in inner_cuts(s.T):
        early, late = part(run, arguments, 0, cut), part(run, other, cut, s.T)
        mixed = {key: torch.cat([early[key], late[key]], time) for key in run.problem.over_time}
        what = f"`{o}` before token {cut}, when only the tokens from {cut} on change,"
        after = run(arguments | mixed)[o]
        yield Comparison(what, tokens(run, after, 0, cut), tokens(run, before, 0, cut))


def unchanged(run, s):
    arguments = run.problem.arguments(s)
    passed = {key: tree_map(copy, x) for key, x in arguments.items()}
    run(passed, copied=False)
    for (name, before), (_, after) in zip(named_tensors(arguments), named_tensors(passed)):
        yield Comparison(f"your function changes its input {name}:", after, before)


def gradients(run, s):
    arguments = {key: x for key, x in run.problem.arguments(s).items() if run.takes(key) or not is_floating(x)}
    try:
        got = gradients_of(run, arguments, run.returned)
    except Stop:
        raise
    except Exception as error:
        raise Stop(f"{in_words(error, run.function)}, in its backward pass") from None
    known, key = run.problem.known, (s, "gradients")
    if key not in known:
        known[key] = gradients_of(lambda a: reference(run, a), arguments, run.returned)
    for name, x in known[key].items():
        yield Comparison(f"the gradient of {name}", got[name], x)


@torch.enable_grad()
def gradients_of(function, arguments, results):
    """The gradients of one random number made of the named results, for every tensor among the arguments."""
    with_grad = {
        key: tree_map(lambda y: copy(y).requires_grad_() if is_floating(y) else y, x) for key, x in arguments.items()
    }
    got = function({key: tree_map(copy, x) for key, x in with_grad.items()})
    draw = torch.Generator().manual_seed(1)
    loss = 0
    for name in results:
        if name in got:
            weights = torch.randn(got[name].shape, generator=draw, dtype=torch.float64, device="cpu")
            loss = loss + (got[name] * weights.to(got[name])).sum()
    if not loss.requires_grad:
        raise Stop("returns results that carry no gradient (a detach, no_grad, .item() or NumPy on the way?)")
    names, xs = zip(*((name, x) for name, x in named_tensors(with_grad)))
    grads = torch.autograd.grad(loss, xs, allow_unused=True)
    return {name: torch.zeros_like(x) if grad is None else grad for name, x, grad in zip(names, xs, grads)}


def named_tensors(arguments):
    for key, x in arguments.items():
        for i, y in enumerate(leaves(x)):
            if is_floating(y):
                yield f"`{key}[{i}]`" if isinstance(x, tuple) else f"`{key}`", y


def option(**values):
    return {"options": tuple(values.items())}


FLOAT32, STATE, SHUT = {"dtype": torch.float32}, {"state": True}, {"regime": "very strong"}
SHORT, EMPTY = {"T": 12}, {"T": 0, "state": True}
WIDTHS = {"K": 3, "V": 5}, {"K": 5, "V": 3}
CHUNKS = tuple({"chunk_size": C} for C in (1, 5, 16, 64))
PACKED = {"lengths": (0, 1, 19, 0, 12)}
MAPS = tuple(option(feature_map=phi, normalize=False) for phi in ("identity", "relu2", "softmax"))
ZOH, SKIP, BIAS = option(discretization="zoh"), option(D="given"), option(bias="given")

THEOREMS = (
    Theorem("shapes", "It returns the right shapes, in the dtype of its inputs", shapes, ({}, FLOAT32)),
    Theorem("value", "Its result is that of the definition", output),
    Theorem("float32", "In float32 it is the same", all_results, (FLOAT32,)),
    Theorem("one token", "One token is enough", all_results, ({"T": 1},), "time"),
    Theorem("ragged", "Any number of tokens will do", all_results, ({"T": 37}, {"T": 70}), "time"),
    Theorem("widths", "Keys and values may differ in width", all_results, WIDTHS, "widths"),
    Theorem("groups", "Heads that come in groups read the head of their group", all_results, ({"HV": 6},), "heads"),
    Theorem("strong gates", "Strong gates: nearly all is forgotten", all_results, ({"regime": "strong"},), "g"),
    Theorem("open gates", "Open gates: nothing is forgotten", all_results, ({"regime": "zero"},), "g"),
    Theorem("very strong gates", "Very strong gates, e^-1000: finite, and right", all_results, (SHUT,), "g"),
    Theorem("strong writes", "Write strengths up to 2", all_results, ({"beta_max": 2.0},), "beta"),
    Theorem("alike keys", "Keys that are nearly alike", all_results, ({"regime": "alike", "T": 64},), "alike"),
    Theorem("large inputs", "Inputs in the thousands", all_results, ({"size": 1000.0},), "large"),
    Theorem("final state", "The final state is that of the definition", final_state, needs="state", returns_state=True),
    Theorem("initial state", "It goes on from `initial_state`", all_results, (STATE,), "state", "initial_state"),
    Theorem("resume", "Cut and resumed, it gives one pass", resumed, (SHORT,), "state causal", "initial_state", True),
    Theorem("no tokens", "No tokens leave the state as it is", all_results, (EMPTY,), "state", "initial_state"),
    Theorem("causal", "No output reads a later token", no_later_token, needs="causal"),
    Theorem("chunk size", "Any chunk size gives the same result", all_results, CHUNKS, "chunk_size", "chunk_size"),
    Theorem("packed", "Packed sequences do not see each other", all_results, (PACKED,), "packed", "cu_seqlens"),
    Theorem(
        "packed states",
        "Each packed sequence has a state of its own",
        all_results,
        (STATE | PACKED,),
        "packed_state",
        "cu_seqlens initial_state",
    ),
    Theorem("feature maps", "Other maps, no normaliser", all_results, MAPS, "feature_map", "feature_map normalize"),
    Theorem("scale", "`scale` is a factor", all_results, (option(scale=0.3),), "scale", "scale"),
    Theorem("no mask", "Without the mask every token is seen", all_results, (option(causal=False),), "mask", "causal"),
    Theorem("zoh", "The zero-order hold of the paper", all_results, (ZOH,), "discretization", "discretization"),
    Theorem("skip", "`D` leads past the state", all_results, (SKIP,), "skip", "D"),
    Theorem("bias", "`bias` is added", all_results, (BIAS,), "bias", "bias"),
    Theorem("activation", "SiLU comes last", all_results, (option(activation="silu"),), "activation", "activation"),
    Theorem("gradients", "Its gradients are those of the definition", gradients),
    Theorem("large gradients", "Gradients for inputs in the thousands", gradients, ({"size": 1000.0},), "large"),
    Theorem("very strong gradients", "Gradients with very strong gates: finite, and right", gradients, (SHUT,), "g"),
    Theorem("state gradient", "The gradient reaches `initial_state`", gradients, (STATE,), "state", "initial_state"),
    Theorem("unchanged", "It leaves its inputs as they are", unchanged, (STATE,)),
)
