"""Note B: an overview in Chinese, from linear attention to Qwen3-Next and Kimi Linear."""

import torch
import torch.nn.functional as F

from book.errata import draw, erratum, tokens
from linattn_edu import algebra, decay, deltanet, gated_deltanet, gates, kda, linear, mamba, short_conv


def unit(*shape, seed=0):
    return F.normalize(draw(*shape, seed=seed), dim=-1)


def householder(k, beta):
    """The erasing factor I - beta k k^T."""
    return torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)


def shape_error(f):
    """Does f fail since shapes do not fit?"""
    try:
        f()
    except RuntimeError:
        return True
    return False


@erratum("B", "13", "每一步推理关于序列长度的复杂度变为了 $O(n)$", "each step of inference costs O(n)")
def a_step_costs_the_same_at_any_length():
    """$O(KV)$ a step, whatever $n$ is; $O(n)$ is the whole text. With a cache, softmax attention costs $O(n)$ a step."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(T):
        _, S = linear.chunkwise(*tokens(T, 8, 8), output_final_state=True)
        with FlopCounterMode(display=False) as counter:
            linear.step(*(x[:, 0] for x in tokens(1, 8, 8)), S)
        return counter.get_total_flops()

    assert flops(16) == flops(4096) > 0
    return f"{flops(16)} FLOPs of products in the step after 16 tokens, {flops(4096)} after 4,096"


@erratum("B", "14", "训练时，可以将其改写为卷积形式 …… 使用FFT", "for training it can be rewritten as a convolution, by FFT")
def only_a_constant_decay_is_a_convolution():
    r"""With one constant $\gamma$ the states are a convolution of $k_t v_t^\top$ with $\gamma^n$, at the price of
    $T K V$ numbers. A gate that looks at the token has no kernel in $t - i$. Training is chunkwise."""
    q, k, v = tokens(64, 8, 8)
    constant = torch.tensor([-0.1], dtype=torch.float64)
    assert torch.allclose(decay.convolution(q, k, v, g=constant)[0], decay.recurrent(q, k, v, g=constant)[0])
    g = -draw(1, 64, 1, seed=7).abs()
    D = algebra.decay_matrix(g[0, :, 0])
    lag_2 = torch.stack([D[5, 3], D[9, 7]])
    assert not torch.isclose(*lag_2)
    return f"with a gate, what is left after two tokens is {lag_2[0]:.2f} at one place and {lag_2[1]:.2f} at another"


@erratum("B", "41", r"$S_t=S_{t-1}(\alpha_t(I-\beta_t k_tk_t^T)+\beta_t v_tk_t^T$", "Gated DeltaNet, a parenthesis short")
def the_parenthesis_closes_before_the_write():
    r"""$S_{t-1}\bigl(\alpha_t (I - \beta_t k_t k_t^\top)\bigr) + \beta_t v_t k_t^\top$, in the note's letters. Closed at the
    end, the write would be multiplied by the state."""
    k, v, S = unit(8, seed=1), draw(12, seed=2), draw(12, 8, seed=3)
    assert shape_error(lambda: S @ (0.9 * householder(k, 0.5) + 0.5 * torch.outer(v, k)))
    right = S @ (0.9 * householder(k, 0.5)) + 0.5 * torch.outer(v, k)
    one = lambda x: x[None, None, None]
    gate = torch.full((1, 1, 1), 0.9, dtype=torch.float64)
    _, ours = gated_deltanet.recurrent(
        one(k), one(k), one(v), g=gate.log(), beta=0 * gate + 0.5, initial_state=S.T[None, None], output_final_state=True
    )
    assert torch.allclose(ours[0, 0].T, right)
    return "closed at the end, 8 key and 12 value channels do not fit; closed before the write it is the package's update"


@erratum("B", "60–61", r"$S_t=(I-\beta_t k_tk_t^T)\,\mathrm{Diag}(\alpha_t)S_{t-1}+\beta_t v_tk_t^T$", "KDA with the write of the other convention")
def a_left_transition_needs_the_write_k_v():
    r"""A transition from the left acts on $S \in \mathbb{R}^{K \times V}$; its write is $\beta_t k_t v_t^\top$ and its read
    $S_t^\top q_t$. The note changes sides in the middle. With $K = V$ nothing raises, and the memory recalls wrongly."""
    keys, values = unit(8, 16, seed=1), draw(8, 16, seed=2)
    ours = theirs = torch.zeros(16, 16, dtype=torch.float64)
    for k, v in zip(keys, values):
        ours = householder(k, 1.0) @ ours + torch.outer(k, v)
        theirs = householder(k, 1.0) @ theirs + torch.outer(v, k)
    assert shape_error(lambda: householder(keys[0], 1.0) @ draw(16, 12) + torch.outer(draw(12), keys[0]))
    assert torch.allclose(ours.T @ keys[-1], values[-1])
    error = min((theirs @ keys[-1] - values[-1]).norm(), (theirs.T @ keys[-1] - values[-1]).norm()) / values[-1].norm()
    assert error > 0.3
    return f"the last value is recalled exactly by k v^T, with an error of {error:.0%} by v k^T"


@erratum("B", "11–43, 60–61", "$y_t=S_tq_t$ …… $(I-\\beta_t k_tk_t^T)\\,S_{t-1}$", "two conventions in one note")
def the_two_conventions_are_transposes():
    r"""$S \in \mathbb{R}^{V \times K}$ with products from the right, or $S \in \mathbb{R}^{K \times V}$ with products from the left:
    transposes of each other, and not to be mixed. This book has the second."""
    k, v, S = unit(8, seed=1), draw(12, seed=2), draw(8, 12, seed=3)
    ours = householder(k, 0.5) @ S + 0.5 * torch.outer(k, v)
    theirs = S.T @ householder(k, 0.5) + 0.5 * torch.outer(v, k)
    assert torch.allclose(ours, theirs.T)
    return "one update in both conventions: equal up to the transpose"


@erratum("B", "22", "本质上也是一种data dependent decay", "in essence also a data-dependent decay")
def the_delta_rule_does_not_decay():
    r"""$I - \beta k k^\top$ has the eigenvalue $1 - \beta$ once, along $k$, and 1 everywhere else: it erases at one address and
    forgets nothing else. That gap is why Gated DeltaNet exists."""
    values = torch.linalg.eigvalsh(householder(unit(16, seed=1), 0.7))
    assert torch.allclose(values[0], torch.tensor(0.3, dtype=torch.float64)) and torch.allclose(values[1:], torch.ones_like(values[1:]))
    return f"eigenvalues for beta = 0.7 and 16 channels: {values[0]:.1f} once, {values[-1]:.1f} fifteen times"


@erratum("B", "24", "$q_t=W_Qx_t$ …… $k_t=W_Kx_t$", "queries and keys are bare projections")
def keys_of_the_delta_rule_have_unit_length():
    r"""DeltaNet's queries and keys pass a short convolution, SiLU and an L2 norm. Without the norm the eigenvalue
    $1 - \beta \lVert k \rVert^2$ lies below $-1$ for any key of some length, and the state explodes."""
    k = draw(1, 64, 1, 64, seed=1)
    lowest = torch.linalg.eigvalsh(householder(k[0, 0, 0], 0.5))[0].item()
    v, beta = draw(1, 64, 1, 8, seed=2), torch.full((1, 64, 1), 0.5, dtype=torch.float64)
    raw, normed = (deltanet.recurrent(x, x, v, beta=beta, output_final_state=True)[1].norm() for x in (k, F.normalize(k, dim=-1)))
    assert lowest < -1 and raw > 1e20 > 100 > normed
    return f"eigenvalue {lowest:.0f}; after 64 tokens the norm of the state is {raw:.0e}, with unit keys {normed:.0f}"


@erratum("B", "27–28", "擦除旧信息 …… 并写入当前信息", "the old value is erased, the new one written", "B")
def the_exchange_is_exact_for_unit_keys_only():
    r"""Reading the key just written gives $v^{new}$ only if $\lVert k_t \rVert = 1$."""
    S, k, v, beta = draw(16, 12, seed=1), unit(16, seed=2), draw(12, seed=3), 0.5

    def miss(k):
        new = beta * v + (1 - beta) * S.T @ k
        after = S + torch.outer(k, new - S.T @ k)
        return ((after.T @ k - new).norm() / new.norm()).item()

    assert miss(k) < 1e-12 and miss(3 * k) > 1
    return f"relative miss with a unit key {miss(k):.0e}, with a key of length 3 it is {miss(3 * k):.1f}"


@erratum("B", "39", "也是由$h_t$线性变换而来", "the decay is a linear map of the hidden state")
def a_gate_is_a_map_into_the_unit_interval():
    r"""A linear map can be negative or above 1. The decay is $\exp\bigl(-e^{A} \operatorname{softplus}(w^\top x_t + b)\bigr)$,
    which cannot."""
    x = 4 * draw(1, 256, 2, seed=1)
    alpha = gates.mamba2_decay(x, draw(2, seed=2), draw(2, seed=3)).exp()
    assert alpha.min() > 0 and alpha.max() <= 1 and x.min() < 0 and x.max() > 1
    return f"projections from {x.min():.0f} to {x.max():.0f}, decays from {alpha.min():.1e} to {alpha.max():.4f}"


@erratum("B", "42", r"$S_t=\alpha_t S_{t-1}+v_tk_t^T$", "Mamba-2's update", "B")
def mamba2_scales_what_it_writes():
    r"""One step size does both: $\alpha_t = e^{\Delta_t A}$, and the write is $\Delta_t\, B_t x_t^\top$. The gate and the write
    strength are tied."""
    u, delta, B, C = draw(1, 8, 1, seed=1), draw(1, 8, 1, seed=2).exp(), draw(1, 8, 4, seed=3), draw(1, 8, 4, seed=4)
    A = -torch.ones(1, 4, dtype=torch.float64)
    expected, _ = mamba.recurrent(u, delta, A, B, C)
    heads = [x[:, :, None] for x in (C, B, delta * u)]
    tied, _ = decay.recurrent(*heads, g=-delta, scale=1.0)
    free, _ = decay.recurrent(*heads[:2], u[:, :, None], g=-delta, scale=1.0)
    assert torch.allclose(tied[:, :, 0], expected) and not torch.allclose(free[:, :, 0], expected)
    return "with delta in the write, decay.recurrent is Mamba's scan with one shared rate; without, it is not"


@erratum("B", "53", "二者本质上可以融合成一个矩阵", "the value and output projections can be merged into one matrix", "B")
def merged_projections_have_low_rank():
    """Within a head, yes, into a matrix of rank $d_v$. That bottleneck is what a non-linearity between them lifts."""
    W_v, W_o = draw(64, 8, seed=1), draw(8, 64, seed=2)
    rank = torch.linalg.matrix_rank(W_v @ W_o).item()
    assert rank == 8
    return f"a 64 x 64 product through a head of 8 channels has rank {rank}"


@erratum("B", "7", r"$Softmax(QK^T)V\approx\phi(Q)(\phi(K)^TV)$", "softmax attention is about the unnormalised kernel form", "B")
def the_denominator_is_missing():
    r"""The kernel form is divided by $\phi(Q)\,\phi(K)^\top 1$, and it is another attention, not an approximation."""
    q, k, v = tokens(32, 8, 1)
    ones = torch.ones_like(v)
    with_it, _ = linear.bidirectional(q, k, ones)
    without, _ = linear.bidirectional(q, k, ones, normalize=False)
    assert torch.allclose(with_it, ones, atol=1e-6) and without.mean() > 10
    return f"if every value is 1 the output has to be 1: with the denominator it is, without it the mean is {without.mean():.0f}"


@erratum("B", "3, 8", "本质原因在于 …… softmax迫使必须先算QK", "the deeper reason is that softmax forces the order", "B")
def two_things_forbid_the_other_order():
    r"""The exponential kernel has no finite feature map, and a causal mask forbids the other order even for a kernel that has
    one. With a cache, decoding a token costs $O(n)$, not $O(n^2)$."""
    rank = lambda x: torch.linalg.matrix_rank(x).item()
    q, k, _ = (x[0, :, 0] for x in tokens(64, 4, 4))
    scores = q @ k.T
    assert rank(scores) == 4 < rank(scores.exp()) and rank(scores.tril()) == 64
    return f"rank of 64 x 64 scores with 4 channels: {rank(scores)}; of their exponential {rank(scores.exp())}; under the mask {rank(scores.tril())}"


@erratum("B", "11", "通过线性操作的交换律和结合律", "by commutativity and associativity of linear operations", "B")
def matrices_do_not_commute():
    r"""A scalar $k_i^\top q_t$ may change places with a vector, and products may be regrouped. That is all; matrices do not
    commute."""
    q, k, v = draw(8, seed=1), draw(8, seed=2), draw(12, seed=3)
    assert torch.allclose((k @ q) * v, torch.outer(v, k) @ q)
    A, B = draw(8, 8, seed=4), draw(8, 8, seed=5)
    assert not torch.allclose(A @ B, B @ A)
    return "the scalar moves, two random matrices do not"


@erratum("B", "33–34", "最近的$N$个tokens …… $\\sum_{\\tau} w_\\tau\\cdot q_{t-\\tau}$", "the short convolution", "B")
def the_short_convolution_in_full():
    r"""One weight a *channel* and tap, $w_\tau \odot q_{t-\tau}$, then SiLU; a window of $W$ tokens remembers $W - 1$. PyTorch
    and checkpoints store the taps in the order of time, so that the token's own tap is the last."""
    x, w = draw(1, 16, 3, seed=1), draw(3, 4, seed=2)
    torchs = F.conv1d(F.pad(x.mT, (3, 0)), w[:, None], groups=3).mT
    ours, state = short_conv.causal_conv(x, w, output_final_state=True)
    by_lag = sum(w[:, lag] * F.pad(x, (0, 0, lag, 0))[:, :16] for lag in range(4))
    assert torch.allclose(ours, torchs) and not torch.allclose(by_lag, torchs) and state.shape[-1] == 3
    return f"4 taps keep {state.shape[-1]} inputs; the note's order of taps differs from Conv1d's by {(by_lag - torchs).abs().max():.1f}"


@erratum("B", "31", "depthwise-separable short convolution", "depthwise-separable", "B")
def the_convolution_is_depthwise():
    """Depthwise, and causal. *Separable* would add a product over channels, which here the projection before it does."""
    x, w = draw(1, 16, 3, seed=1), draw(3, 4, seed=2)
    other = x.clone()
    other[..., 1:] += 1
    assert torch.equal(short_conv.causal_conv(x, w)[0][..., 0], short_conv.causal_conv(other, w)[0][..., 0])
    return "changing channels 1 and 2 leaves channel 0 of the output as it is"


@erratum("B", "16", "RoPE等位置编码都带有远程衰减属性", "position codes as RoPE carry a decay with distance", "B")
def ropes_scores_go_up_and_down():
    """An upper bound of the score falls with the distance; the score itself does not. xPos, as in RetNet, adds a decay."""
    theta = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    score = 2 * torch.cos(torch.arange(4000)[:, None] * theta).sum(-1)
    rising = (score.diff() > 0).double().mean().item()
    assert 0.3 < rising < 0.7
    return f"for q = k over 4,000 distances the score rises in {rising:.0%} of the steps"


@erratum("B", "17–19", r"$S_t=\gamma_t S_{t-1}+v_tk_t^T$", "decays are multiplied up", "B")
def decays_are_summed_as_logarithms():
    """A running product of decays underflows. Sum their logarithms in float32, and exponentiate differences."""
    gamma = torch.full((20000,), 0.99)
    product, logs = gamma.cumprod(0), gamma.log().cumsum(0)
    between = (logs[-1] - logs[-2]).exp()
    assert product[-1] == product[-2] == 0 and torch.isclose(between, torch.tensor(0.99), rtol=1e-3)
    return f"0.99 to the 20,000th is {product[-1]:.0f} in float32, and 0 / 0 its last ratio; from the logarithms it is {between:.3f}"


@erratum("B", "60–61", r"$(I-\beta_t k_tk_t^T)\,\mathrm{Diag}(\alpha_t)$", "the order of erasing and decaying is not discussed", "B")
def decay_first_then_erase():
    r"""A scalar gate commutes with the erasing factor, $\mathrm{Diag}(\alpha_t)$ does not. KDA decays first."""
    k, v, S, alpha = unit(8, seed=1), draw(12, seed=2), draw(8, 12, seed=3), torch.sigmoid(draw(8, seed=4))
    one = lambda x: x[None, None, None]
    beta = torch.full((1, 1, 1), 0.5, dtype=torch.float64)
    _, ours = kda.recurrent(
        one(k), one(k), one(v), g=one(alpha.log()), beta=beta, initial_state=S[None, None], output_final_state=True
    )
    write = 0.5 * torch.outer(k, v)
    decay_first = householder(k, 0.5) @ (alpha[:, None] * S) + write
    erase_first = alpha[:, None] * (householder(k, 0.5) @ S) + write
    assert torch.allclose(ours[0, 0], decay_first) and not torch.allclose(decay_first, erase_first)
    return f"the two orders differ by {(decay_first - erase_first).norm() / decay_first.norm():.1%}; decay first is KDA"


@erratum("B", "62", "（KDA）和full attention（MLA）比例为3:1", "KDA and full attention (MLA) in a ratio of 3 to 1", "B")
def kimi_linear_has_seven_attention_layers():
    """The released model has 27 layers, 20 of KDA and 7 of MLA, the last one MLA. Beside the ratio: MLA has no position
    code, KDA low-rank gates and an output gate, and the first layer a dense feed-forward block."""
    attention = sorted({*range(4, 28, 4), 27})
    assert len(attention) == 7 and 27 - len(attention) == 20
    return f"MLA in layers {', '.join(map(str, attention))} of 27: {20 / 7:.2f} to 1"


@erratum("B", "44–46", "cache（状态矩阵）大小一直不变", "the cache keeps its size", "B")
def the_hybrids_cache_grows_in_a_quarter_of_its_layers():
    """Of the 36 linear layers, yes; each keeps a convolution state beside its matrix. The 12 layers of attention go on
    growing with the text."""
    growth = 12 * 2 * 2 * 256 * 2
    assert growth == 24 * 1024
    return f"12 layers, keys and values, 2 heads of 256 channels, 2 bytes: {growth // 1024} KiB more with every token"


@erratum("B", "52–56", "筛掉了不重要的tokens", "the gate sifts out unimportant tokens, hence no sink", "B")
def a_gate_scales_a_heads_output():
    """Softmax weights sum to 1, so a head that has nothing to say needs a token to look at. A gate on the head's output lets
    it say nothing: it acts on the *output of a query*, and no token is sifted out."""
    P = torch.softmax(draw(4, 6, seed=1), -1)
    v, gate = draw(6, 3, seed=2), torch.sigmoid(draw(4, 3, seed=3) - 8)
    assert torch.allclose(P.sum(-1), torch.ones(4, dtype=torch.float64)) and (gate * (P @ v)).abs().max() < 0.01
    return f"weights sum to 1, the gated output is at most {(gate * (P @ v)).abs().max():.0e}"
