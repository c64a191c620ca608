"""One-symbol slips in the package's own source, each with its name in words.

The test-suite plants every one of them and sees a theorem fail; the checker compares a reader's function with them and
so names the slip. To add one: a row in `TABLE`, whose old text occurs once in the function and whose new text makes the
function `seen in` fail; `tests/test_mutants.py` then plants it.
"""

import functools
from dataclasses import dataclass

from linattn_edu.check.copies import Copy, replaced, used_by


@dataclass(frozen=True)
class Mutant:
    """In a function of a module `old` becomes `new`; it shows in `seen_in`, a name of `check`. `slip` completes
    "the version that ...".
    """

    module: str
    function: str
    seen_in: str
    old: str
    new: str
    slip: str

    def source(self):
        """The text of the module with the slip in it."""
        return replaced(self.module, self.function, self.old, self.new)


@functools.cache
def copy_of(mutant):
    """The package with the slip in it."""
    return Copy(mutant)


def candidates(name):
    """The mutants that could show in the function for a name of `check`."""
    return [mutant for mutant in MUTANTS if mutant.module in used_by(name)]


TABLE = {
    # "module: function": [(seen in, old text, new text, the version that ...)]
    "softmax: seen": [
        ("softmax.parallel", "tril(L - T)", "tril()", "places the causal mask as if there were no cache"),
        ("softmax.parallel", "tril(L - T)", "tril(L - T - 1)", "hides every token from itself"),
        ("softmax.parallel", "tril(L - T)", "tril(L - T + 1)", "lets every token see the next one"),
        ("softmax.parallel", ".tril(L - T) if causal else mask", "", "has no causal mask"),
    ],
    "softmax: attend_at_once": [
        ("softmax.parallel", "-torch.inf", "0", "masks the scores with 0, whose exponential is 1, instead of -inf"),
        ("softmax.parallel", "softmax(-1)", "softmax(-2)", "normalises over the queries instead of the keys"),
        ("softmax.parallel", "scale * q", "q", "leaves out the scale K ** -0.5"),
        ("softmax.parallel", "scale * q", "scale**2 * q", "scales by 1 / K instead of 1 / sqrt(K)"),
    ],
    "softmax: attend_by_row": [
        ("softmax.recurrent", "L - T + t + 1", "L - T + t", "leaves the token itself out of its past"),
        ("softmax.recurrent", "L - T + t + 1", "t + 1", "counts the past without the tokens in the cache"),
    ],
    "softmax: attend_online": [
        ("softmax.chunkwise", "shrink * o + p", "o + p", "does not rescale the running output when the maximum grows"),
        ("softmax.chunkwise", "shrink * z + p", "z + p", "does not rescale the running sum when the maximum grows"),
        (
            "softmax.chunkwise", "shrink * z + p.sum(-1, keepdim=True), shrink * o", "z + p.sum(-1, keepdim=True), o",
            "rescales neither the running sum nor the running output when the maximum grows",
        ),
        ("softmax.chunkwise", "append(o / z)", "append(o)", "does not divide by the running sum"),
        (
            "softmax.chunkwise", "(before - m).exp()", "(m - before).exp()",
            "rescales by e^(new - old maximum), the wrong way round",
        ),
        (
            "softmax.chunkwise", "torch.maximum(m, s.amax(-1, keepdim=True))", "s.amax(-1, keepdim=True)",
            "takes the maximum of the block instead of the running one",
        ),
        ("softmax.chunkwise", "(s - m).exp()", "s.exp()", "does not subtract the maximum before the exponential"),
    ],
    "softmax: attend_sdpa": [
        (
            "softmax.fused", "causal and T == L", "causal",
            "uses is_causal, which counts from the first key, although there is a cache",
        ),
    ],
    "softmax: _heads": [
        (
            "softmax.parallel", "x.repeat_interleave(group, 2)", "x.repeat(1, 1, group, 1)",
            "tiles the heads (0 1 0 1) instead of repeating each (0 0 1 1)",
        ),
    ],
    "softmax: _extended": [
        ("softmax.step", "[state[0], k]", "[k, state[0]]", "puts the cached keys behind the new ones"),
    ],
    "softmax: _run": [
        (
            "softmax.step", "else (keys, values)", "else (k, v)",
            "returns the new keys and values without the cache before them",
        ),
    ],
    "check.blocks: merge": [
        ("softmax.merge", "w_a * o_a", "o_a", "does not rescale the first block's output"),
        ("softmax.merge", "w_a * z_a + w_b * z_b", "z_a + z_b", "adds the two sums without rescaling them"),
        (
            "softmax.merge", "(m_a - m).exp(), (m_b - m).exp()", "(m - m_a).exp(), (m - m_b).exp()",
            "rescales the wrong way round",
        ),
        (
            "softmax.merge", "w_a * o_a + w_b * o_b", "(w_a * o_a + w_b * o_b) / (w_a * z_a + w_b * z_b)",
            "divides by the sum already, so that a further merge would be wrong",
        ),
    ],
    "feature_maps: elu1": [
        (
            "feature_maps.elu1", "x + 1, torch.exp(torch.clamp(x, max=0)))", "x, torch.expm1(x.clamp(max=0)))",
            "leaves out the + 1",
        ),
        ("feature_maps.elu1", "x + 1", "x", "leaves out the + 1 above zero"),
        (
            "feature_maps.elu1", "torch.clamp(x, max=0)", "x",
            "exponentiates large inputs too, so that their gradient is NaN",
        ),
    ],
    "feature_maps: softmax": [
        ("feature_maps.softmax", "dim=-1", "dim=1", "normalises over the tokens instead of the channels"),
    ],
    "linear: update": [
        (
            "linear.recurrent", "S = S + outer(k, v)\n    return read(S, q), S", "return read(S, q), S + outer(k, v)",
            "reads the state before the token is written",
        ),
        ("linear.recurrent", "S + outer(k, v)", "outer(k, v)", "forgets the state before the token"),
    ],
    "linear: intra": [
        ("linear.parallel", ".tril() @ v", ".tril(-1) @ v", "leaves out the diagonal of the causal mask"),
        ("linear.parallel", ".tril() @ v", " @ v", "has no causal mask"),
        ("linear.parallel", ".tril() @ v", ".triu() @ v", "masks the past instead of the future"),
    ],
    "linear: inter": [
        ("linear.chunkwise", "o + q @ S", "o", "drops the state that enters a block"),
        ("linear.chunkwise", "S + kv", "kv", "hands on the state of the last block alone"),
        (
            "linear.chunkwise", "o + q @ S, S + kv", "o + q @ (S + kv), S + kv",
            "lets the block read its own tokens through the state too",
        ),
    ],
    "linear: FeatureSpace.enter": [
        ("linear.recurrent", 'self.features(k, "k")', "k", "applies the feature map to q but not to k"),
        ("linear.recurrent", 'self.features(q, "q")', "q", "applies the feature map to k but not to q"),
    ],
    "linear: FeatureSpace.leave": [
        ("linear.parallel", "(o[..., -1:] + self.eps)", "1", "leaves out the normaliser"),
        ("linear.parallel", "o[..., -1:] + self.eps", "o[..., -1:]", "leaves out eps"),
        (
            "linear.parallel", "o[..., -1:] + self.eps", "o[..., -1:].sum(1, keepdim=True) + self.eps",
            "divides by the sum of all normalisers instead of each token's own",
        ),
    ],
    "linear: FeatureSpace.state_in": [
        (
            "linear.recurrent", "z[0].to(dtype)[..., None]", "0 * z[0].to(dtype)[..., None]",
            "starts the normaliser from zero although a state is given",
        ),
    ],
    "linear: bidirectional": [
        ("linear.bidirectional", "q @ (k.mT @ x)", "(q @ k.mT).tril() @ x", "is causal"),
        ("linear.bidirectional", "space.leave(o)", "o[..., : v.shape[-1]]", "leaves out the normaliser"),
    ],
    "algebra: outer": [
        (
            "decay.recurrent", "k[..., :, None] * v[..., None, :]", "k[..., None, :] * v[..., :, None]",
            "writes the transposed product v k^T into the state",
        ),
    ],
    "algebra: read": [
        ("decay.recurrent", "@ S)", "@ S.mT)", "reads the transposed state"),
    ],
    "algebra: since_start": [
        (
            "decay.chunkwise", "g.cumsum(-2)", "(g.cumsum(-2) - g)",
            "cumulates the gates up to the token before, one too few",
        ),
    ],
    "algebra: to_end": [
        (
            "decay.chunkwise", "F.pad(g[..., 1:, :], (0, 0, 0, 1))", "g",
            "decays a write by the token's own gate too on its way to the end of the block",
        ),
    ],
    "algebra: decay_matrix": [
        ("decay.parallel", "tril(-1)", "tril()", "has the key's own gate in the decay mask, one too many"),
        (
            "decay.parallel", ".exp() * lower", ".exp()",
            "does not mask after the exponential, where e^0 = 1 is left above the diagonal",
        ),
        ("decay.parallel", ".exp() * lower", ".exp() * later", "leaves out the diagonal of the decay mask"),
        (
            "decay.parallel",
            "(g[..., None] * later).cumsum(-2)",
            "g.cumsum(-1)[..., :, None] - g.cumsum(-1)[..., None, :]",
            "exponentiates before it masks, so that strong gates give NaN gradients",
        ),
    ],
    "algebra: channel_scores": [
        ("gla.parallel", "(k_early * to_end(g_early))", "k_early", "does not decay the keys up to the query"),
    ],
    "algebra: solve_unit_lower": [
        ("deltanet.parallel", "solve_triangular(A.mT", "solve_triangular(-A.mT", "solves with I - A in the place of I + A"),
        (
            "deltanet.chunkwise", "unitriangular=True", "unitriangular=False",
            "takes the diagonal from A instead of ones",
        ),
    ],
    "algebra: scan": [
        (
            "mamba.parallel", "a_odd * x_even + x_odd", "a_even * x_even + x_odd",
            "decays the first of two writes by its own gate instead of the second's",
        ),
        ("mamba.parallel", "a_odd * a_even", "a_odd", "keeps one gate of a pair instead of their product"),
    ],
    "algebra: l2norm": [
        (
            "algebra.l2norm", "(x * x).sum(-1, keepdim=True)", "(x * x).mean(-1, keepdim=True)",
            "divides by the root mean square instead of the length",
        ),
        ("algebra.l2norm", "sum(-1, keepdim=True) + 1e-6)", "sum(-1, keepdim=True))", "leaves out eps"),
    ],
    "forms: Plain.scale": [
        ("decay.recurrent", "return K**-0.5", "return 1", "leaves out the scale K ** -0.5"),
    ],
    "forms: Plain.enter": [
        ("decay.recurrent", "scale * q, k", "scale * q, scale * k", "scales both q and k"),
    ],
    "forms: Plain.state_in": [
        ("decay.recurrent", "return state.to", "return 0 * state.to", "ignores the initial state"),
    ],
    "forms: fold": [
        ("decay.chunkwise", "o, S = f", "o, _ = f", "does not hand the state on from token to token or block to block"),
    ],
    "forms: by_block": [
        ("decay.chunkwise", "[0, -T % C]", "[-T % C, 0]", "pads in front of the sequence instead of behind it"),
    ],
    "forms: by_segment": [
        ("decay.recurrent", "o, S = method", "o, _ = method", "returns the state it started from"),
    ],
    "forms: by_sequence": [
        ("decay.recurrent", "S[n : n + 1])", "S[:1])", "gives every packed sequence the state of the first"),
        (
            "decay.recurrent", "S[n : n + 1])", "states[-1] if n else S[:1])",
            "carries the state from one packed sequence into the next",
        ),
    ],
    "forms: share_heads": [
        (
            "linear.recurrent",
            "q.repeat_interleave(group, -2), k.repeat_interleave(group, -2)",
            "torch.cat([q] * group, -2), torch.cat([k] * group, -2)",
            "tiles the heads (0 1 0 1) instead of repeating each (0 0 1 1)",
        ),
    ],
    "forms: Operator.step": [
        ("decay.step", "o, S = self.update", "o, _ = self.update", "returns the state it was given"),
    ],
    "decay: update": [
        ("decay.recurrent", "g.exp()", "g", "multiplies the state by g instead of exp(g)"),
        ("decay.recurrent", "g.exp()", "(-g).exp()", "has the wrong sign of g: the state grows"),
        ("decay.recurrent", "g.exp()[..., None, None] * S", "S", "leaves out the decay"),
        (
            "decay.recurrent", "linear.update(q, k", "linear.update(q, g.exp()[..., None] * k",
            "decays the token's own write too",
        ),
    ],
    "decay: intra": [
        (
            "decay.chunkwise", "q @ k.mT * decay_matrix(g)", "(q @ k.mT).tril()",
            "uses the causal mask where the decay mask belongs",
        ),
        ("decay.chunkwise", "start * q", "q", "reads the incoming state as if it had not decayed inside the block"),
        ("decay.chunkwise", "(end * k).mT", "k.mT", "writes the block into the state without the decay up to its end"),
        (
            "decay.chunkwise", "q @ k.mT * decay_matrix(g)", "((start * q) @ (k / start).mT).tril()",
            "divides the keys by the cumulated decay, which is 0 with strong gates",
        ),
    ],
    "decay: inter": [
        ("decay.chunkwise", "decay * S", "S", "does not decay the state across a block"),
        ("decay.chunkwise", "decay * S + kv", "kv", "hands on the state of the last block alone"),
        ("decay.chunkwise", "o + q @ S", "o", "drops the state that enters a block"),
    ],
    "decay: causal_filter": [
        (
            "decay.convolution", "n = 2 * T", "n = T",
            "has no zeros behind the sequence, so that the FFT's circle brings the end back to the start",
        ),
        ("decay.convolution", "(lag * g)", "((lag + 1) * g)", "decays the token's own write too"),
    ],
    "gla: update": [
        (
            "gla.recurrent", "[..., None] * S", "[..., None, :] * S",
            "decays the value channels (columns of the state) instead of the key channels",
        ),
        (
            "gla.recurrent", "g.exp()[..., None]", "g.mean(-1).exp()[..., None, None]",
            "gives all key channels the same, mean gate",
        ),
    ],
    "gla: intra": [
        (
            "gla.chunkwise", "channel_scores(q, k, g)", "(q @ k.mT).tril()",
            "uses the causal mask where the decay mask belongs",
        ),
        (
            "gla.chunkwise", "channel_scores(q, k, g)", "channel_scores(q, g.exp() * k, g)",
            "has the key's own gate in the decay of a score, one too many",
        ),
        ("gla.chunkwise", "start * q", "q", "reads the incoming state as if it had not decayed inside the block"),
        ("gla.chunkwise", "(end * k).mT", "k.mT", "writes the block into the state without the decay up to its end"),
        (
            "gla.chunkwise", "channel_scores(q, k, g)", "((start * q) @ (k / start).mT).tril()",
            "divides the keys by the cumulated decay, which is 0 with strong gates",
        ),
    ],
    "deltanet: update": [
        ("deltanet.recurrent", "beta[..., None] * (v", "(v", "leaves out beta"),
        ("deltanet.recurrent", "(v - read(S, k))", "v", "erases nothing before it writes"),
        (
            "deltanet.recurrent", "beta[..., None] * (v - read(S, k))", "beta[..., None] * v - read(S, k)",
            "has beta on the write but not on the erasure",
        ),
        (
            "deltanet.recurrent", "beta[..., None] * (v - read(S, k))", "v - beta[..., None] * read(S, k)",
            "has beta on the erasure but not on the write",
        ),
        ("deltanet.recurrent", "v - read", "v + read", "adds what the state answers instead of taking it out"),
        ("deltanet.recurrent", "read(S, k)", "read(S, q)", "takes out what the query reads instead of the key"),
    ],
    "deltanet: intra": [
        ("deltanet.chunkwise", "k_beta @ k.mT", "k @ k.mT", "leaves beta out of the triangular system"),
        ("deltanet.chunkwise", "k.mT, k_beta", "k.mT, k", "leaves beta out of W"),
        ("deltanet.chunkwise", "beta * v", "v", "leaves beta out of U"),
        (
            "deltanet.chunkwise", ".tril(), k", ".tril(-1), k",
            "has the strict mask, which belongs to the triangular system, in the output",
        ),
        ("deltanet.chunkwise", "(q @ k.mT).tril()", "q @ k.mT", "has no causal mask in the output"),
    ],
    "deltanet: inter": [
        ("deltanet.chunkwise", "U - W @ S", "U", "does not take out of the block what the incoming state answers"),
        (
            "deltanet.chunkwise", "U - W @ S", "U + W @ S",
            "adds what the incoming state answers instead of taking it out",
        ),
        ("deltanet.chunkwise", "q @ S + scores", "scores", "drops the state that enters a block from the output"),
        ("deltanet.chunkwise", "S + k.mT @ v", "S + k.mT @ U", "writes U into the state instead of U - W S"),
    ],
    "gated_deltanet: update": [
        (
            "gated_deltanet.recurrent",
            "v, beta",
            "v + (g.exp() - 1)[..., None] * (k[..., None, :] @ S)[..., 0, :], beta",
            "takes out what the state answered before it decayed",
        ),
        ("gated_deltanet.recurrent", "g.exp()[..., None, None] * S", "S", "leaves out the decay"),
    ],
    "gated_deltanet: intra": [
        (
            "gated_deltanet.chunkwise", "k_beta @ k.mT * D", "k_beta @ k.mT",
            "leaves the decay out of the triangular system",
        ),
        ("gated_deltanet.chunkwise", "start * k", "k", "leaves the decay out of W"),
        (
            "gated_deltanet.chunkwise", "q @ k.mT * D", "(q @ k.mT).tril()",
            "uses the causal mask where the decay mask belongs",
        ),
        ("gated_deltanet.chunkwise", "end * k", "k", "writes the block into the state without the decay up to its end"),
        (
            "gated_deltanet.chunkwise", "return start * q", "return q",
            "reads the incoming state as if it had not decayed inside the block",
        ),
    ],
    "gated_deltanet: inter": [
        ("gated_deltanet.chunkwise", "decay * S", "S", "does not decay the state across a block"),
        ("gated_deltanet.chunkwise", "decay * S + k", "k", "hands on the state of the last block alone"),
        (
            "gated_deltanet.chunkwise", "U - W @ S", "U",
            "does not take out of the block what the incoming state answers",
        ),
    ],
    "kda: update": [
        (
            "kda.recurrent", "[..., None] * S", "[..., None, :] * S",
            "decays the value channels (columns of the state) instead of the key channels",
        ),
        (
            "kda.recurrent", "v, beta", "v + (((g.exp() - 1) * k)[..., None, :] @ S)[..., 0, :], beta",
            "takes out what the state answered before it decayed",
        ),
        (
            "kda.recurrent", "g.exp()[..., None]", "g.mean(-1).exp()[..., None, None]",
            "gives all key channels the same, mean gate: Gated DeltaNet",
        ),
    ],
    "kda: intra": [
        (
            "kda.chunkwise", "return start * q, q_scores", "return start * q, (q @ k.mT).tril()",
            "uses the causal mask where the decay mask belongs",
        ),
        (
            "kda.chunkwise", "solve_unit_lower(A", "solve_unit_lower((start * k_beta) @ (k / start).mT",
            "divides the keys by the cumulated decay, which is 0 with strong gates",
        ),
        ("kda.chunkwise", "start * k", "k", "leaves the decay out of W"),
        ("kda.chunkwise", "end * k", "k", "writes the block into the state without the decay up to its end"),
        (
            "kda.chunkwise", "solve_unit_lower(A", "solve_unit_lower(k_beta @ k.mT",
            "leaves the decay out of the triangular system",
        ),
    ],
    "mamba: transition": [
        ("mamba.recurrent", "hold(delta, A) * B", "B", "leaves the step size out of the write"),
        ("mamba.recurrent", "(delta * A).exp()", "1 + delta * A", "takes an Euler step for the decay too"),
        ("mamba.recurrent", "(delta * A).exp()", "(delta * A)", "multiplies by Delta A instead of its exponential"),
    ],
    "mamba: update": [
        (
            "mamba.recurrent",
            "h = decay * h + write\n    return read(h.mT, C), h",
            "return read(h.mT, C), decay * h + write",
            "reads the state before the token is written",
        ),
        ("mamba.recurrent", "decay * h + write", "decay * (h + write)", "decays the token's own write too"),
        ("mamba.recurrent", "read(h.mT, C)", "read(h.mT, B)", "reads with B instead of C"),
    ],
    "mamba: zoh": [
        (
            "mamba.recurrent", "torch.expm1(far) / far", "torch.exp(far) / far",
            "leaves out the - 1 of the zero-order hold",
        ),
    ],
    "mamba: by_scan": [
        ("mamba.parallel", "decay[:, :1] * h[:, None] + write[:, :1]", "write[:, :1]", "ignores the initial state"),
    ],
    "mamba: by_chunk": [
        ("mamba.chunkwise", "y = y + read", "y = y + 0 * read", "drops the state that enters a chunk"),
        (
            "mamba.chunkwise", "(since_start * before", "(before",
            "reads the incoming state as if it had not decayed inside the chunk",
        ),
    ],
    "mamba: _pass_on": [
        ("mamba.chunkwise", "decay * h + written", "h + written", "does not decay the state across a chunk"),
    ],
    "mamba: _run": [
        ("mamba.recurrent", "y + D * xs[2]", "y", "leaves out the term D u"),
    ],
    "short_conv: _convolve": [
        (
            "short_conv.causal_conv", "weight.to(dtype))", "weight.flip(1).to(dtype))",
            "applies the taps in reverse, the last one to the oldest token",
        ),
        ("short_conv.step", "[state.to(x.dtype).mT, x]", "[0 * state.to(x.dtype).mT, x]", "ignores the state"),
        ("short_conv.causal_conv", "y + bias.to(dtype)", "y", "leaves out the bias"),
        ("short_conv.causal_conv", "ACTIVATIONS[activation](y)", "y", "leaves out the activation"),
    ],
    "short_conv: _convolve_packed": [
        (
            "short_conv.causal_conv", "state.to(x.dtype).mT.flatten(0, 1)",
            "torch.cat([state[0].to(x.dtype).mT, x[0, (bounds[1:-1, None] - past + torch.arange(past)).clamp(0)].flatten(0, 1)])",
            "carries the state from one packed sequence into the next",
        ),
    ],
    "gates: mamba2_decay": [
        ("gates.mamba2_decay", "-A_log.exp() *", "A_log.exp() *", "has the wrong sign: g is positive"),
        ("gates.mamba2_decay", "-A_log.exp() *", "A_log *", "takes A_log itself for the rate"),
        (
            "gates.mamba2_decay", "F.softplus(x + dt_bias)", "F.softplus(x) + dt_bias",
            "adds the bias after the softplus",
        ),
    ],
    "gates: kda_decay": [
        ("gates.kda_decay", "F.softplus(x + dt_bias)", "F.softplus(x) + dt_bias", "adds the bias after the softplus"),
    ],
    "gates: kda_bounded_decay": [
        (
            "gates.kda_bounded_decay", "(A_log.exp()[:, None] * (x + dt_bias))", "(x + dt_bias)",
            "leaves out the steepness exp(A_log)",
        ),
    ],
    "gates: gla_decay": [
        ("gates.gla_decay", "_floating(x)) / tau", "_floating(x)) * tau", "multiplies by the temperature"),
        (
            "gates.gla_decay", "F.logsigmoid(_floating(x))", "torch.sigmoid(_floating(x))",
            "returns a decay factor instead of its logarithm",
        ),
        (
            "gates.gla_decay", "F.logsigmoid(_floating(x))", "torch.sigmoid(_floating(x)).log()",
            "takes the logarithm of a sigmoid that may have underflowed to 0",
        ),
    ],
    "gates: write_strength": [
        (
            "gates.write_strength", "torch.sigmoid(_floating(x))", "torch.sigmoid(_floating(x)) * 2",
            "is twice too large, in (0, 2)",
        ),
    ],
}

MUTANTS = tuple(Mutant(*place.split(": "), *row) for place, rows in TABLE.items() for row in rows)
