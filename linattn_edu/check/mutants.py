"""One-symbol slips in the package's own source, each with its name in words.

The test-suite plants every one of them and sees a theorem fail; the checker compares a reader's function with them and
so names the slip. A mutant is applied to the source text at run time, in a private copy of the modules that use it.
"""

import ast
import builtins
import functools
import importlib.util
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

PACKAGE = "linattn_edu"
SHORT_SEGMENT = 32
"""Tokens a segment in the copies, so that short inputs have several."""


@dataclass(frozen=True)
class Mutant:
    """In `function` of `module`, `old` becomes `new`. `slip` completes "the version that ..."; `seen_in` is a name of
    `check` where it shows.
    """

    module: str
    function: str
    old: str
    new: str
    slip: str
    seen_in: str

    def source(self):
        """The text of the module with the slip in it."""
        text = source(self.module)
        start, stop = span(text, self.function)
        body = text[start:stop]
        if body.count(self.old) != 1:
            raise ValueError(f"{self.module}.{self.function}: {self.old!r} occurs {body.count(self.old)} times, expected once")
        return text[:start] + body.replace(self.old, self.new) + text[stop:]


@functools.cache
def source(module):
    spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
    return spec.loader.get_source(spec.name)


def span(text, function):
    """Where the source of a function, "f" or "Class.f", starts and ends."""
    nodes = ast.parse(text).body
    for name in function.split("."):
        [node] = [node for node in nodes if getattr(node, "name", None) == name]
        nodes = node.body
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: node.lineno - 1])), len("".join(lines[: node.end_lineno]))


class Copy:
    """A private copy of the package's modules, with one slip or none; `sys.modules` and the originals stay as they are."""

    def __init__(self, mutant=None):
        self.mutant, self.modules = mutant, {}

    def function(self, name):
        """The function for a name of `check`, as "linear.recurrent"."""
        module, *path = located(name)
        return functools.reduce(getattr, path, self.module(module))

    def module(self, name):
        if name not in self.modules:
            mutated = self.mutant is not None and self.mutant.module == name
            code = compile(self.mutant.source(), f"<mutant of {name}>", "exec") if mutated else compiled(name)
            module = self.modules[name] = ModuleType(f"mutant.{name}")
            module.__builtins__ = vars(builtins) | {"__import__": self.load}
            exec(code, vars(module))
            if name == "forms":
                module.SEGMENT = SHORT_SEGMENT
        return self.modules[name]

    def load(self, name, globals=None, locals=None, fromlist=(), level=0):
        """What an import statement gets: copies of this package's modules, everything else as it is."""
        package, _, rest = name.partition(".")
        if package != PACKAGE:
            return builtins.__import__(name, globals, locals, fromlist, level)
        if rest:
            return self.module(rest)
        return SimpleNamespace(**{part: self.module(part) for part in fromlist})


@functools.cache
def compiled(module):
    return compile(source(module), f"<copy of {module}>", "exec")


@functools.cache
def copy_of(mutant):
    return Copy(mutant)


@functools.cache
def used_by(module):
    """The modules that a module is made of, itself included."""
    copy = Copy()
    copy.module(module)
    return frozenset(copy.modules)


def candidates(name):
    """The mutants that could show in a function of `check`."""
    return [mutant for mutant in MUTANTS if mutant.module in used_by(located(name)[0])]


def located(name):
    """The module and the attributes where the function for a name of `check` is found."""
    module, form = name.split(".")
    if name in IN_BLOCKS:
        return "check.blocks", IN_BLOCKS[name]
    return (module, "operator", form) if form in ("update", "inter") else (module, form.replace("online", "chunkwise"))


IN_BLOCKS = {"softmax.merge": "merge", "algebra.solve_unit_lower": "solve"}

MUTANTS = tuple(
    Mutant(*row)
    for row in [
        # module, function, old, new, the version that ..., seen in
        ("softmax", "seen", "tril(L - T)", "tril()", "places the causal mask as if there were no cache", "softmax.parallel"),
        ("softmax", "seen", "tril(L - T)", "tril(L - T - 1)", "hides every token from itself", "softmax.parallel"),
        ("softmax", "seen", "tril(L - T)", "tril(L - T + 1)", "lets every token see the next one", "softmax.parallel"),
        ("softmax", "seen", ".tril(L - T) if causal else mask", "", "has no causal mask", "softmax.parallel"),
        ("softmax", "attend_at_once", "-torch.inf", "0", "masks the scores with 0, whose exponential is 1, instead of -inf", "softmax.parallel"),
        ("softmax", "attend_at_once", "softmax(-1)", "softmax(-2)", "normalises over the queries instead of the keys", "softmax.parallel"),
        ("softmax", "attend_at_once", "scale * q", "q", "leaves out the scale K ** -0.5", "softmax.parallel"),
        ("softmax", "attend_at_once", "scale * q", "scale**2 * q", "scales by 1 / K instead of 1 / sqrt(K)", "softmax.parallel"),
        ("softmax", "attend_by_row", "L - T + t + 1", "L - T + t", "leaves the token itself out of its past", "softmax.recurrent"),
        ("softmax", "attend_by_row", "L - T + t + 1", "t + 1", "counts the past without the tokens in the cache", "softmax.recurrent"),
        ("softmax", "attend_online", "shrink * o + p", "o + p", "does not rescale the running output when the maximum grows", "softmax.chunkwise"),
        ("softmax", "attend_online", "shrink * z + p", "z + p", "does not rescale the running sum when the maximum grows", "softmax.chunkwise"),
        ("softmax", "attend_online", "append(o / z)", "append(o)", "does not divide by the running sum", "softmax.chunkwise"),
        ("softmax", "attend_online", "(before - m).exp()", "(m - before).exp()", "rescales by e^(new - old maximum), the wrong way round", "softmax.chunkwise"),
        ("softmax", "attend_online", "torch.maximum(m, s.amax(-1, keepdim=True))", "s.amax(-1, keepdim=True)", "takes the maximum of the block instead of the running one", "softmax.chunkwise"),
        ("softmax", "attend_online", "(s - m).exp()", "s.exp()", "does not subtract the maximum before the exponential", "softmax.chunkwise"),
        ("softmax", "attend_sdpa", "causal and T == L", "causal", "uses is_causal, which counts from the first key, although there is a cache", "softmax.fused"),
        ("softmax", "_heads", "x.repeat_interleave(group, 2)", "x.repeat(1, 1, group, 1)", "tiles the heads (0 1 0 1) instead of repeating each (0 0 1 1)", "softmax.parallel"),
        ("softmax", "_extended", "[state[0], k]", "[k, state[0]]", "puts the cached keys behind the new ones", "softmax.step"),
        ("softmax", "_run", "else (keys, values)", "else (k, v)", "returns the new keys and values without the cache before them", "softmax.step"),
        ("check.blocks", "merge", "w_a * o_a", "o_a", "does not rescale the first block's output", "softmax.merge"),
        ("check.blocks", "merge", "w_a * z_a + w_b * z_b", "z_a + z_b", "adds the two sums without rescaling them", "softmax.merge"),
        ("check.blocks", "merge", "(m_a - m).exp(), (m_b - m).exp()", "(m - m_a).exp(), (m - m_b).exp()", "rescales the wrong way round", "softmax.merge"),
        ("check.blocks", "merge", "w_a * o_a + w_b * o_b", "(w_a * o_a + w_b * o_b) / (w_a * z_a + w_b * z_b)", "divides by the sum already, so that a further merge would be wrong", "softmax.merge"),
        ("feature_maps", "elu1", "x + 1", "x", "leaves out the + 1", "feature_maps.elu1"),
        ("feature_maps", "elu1", "torch.clamp(x, max=0)", "x", "exponentiates large inputs too, so that their gradient is NaN", "feature_maps.elu1"),
        ("feature_maps", "elu1", "torch.exp(torch.clamp(x, max=0))", "torch.exp(torch.clamp(x, max=0)) - 1", "is ELU without the + 1 below zero", "feature_maps.elu1"),
        ("feature_maps", "softmax", "dim=-1", "dim=1", "normalises over the tokens instead of the channels", "feature_maps.softmax"),
        ("linear", "update", "S = S + outer(k, v)\n    return read(S, q), S", "return read(S, q), S + outer(k, v)", "reads the state before the token is written", "linear.recurrent"),
        ("linear", "update", "S + outer(k, v)", "outer(k, v)", "forgets the state before the token", "linear.recurrent"),
        ("linear", "intra", ".tril() @ v", ".tril(-1) @ v", "leaves out the diagonal of the causal mask", "linear.parallel"),
        ("linear", "intra", ".tril() @ v", " @ v", "has no causal mask", "linear.parallel"),
        ("linear", "intra", ".tril() @ v", ".triu() @ v", "masks the past instead of the future", "linear.parallel"),
        ("linear", "inter", "o + q @ S", "o", "drops the state that enters a block", "linear.chunkwise"),
        ("linear", "inter", "S + kv", "kv", "hands on the state of the last block alone", "linear.chunkwise"),
        ("linear", "inter", "o + q @ S, S + kv", "o + q @ (S + kv), S + kv", "lets the block read its own tokens through the state too", "linear.chunkwise"),
        ("linear", "FeatureSpace.enter", 'self.features(k, "k")', "k", "applies the feature map to q but not to k", "linear.recurrent"),
        ("linear", "FeatureSpace.enter", 'self.features(q, "q")', "q", "applies the feature map to k but not to q", "linear.recurrent"),
        ("linear", "FeatureSpace.leave", "(o[..., -1:] + self.eps)", "1", "leaves out the normaliser", "linear.parallel"),
        ("linear", "FeatureSpace.leave", "o[..., -1:] + self.eps", "o[..., -1:]", "leaves out eps", "linear.parallel"),
        ("linear", "FeatureSpace.leave", "o[..., -1:] + self.eps", "o[..., -1:].sum(1, keepdim=True) + self.eps", "divides by the sum of all normalisers instead of each token's own", "linear.parallel"),
        ("linear", "FeatureSpace.state_in", "z.to(computing_dtype(q))[..., None]", "0 * z.to(computing_dtype(q))[..., None]", "starts the normaliser from zero although a state is given", "linear.recurrent"),
        ("linear", "bidirectional", "q @ (k.mT @ x)", "(q @ k.mT).tril() @ x", "is causal", "linear.bidirectional"),
        ("linear", "bidirectional", "space.leave(o)", "o[..., : v.shape[-1]]", "leaves out the normaliser", "linear.bidirectional"),
        ("algebra", "outer", "k[..., :, None] * v[..., None, :]", "k[..., None, :] * v[..., :, None]", "writes the transposed product v k^T into the state", "decay.recurrent"),
        ("algebra", "read", "@ S)", "@ S.mT)", "reads the transposed state", "decay.recurrent"),
        ("algebra", "since_start", "g.cumsum(-2)", "(g.cumsum(-2) - g)", "cumulates the gates up to the token before, one too few", "decay.chunkwise"),
        ("algebra", "to_end", "F.pad(g[..., 1:, :], (0, 0, 0, 1))", "g", "decays a write by the token's own gate too on its way to the end of the block", "decay.chunkwise"),
        ("algebra", "decay_matrix", "tril(-1)", "tril()", "has the key's own gate in the decay mask, one too many", "decay.parallel"),
        ("algebra", "decay_matrix", ".exp().tril()", ".exp()", "does not mask after the exponential, where e^0 = 1 is left above the diagonal", "decay.parallel"),
        ("algebra", "decay_matrix", ".exp().tril()", ".exp().tril(-1)", "leaves out the diagonal of the decay mask", "decay.parallel"),
        ("algebra", "decay_matrix", "(g[..., None] * later).cumsum(-2)", "g.cumsum(-1)[..., :, None] - g.cumsum(-1)[..., None, :]", "exponentiates before it masks, so that strong gates give NaN gradients", "decay.parallel"),
        ("algebra", "channel_scores", "(k_early * to_end(g_early))", "k_early", "does not decay the keys up to the query", "gla.parallel"),
        ("algebra", "solve_unit_lower", "solve_triangular(A,", "solve_triangular(-A,", "solves with I - A in the place of I + A", "deltanet.parallel"),
        ("forms", "Plain.scale", "return K**-0.5", "return 1", "leaves out the scale K ** -0.5", "decay.recurrent"),
        ("forms", "Plain.enter", "scale * q, k", "scale * q, scale * k", "scales both q and k", "decay.recurrent"),
        ("forms", "Plain.state_in", "return state.to", "return 0 * state.to", "ignores the initial state", "decay.recurrent"),
        ("forms", "fold", "o, S = f", "o, _ = f", "does not hand the state on from token to token or block to block", "decay.chunkwise"),
        ("forms", "by_block", "[0, -T % C]", "[-T % C, 0]", "pads in front of the sequence instead of behind it", "decay.chunkwise"),
        ("forms", "by_segment", "o, S = method", "o, _ = method", "returns the state it started from", "decay.recurrent"),
        ("forms", "by_sequence", "S[n : n + 1])", "S[:1])", "gives every packed sequence the state of the first", "decay.recurrent"),
        ("forms", "by_sequence", "S[n : n + 1])", "states[-1] if n else S[:1])", "carries the state from one packed sequence into the next", "decay.recurrent"),
        ("forms", "share_heads", "q.repeat_interleave(group, -2), k.repeat_interleave(group, -2)", "torch.cat([q] * group, -2), torch.cat([k] * group, -2)", "tiles the heads (0 1 0 1) instead of repeating each (0 0 1 1)", "linear.recurrent"),
        ("forms", "Operator.step", "o, S = self.update", "o, _ = self.update", "returns the state it was given", "decay.step"),
        ("decay", "update", "g.exp()", "g", "multiplies the state by g instead of exp(g)", "decay.recurrent"),
        ("decay", "update", "g.exp()", "(-g).exp()", "has the wrong sign of g: the state grows", "decay.recurrent"),
        ("decay", "update", "g.exp()[..., None, None] * S", "S", "leaves out the decay", "decay.recurrent"),
        ("decay", "update", "linear.update(q, k", "linear.update(q, g.exp()[..., None] * k", "decays the token's own write too", "decay.recurrent"),
        ("decay", "intra", "q @ k.mT * decay_matrix(g)", "(q @ k.mT).tril()", "uses the causal mask where the decay mask belongs", "decay.chunkwise"),
        ("decay", "intra", "start * q", "q", "reads the incoming state as if it had not decayed inside the block", "decay.chunkwise"),
        ("decay", "intra", "(end * k).mT", "k.mT", "writes the block into the state without the decay up to its end", "decay.chunkwise"),
        ("decay", "intra", "q @ k.mT * decay_matrix(g)", "((start * q) @ (k / start).mT).tril()", "divides the keys by the cumulated decay, which is 0 with strong gates", "decay.chunkwise"),
        ("decay", "inter", "decay * S", "S", "does not decay the state across a block", "decay.chunkwise"),
        ("decay", "inter", "decay * S + kv", "kv", "hands on the state of the last block alone", "decay.chunkwise"),
        ("decay", "inter", "o + q @ S", "o", "drops the state that enters a block", "decay.chunkwise"),
        ("gla", "update", "[..., None] * S", "[..., None, :] * S", "decays the value channels (columns of the state) instead of the key channels", "gla.recurrent"),
        ("gla", "update", "g.exp()[..., None]", "g.mean(-1).exp()[..., None, None]", "gives all key channels the same, mean gate", "gla.recurrent"),
        ("gla", "intra", "channel_scores(q, k, g)", "(q @ k.mT).tril()", "uses the causal mask where the decay mask belongs", "gla.chunkwise"),
        ("gla", "intra", "start * q", "q", "reads the incoming state as if it had not decayed inside the block", "gla.chunkwise"),
        ("gla", "intra", "(end * k).mT", "k.mT", "writes the block into the state without the decay up to its end", "gla.chunkwise"),
        ("gla", "intra", "channel_scores(q, k, g)", "((start * q) @ (k / start).mT).tril()", "divides the keys by the cumulated decay, which is 0 with strong gates", "gla.chunkwise"),
        ("deltanet", "update", "beta[..., None] * (v", "(v", "leaves out beta", "deltanet.recurrent"),
        ("deltanet", "update", "(v - read(S, k))", "v", "erases nothing before it writes", "deltanet.recurrent"),
        ("deltanet", "update", "beta[..., None] * (v - read(S, k))", "beta[..., None] * v - read(S, k)", "has beta on the write but not on the erasure", "deltanet.recurrent"),
        ("deltanet", "update", "beta[..., None] * (v - read(S, k))", "v - beta[..., None] * read(S, k)", "has beta on the erasure but not on the write", "deltanet.recurrent"),
        ("deltanet", "update", "v - read", "v + read", "adds what the state answers instead of taking it out", "deltanet.recurrent"),
        ("deltanet", "update", "read(S, k)", "read(S, q)", "takes out what the query reads instead of the key", "deltanet.recurrent"),
        ("deltanet", "intra", "k_beta @ k.mT", "k @ k.mT", "leaves beta out of the triangular system", "deltanet.chunkwise"),
        ("deltanet", "intra", "k.mT, k_beta", "k.mT, k", "leaves beta out of W", "deltanet.chunkwise"),
        ("deltanet", "intra", "beta * v", "v", "leaves beta out of U", "deltanet.chunkwise"),
        ("deltanet", "intra", ".tril(), k", ".tril(-1), k", "has the strict mask, which belongs to the triangular system, in the output", "deltanet.chunkwise"),
        ("deltanet", "intra", "(q @ k.mT).tril()", "q @ k.mT", "has no causal mask in the output", "deltanet.chunkwise"),
        ("deltanet", "inter", "U - W @ S", "U", "does not take out of the block what the incoming state answers", "deltanet.chunkwise"),
        ("deltanet", "inter", "U - W @ S", "U + W @ S", "adds what the incoming state answers instead of taking it out", "deltanet.chunkwise"),
        ("deltanet", "inter", "q @ S + scores", "scores", "drops the state that enters a block from the output", "deltanet.chunkwise"),
        ("deltanet", "inter", "S + k.mT @ v", "S + k.mT @ U", "writes U into the state instead of U - W S", "deltanet.chunkwise"),
        ("gated_deltanet", "update", "v, beta", "v + (g.exp() - 1)[..., None] * (k[..., None, :] @ S)[..., 0, :], beta", "takes out what the state answered before it decayed", "gated_deltanet.recurrent"),
        ("gated_deltanet", "update", "g.exp()[..., None, None] * S", "S", "leaves out the decay", "gated_deltanet.recurrent"),
        ("gated_deltanet", "intra", "k_beta @ k.mT * D", "k_beta @ k.mT", "leaves the decay out of the triangular system", "gated_deltanet.chunkwise"),
        ("gated_deltanet", "intra", "start * k", "k", "leaves the decay out of W", "gated_deltanet.chunkwise"),
        ("gated_deltanet", "intra", "q @ k.mT * D", "(q @ k.mT).tril()", "uses the causal mask where the decay mask belongs", "gated_deltanet.chunkwise"),
        ("gated_deltanet", "intra", "end * k", "k", "writes the block into the state without the decay up to its end", "gated_deltanet.chunkwise"),
        ("gated_deltanet", "intra", "return start * q", "return q", "reads the incoming state as if it had not decayed inside the block", "gated_deltanet.chunkwise"),
        ("gated_deltanet", "inter", "decay * S", "S", "does not decay the state across a block", "gated_deltanet.chunkwise"),
        ("gated_deltanet", "inter", "decay * S + k", "k", "hands on the state of the last block alone", "gated_deltanet.chunkwise"),
        ("gated_deltanet", "inter", "U - W @ S", "U", "does not take out of the block what the incoming state answers", "gated_deltanet.chunkwise"),
        ("kda", "update", "[..., None] * S", "[..., None, :] * S", "decays the value channels (columns of the state) instead of the key channels", "kda.recurrent"),
        ("kda", "update", "v, beta", "v + (((g.exp() - 1) * k)[..., None, :] @ S)[..., 0, :], beta", "takes out what the state answered before it decayed", "kda.recurrent"),
        ("kda", "update", "g.exp()[..., None]", "g.mean(-1).exp()[..., None, None]", "gives all key channels the same, mean gate: Gated DeltaNet", "kda.recurrent"),
        ("kda", "intra", "return start * q, q_scores", "return start * q, (q @ k.mT).tril()", "uses the causal mask where the decay mask belongs", "kda.chunkwise"),
        ("kda", "intra", "solve_unit_lower(A", "solve_unit_lower((start * k_beta) @ (k / start).mT", "divides the keys by the cumulated decay, which is 0 with strong gates", "kda.chunkwise"),
        ("kda", "intra", "start * k", "k", "leaves the decay out of W", "kda.chunkwise"),
        ("kda", "intra", "end * k", "k", "writes the block into the state without the decay up to its end", "kda.chunkwise"),
        ("kda", "intra", "solve_unit_lower(A", "solve_unit_lower(k_beta @ k.mT", "leaves the decay out of the triangular system", "kda.chunkwise"),
    ]
)
