"""Note A: a Chinese introduction to linear attention, with two functions in PyTorch."""

import math

import torch

from book.errata import draw, erratum, tokens
from linattn_edu import algebra, decay, feature_maps, gla, linear, mamba, softmax
from linattn_edu.bench.measure import peak_bytes


def note_recurrent(Q, K, V):
    """What the note's recurrent listing computes."""
    q, k = feature_maps.elu1(Q), feature_maps.elu1(K)
    S, z = algebra.outer(k, V).cumsum(0), k.cumsum(0)
    return algebra.read(S, q) / ((q * z).sum(-1, keepdim=True) + 1e-6)


def note_parallel(Q, K, V):
    """What the note's parallel listing computes."""
    q, k = feature_maps.elu1(Q), feature_maps.elu1(K)
    return q @ (k.T @ V) / ((q @ k.sum(0))[:, None] + 1e-6)


@erratum("A", "130–151", "并行训练形式 …… 非因果，训练用", "the parallel form for training, not causal, used in training")
def the_parallel_listing_is_another_operator():
    """Its sums run over all tokens, those of the recurrent listing over the past. A decoder trained with it sees the future.

    The parallel form of the recurrence masks the scores, and costs $O(T^2)$; training in linear time takes the
    chunkwise form.
    """
    q, k, v = tokens(64, 16, 24)
    rows = [x[0, :, 0] for x in (q, k, v)]
    recurrent, parallel = note_recurrent(*rows), note_parallel(*rows)
    for form in (linear.recurrent, linear.parallel, linear.chunkwise):
        assert torch.allclose(form(q, k, v)[0][0, :, 0], recurrent)
    assert torch.allclose(linear.bidirectional(q, k, v)[0][0, :, 0], parallel)
    assert torch.allclose(recurrent[-1], parallel[-1])
    apart = (recurrent - parallel).abs().max()
    assert apart > 0.1
    return f"the two listings differ by up to {apart:.2f} and agree in the last row alone"


@erratum("A", "28–35", "如果去掉 softmax，矩阵乘法满足结合律", "without the softmax, the product of matrices is associative")
def with_a_mask_the_order_may_not_change():
    """True without a mask. A causal model has one, and the mask sits between the two products."""
    q, k, v = (x[0, :, 0] for x in tokens(32, 8, 12))
    assert torch.allclose((q @ k.T) @ v, q @ (k.T @ v))
    apart = ((q @ k.T).tril() @ v - q @ (k.T @ v)).abs().max()
    assert apart > 1
    return f"without the mask equal, with it {apart:.0f} apart"


@erratum("A", "65", "$S$ 和 $z$ 只需要计算一次，所有 token 共享", "S and z need computing only once, all tokens share them")
def a_causal_state_is_one_for_each_token():
    """True of the bidirectional operator. The causal one has its own $S_t$ and $z_t$ at every token."""
    q, k, v = tokens(32, 8, 12)
    _, (S_16, _) = linear.recurrent(*(x[:, :16] for x in (q, k, v)), output_final_state=True)
    _, (S_32, _) = linear.recurrent(q, k, v, output_final_state=True)
    change = ((S_32 - S_16).norm() / S_16.norm()).item()
    assert change > 0.5
    return f"from token 16 to token 32 the state changes by {change:.0%} of its norm"


@erratum("A", "45", r"$\text{softmax}(q \cdot k) \approx \phi(q) \cdot \phi(k)$", "softmax of one score is about the kernel")
def softmax_acts_on_a_row():
    r"""Softmax has no value for one score. It is $\exp(q^\top k / \sqrt{d})$ that the kernel replaces; both are then divided
    by the sum of their row."""
    q, k, _ = (x[0, :, 0] for x in tokens(64, 16, 24))
    sums = (feature_maps.elu1(q) @ feature_maps.elu1(k).T).sum(1)
    assert sums.min() > 100
    return f"rows of the kernel sum to {sums.mean():.0f}, not to 1, until they are divided"


def weights(q, k, feature_map=None):
    """Attention weights of every query over all keys: of a feature map, or of softmax."""
    scores = (q @ k.T / q.shape[-1] ** 0.5).exp() if feature_map is None else feature_map(q) @ feature_map(k).T
    return scores / scores.sum(-1, keepdim=True)


def entropy(P):
    return -(P * P.log()).sum(-1).mean().item()


@erratum("A", "3, 43", "用核函数近似替代 softmax", "a kernel function approximates softmax")
def elu1_is_another_kernel():
    r"""No finite $\phi$ has the kernel $\exp(q^\top k)$. ELU+1 defines another attention, and a flatter one."""
    q, k, _ = (x[0, :, 0] for x in tokens(64, 16, 24))
    exact, ours = weights(q, k), weights(q, k, feature_maps.elu1)
    distance = (exact - ours).abs().sum(-1).mean().item() / 2
    assert distance > 0.3 and entropy(ours) > entropy(exact)
    return (
        f"total variation to softmax {distance:.2f}; entropy of a row {entropy(ours):.2f} against softmax's "
        f"{entropy(exact):.2f}, at most {math.log(64):.2f}"
    )


@erratum("A", "50", r"$\phi(x) = e^x$（近似，但数值不稳定）", "an approximation, but numerically unstable")
def exp_by_channel_is_not_the_exponential_kernel():
    r"""Its kernel is $\sum_i e^{q_i + k_i}$, not $e^{q^\top k}$. As to stability: a maximum may be taken off each query, but
    off the keys only one constant that all of them share."""
    q, k, v = (x[0, :, 0] for x in tokens(16, 8, 4))
    kernel, exponential = (q[0].exp() @ k[0].exp()).item(), (q[0] @ k[0]).exp().item()
    assert abs(kernel / exponential - 1) > 0.5
    out = weights(q, k, feature_maps.exp) @ v
    by_query = weights(q - q.amax(1, keepdim=True), k, feature_maps.exp) @ v
    by_key = weights(q, k - 1, feature_maps.exp) @ v
    own = q.exp() @ (k - k.amax(1, keepdim=True)).exp().T
    assert torch.allclose(out, by_query) and torch.allclose(out, by_key)
    assert not torch.allclose(out, own / own.sum(-1, keepdim=True) @ v)
    return f"for one pair {kernel:.1f} against {exponential:.1f}; a maximum of its own for each key changes the output"


@erratum("A", "41", "直接去掉会导致数值不稳定、训练发散", "leaving it out makes training diverge", "B")
def without_a_normaliser_the_output_grows():
    """RetNet, Mamba-2, GLA and the delta family have no normaliser and train. What is true is that the size of an
    unnormalised sum grows with the text, which their output norm and their decay take care of."""
    sizes = []
    for T in (64, 1024, 16384):
        q, k, v = tokens(T, 16, 24)
        sizes.append(linear.chunkwise(q, k, v, feature_map="identity", normalize=False)[0][0, T // 2 :].abs().mean())
    assert sizes[0] < sizes[1] / 3 and sizes[1] < sizes[2] / 3
    return "mean output after 64, 1,024 and 16,384 tokens: " + ", ".join(f"{x:.1f}" for x in sizes)


@erratum("A", "80", "ELU + 1，保证输出非负", "guarantees an output that is not negative", "B")
def elu1_as_written_rounds_to_zero():
    """Positive on paper. Written as `F.elu(x) + 1` it is 0 in float32 below $x = -17.3$; the package writes $e^x$
    there. ReLU is 0 by design, and a row of zeros is then divided by zero."""
    x = torch.tensor(-20.0)
    assert torch.nn.functional.elu(x) + 1 == 0 < feature_maps.elu1(x)
    q, k, v = tokens(8, 4, 4)
    out, _ = linear.recurrent(-q.abs(), k, v, feature_map="relu", eps=0)
    assert out.isnan().all()
    return f"at -20 the listing gives 0, the package {feature_maps.elu1(x).item():.1e}; ReLU of a negative query gives NaN"


@erratum("A", "108", "标量，加 eps 防止除零", "an epsilon against division by zero", "B")
def the_epsilon_does_little():
    r"""The denominator grows like $t$, so $10^{-6}$ changes nothing in float32. In float16 it vanishes beside any
    denominator above 0.004."""
    q, k, v = (x.float() for x in tokens(64, 16, 24))
    change = (linear.recurrent(q, k, v, eps=1e-6)[0] - linear.recurrent(q, k, v, eps=0.0)[0]).abs().max().item()
    one = torch.tensor(1.0, dtype=torch.float16)
    assert change < 1e-6 and one + torch.tensor(1e-6, dtype=torch.float16) == one
    return f"over 64 tokens it moves no output by more than {change:.0e}; in float16, 1 + 1e-6 is 1"


@erratum("A", "32, 61, 94", "$d \\times d$", "the state is d by d", "B")
def the_state_has_the_width_of_features_and_values():
    r"""$S$ is $D \times V$: $D$ the width of the feature map, $V$ that of the values. The listing fails where they differ."""
    q, k, v = tokens(4, 8, 12)
    _, (S, z) = linear.recurrent(q, k, v, output_final_state=True)
    assert S.shape[-2:] == (8, 12) and z.shape[-1] == 8
    try:
        torch.zeros(8, 8) + torch.outer(torch.ones(8), torch.ones(12))
    except RuntimeError:
        return f"with K = 8 and V = 12 the state is {tuple(S.shape[-2:])}; adding to zeros(d, d) raises"
    raise AssertionError("adding a matrix of another shape went through")


@erratum("A", "94", "`S = torch.zeros(d, d)`", "the state of the listing", "B")
def the_state_needs_the_inputs_device_and_a_wide_dtype():
    """`torch.zeros(d, d)` is float32 on the CPU, wherever Q is. The package keeps the state on the device of `q`, in
    float32 for every narrower dtype and in float64 for float64."""
    dtypes = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        _, (S, _) = linear.recurrent(*(x.to(dtype) for x in tokens(4, 8, 8)), output_final_state=True)
        dtypes[dtype] = S.dtype
    assert list(dtypes.values()) == [torch.float32, torch.float32, torch.float64]
    return "states of bfloat16, float32 and float64 inputs: " + ", ".join(str(x).split(".")[1] for x in dtypes.values())


@erratum("A", "13–16", "需要 $O(N^2)$ 时间和空间", "needs time and space of order N squared", "B")
def the_map_need_not_be_kept():
    """Time is $O(N^2 d)$. The memory is quadratic only if the map is written down; FlashAttention never does, nor does the
    package's blockwise form."""
    q, k, v = (x.float() for x in tokens(2048, 16, 16))
    whole = peak_bytes(lambda: softmax.parallel(q, k, v))
    blocks = peak_bytes(lambda: softmax.chunkwise(q, k, v))
    assert whole > 2048**2 * 4 > 4 * blocks
    return f"2,048 tokens: {whole / 2**20:.0f} MiB with the map, {blocks / 2**20:.1f} MiB in blocks"


@erratum("A", "16", "（如 100K token）几乎不可能用标准 Attention", "100K tokens are almost impossible with standard attention", "B")
def long_texts_are_a_matter_of_the_map():
    """A map of 100,000 tokens in 16 bits is 18.6 GiB a head, which is why nobody forms it. Exact attention over 128K
    tokens and more is common practice."""
    map_bytes = 100_000**2 * 2
    assert round(map_bytes / 2**30, 1) == 18.6
    return f"100,000 tokens squared, 2 bytes each: {map_bytes / 2**30:.1f} GiB"


@erratum("A", "37", "$O(Nd^2)$ 远小于 $O(N^2 d)$", "is far smaller", "B")
def fewer_operations_are_not_yet_less_time():
    """In multiplications the causal forms cross at $T = 2d - 1$ tokens. On the clock they cross later, since a matrix
    product is the fastest thing that a processor does: see the recorded sweep of chapter 3."""
    for d in (64, 128):
        exact = lambda T: T * (T + 1) // 2 * 2 * d
        recurrent = lambda T: T * 2 * d * d
        crossing = next(T for T in range(1, 1000) if exact(T) >= recurrent(T))
        assert crossing == 2 * d - 1
    return "multiplications are equal at T = 127 for d = 64, at T = 255 for d = 128"


@erratum("A", "125–128", "和 RNN 的结构完全一样", "exactly the structure of an RNN", "B")
def it_is_a_linear_rnn():
    """Of an RNN without a non-linearity on the state. That is what lets the steps be regrouped into chunks; the classical
    $h_t = f(h_{t-1}, x_t)$ cannot be."""
    q, k, v = tokens(16, 8, 8)
    options = dict(feature_map="identity", normalize=False, output_final_state=True)
    S = draw(1, 1, 8, 8, seed=9)
    _, with_state = linear.recurrent(q, k, v, initial_state=S, **options)
    _, without = linear.recurrent(q, k, v, **options)
    assert torch.allclose(with_state, without + S)
    return "the last state from S is the last state from 0, plus S: the update is linear in the state"


@erratum("A", "121–123, 154–157", '`print("no nan:", …)`', "the listing's verification prints a shape and that there is no NaN", "B")
def no_nan_verifies_nothing():
    """Both listings pass this verification, and they compute different things. A test states an equality: one form is the
    other, for outputs, states and gradients."""
    rows = [x[0, :, 0] for x in tokens(8, 16, 16)]
    outputs = [f(*rows) for f in (note_recurrent, note_parallel)]
    assert all(o.shape == (8, 16) and not o.isnan().any() for o in outputs) and not torch.allclose(*outputs)
    return f"both have shape (8, 16) and no NaN; they are {(outputs[0] - outputs[1]).abs().max():.2f} apart"


@erratum("A", "163", "核函数近似做不到这一点", "a kernel cannot produce sharp weights", "B")
def sharpness_depends_on_the_feature_map():
    """ELU+1 cannot; it is a property of that map, not of kernels. A steep feature map has sharp rows: what bounds them is
    its width $D$."""
    q, _, _ = (x[0, :, 0] for x in tokens(8, 16, 16))
    sharp = lambda x: torch.softmax(8 * x, -1)
    flat, steep = (entropy(weights(q, q, f).clamp(min=1e-30)) for f in (feature_maps.elu1, sharp))
    assert steep < flat / 2
    return f"entropy of a row over 8 tokens: ELU+1 {flat:.2f}, softmax of 8x as features {steep:.2f}, at most {math.log(8):.2f}"


@erratum("A", "167–169", "远距离依赖容易被“遗忘”（和 RNN 的梯度消失类似）", "distant dependencies are forgotten, as by vanishing gradients")
def the_sum_forgets_nothing():
    """The transition is the identity: nothing decays, no gradient vanishes, and the order of the past does not even matter.
    What fails is telling the writes apart, *interference*: up to $K$ orthogonal keys are read back exactly, more are not."""
    q, k, v = tokens(64, 16, 24)
    shuffled = torch.cat([torch.randperm(63, generator=torch.Generator().manual_seed(1)), torch.tensor([63])])
    last = lambda q, k, v: linear.recurrent(q, k, v)[0][0, -1]
    assert torch.allclose(last(q, k, v), last(*(x[:, shuffled] for x in (q, k, v))))

    def error(N, orthogonal):
        keys = draw(N, 64, seed=1)
        keys = torch.linalg.qr(keys.T)[0].T if orthogonal else keys / keys.norm(dim=-1, keepdim=True)
        values = draw(N, 32, seed=2)
        return ((keys @ (keys.T @ values) - values).norm() / values.norm()).item()

    assert error(64, True) < 1e-10 < 0.8 < error(64, False) < error(512, False)
    return (
        f"64 orthogonal keys of 64 channels: error 0; 64 random keys {error(64, False):.2f}, 512 of them {error(512, False):.1f}"
    )


@erratum("A", "177", "缓解“遗忘”问题", "decay relieves the forgetting")
def decay_is_what_forgets():
    r"""Decay *introduces* forgetting: a write is worth $\gamma^n$ after $n$ tokens. What it relieves is interference, and it
    tells near from far."""
    half_lives = math.log(0.5) / decay.retnet_log_decay(8).double()
    q, k, v = tokens(1, 8, 8)
    g = decay.retnet_log_decay(1).double()
    zero = [torch.cat([x, torch.zeros(1, 9, *x.shape[2:], dtype=x.dtype)], 1) for x in (q, k, v)]
    _, S = decay.recurrent(*zero, g=g, output_final_state=True)
    assert torch.allclose(S[0, 0], algebra.outer(k, v)[0, 0, 0] * (9 * g).exp())
    return f"half-lives of RetNet's eight heads: {half_lives[0]:.1f} to {half_lives[-1]:,.0f} tokens"


@erratum("A", "179", r"$S_t = \gamma \cdot S_{t-1} + \phi(k_t) v_t^T$", "RetNet with a feature map")
def retnet_has_no_feature_map():
    r"""RetNet's keys enter as they are, with a rotation (xPos), a decay $\gamma_h = 1 - 2^{-5-h}$ of its own for each head,
    a group norm and a gate on the output."""
    q, k, v = tokens(48, 8, 12)
    g = decay.retnet_log_decay(1).double()
    outputs = [form(q, k, v, g=g)[0] for form in (decay.recurrent, decay.parallel, decay.chunkwise)]
    assert all(torch.allclose(o, outputs[0]) for o in outputs)
    gammas = decay.retnet_log_decay(8).double().exp()
    assert torch.allclose(gammas, 1 - 2.0 ** -(5 + torch.arange(8, dtype=torch.float64)))
    return f"gammas {gammas[0]:.5f} to {gammas[-1]:.5f}; the three forms without a feature map agree"


@erratum("A", "181", "类似 LSTM 的遗忘门", "like the forget gate of an LSTM", "B")
def retnets_decay_does_not_look_at_the_data():
    """An LSTM's gate is computed from the input. RetNet's is a constant of its head; Mamba-2, GLA and Gated DeltaNet have
    gates that look."""
    q, k, v = tokens(16, 8, 8)
    g = decay.retnet_log_decay(1).double()
    D = lambda q, k: decay.recurrent(q, k, v, g=g, output_final_state=True)[1]
    twice = D(q, 2 * k) / D(q, k)
    assert torch.allclose(twice, torch.full_like(twice, 2))
    return "other keys, same decay: doubling every key doubles the state, whatever the tokens are"


@erratum("A", "185", "不用核函数近似，而是用 …… SSM …… 推理速度接近 RNN", "Mamba uses no kernel but a state space model; it is close to an RNN", "B")
def mamba_is_an_rnn():
    r"""At inference it is one: $h_t = e^{\Delta_t A} \odot h_{t-1} + \Delta_t u_t B_t$, a recurrence whose $\Delta$, $B$ and
    $C$ are computed from the token."""
    u, delta, B, C = draw(1, 6, 4, seed=1), draw(1, 6, 4, seed=2).exp(), draw(1, 6, 3, seed=3), draw(1, 6, 3, seed=4)
    A = -draw(4, 3, seed=5).exp()
    o, _ = mamba.parallel(u, delta, A, B, C)
    h = torch.zeros(1, 4, 3, dtype=torch.float64)
    for t in range(6):
        o_t, h = mamba.step(u[:, t], delta[:, t], A, B[:, t], C[:, t], h)
        assert torch.allclose(o_t, o[:, t])
    return "six steps of the recurrence give the six outputs of the parallel scan"


@erratum("A", "191–193", r"$S_t = G_t \odot S_{t-1} + \phi(k_t) v_t^T$ …… 门控矩阵", "GLA with a full matrix of gates and a feature map")
def glas_gate_is_one_number_a_row():
    r"""A gate for every entry would be $K V$ numbers a token. GLA's is $\alpha_t 1^\top$, so that
    $G_t \odot S = \mathrm{Diag}(\alpha_t) S$, with $\alpha_t = \sigma(\cdot)^{1/16}$ and no feature map. It appeared in 2023."""
    q, k, v = tokens(1, 8, 12)
    S, g = draw(1, 1, 8, 12, seed=8), -draw(1, 1, 1, 8, seed=9).exp()
    _, after = gla.recurrent(q, k, v, g=g, initial_state=S, output_final_state=True)
    G = g.exp()[0, 0, 0][:, None].expand(8, 12)
    assert torch.allclose(after[0, 0], G * S[0, 0] + torch.outer(k[0, 0, 0], v[0, 0, 0]))
    return "the update with a gate of 8 numbers is the one with its 8 x 12 matrix"


@erratum("A", "197", "KV Cache …… 固定是 $d \\times d$ 的矩阵", "the KV cache is a fixed d by d matrix", "B")
def a_state_is_no_cache_and_not_always_smaller():
    """It is a recurrent state: sums, from which no token can be taken out again. It is as large as a cache of $d/2$ tokens
    (as many numbers), and a hybrid model still keeps a cache in some layers."""
    for d in (64, 128):
        assert d * d == 2 * d * (d // 2)
    return "equal at 32 tokens for d = 64, at 64 tokens for d = 128"


@erratum("A", "3", "天然支持无限长序列", "supports infinitely long sequences by nature", "B")
def constant_memory_is_not_unlimited_memory():
    """Constant memory, yes. What it can tell apart is bounded: the error of reading one key back grows with the number of
    keys written."""
    d, errors = 32, []
    for N in (8, 32, 128):
        keys = torch.nn.functional.normalize(draw(N, d, seed=1), dim=-1)
        values = draw(N, 32, seed=2)
        errors.append(((keys @ (keys.T @ values) - values).square().sum() / values.square().sum()).item())
    assert errors[0] < errors[1] / 2 < errors[2] / 4
    return "squared error with 8, 32 and 128 keys in 32 channels: " + ", ".join(f"{x:.2f}" for x in errors)
