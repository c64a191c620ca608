"""Note C: a Chinese article on the practice of linear attention, with a class in PyTorch."""

import math

import torch
import torch.nn.functional as F

from book.errata import draw, erratum, tokens
from linattn_edu import feature_maps, linear
from linattn_edu.bench.measure import peak_bytes


def note_forward(Q, K, V, chunk_size=256):
    """What the note's class computes after its projections, `[B, T, D]` each."""
    Q, K = feature_maps.elu1(Q), feature_maps.elu1(K)
    pieces = [q @ (K.mT @ V) for q in Q.split(chunk_size, 1)]
    return torch.cat(pieces, 1) / Q.shape[-1] ** 0.5


@erratum("C", "15", "n=4096 …… 这个矩阵将消耗16GB内存", "the map of 4,096 tokens takes 16 GB in float32")
def a_map_of_4096_tokens_is_64_mebibytes():
    """It takes 64 MiB, for one head and one text. 16 GiB is 256 such maps, or one of 65,536 tokens."""
    size = torch.empty(4096, 4096, device="meta").nbytes
    assert size == 64 * 2**20 and 256 * size == 16 * 2**30 == 65536**2 * 4
    return f"4,096 squared, 4 bytes each: {size / 2**20:.0f} MiB"


@erratum("C", "33–34", "4.2GB …… 0.8GB，节省76%", "4.2 GB against 0.8 GB saves 76 %")
def from_4_2_to_0_8_is_81_percent():
    """81 %, by the note's own numbers."""
    saved = (4.2 - 0.8) / 4.2
    assert round(saved, 2) == 0.81
    return f"(4.2 - 0.8) / 4.2 = {saved:.1%}"


@erratum("C", "33", "n=1024时需要4.2GB显存", "1,024 tokens need 4.2 GB")
def a_map_of_1024_tokens_is_4_megabytes():
    """Without batch, heads and dtype the figure cannot be tested. One map of 1,024 tokens in float32 is 4.2 *MB*."""
    size = torch.empty(1024, 1024, device="meta").nbytes
    assert round(size / 1e6, 1) == 4.2
    return f"one map {size / 1e6:.1f} MB; 4.2 GB would be {4.2e9 / size:,.0f} of them"


@erratum("C", "68–71", "`for i in range(0, seq_len, chunk_size): … KV = torch.einsum(…)`", "the state of all tokens, computed anew in every chunk")
def the_class_is_quadratic():
    """The loop computes $K^\\top V$ of the *whole* text once a chunk, so the work grows with the square of the length that
    was to be avoided."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(T):
        x = torch.empty(1, T, 64, device="meta")
        with FlopCounterMode(display=False) as counter:
            note_forward(x, x, x)
        return counter.get_total_flops()

    ratio = flops(32768) / flops(16384)
    assert ratio > 3.9
    return f"twice the tokens, {ratio:.2f} times the FLOPs"


@erratum("C", "51–73", "`class LinearAttention`", "the class, for generation and long texts")
def the_class_sees_the_future():
    """It is bidirectional. A model that generates needs the causal form, in chunks that hand on their state."""
    q, k, v = (x[:, :, 0] for x in tokens(64, 8, 8))
    changed = v.clone()
    changed[:, -1] += 1
    moved = (note_forward(q, k, changed) - note_forward(q, k, v))[:, 0].abs().max()
    causal = [linear.chunkwise(*(x[:, :, None] for x in (q, k, y)))[0][:, 0] for y in (v, changed)]
    assert moved > 0.1 and torch.equal(*causal)
    return f"another last token moves the first output by {moved:.1f}; the causal form's does not move"


@erratum("C", "71–73", "`return output / self.d**0.5`", "the output is divided by the root of d")
def the_class_has_no_normaliser():
    r"""What is missing is the denominator $\phi(q)^\top \sum_j \phi(k_j)$. Without it the output grows with the text:
    writing the text twice doubles it."""
    q, k, v = (x[:, :, 0] for x in tokens(64, 8, 8))
    twice = [torch.cat([x, x], 1) for x in (q, k, v)]
    assert torch.allclose(note_forward(*twice)[:, :64], 2 * note_forward(q, k, v))
    normalised = [linear.bidirectional(*(x[:, :, None] for x in xs))[0][:, :64] for xs in ((q, k, v), twice)]
    assert torch.allclose(*normalised, atol=1e-6)
    return "the text twice: the class's output doubles, the normalised one stays"


@erratum("C", "49", "传统实现容易产生中间大矩阵，正确做法应采用分块计算", "chunks avoid large intermediates")
def chunks_serve_the_causal_form():
    """The bidirectional form has no large intermediate: $K^\\top V$ is $D \\times V$. Chunks are for the causal form, which
    would otherwise hold a state for every token."""
    q, k, v = (x.float() for x in tokens(4096, 16, 16))
    one = [x[:, :, 0] for x in (q, k, v)]
    chunks, whole = (peak_bytes(lambda: note_forward(*one, chunk_size=size)) for size in (256, 4096))
    assert chunks > 0.9 * whole
    return f"peak over 4,096 tokens: {chunks / 2**20:.2f} MiB in chunks, {whole / 2**20:.2f} MiB in one piece"


@erratum("C", "51–57", "`self.proj_q = nn.Linear(d_model, d_model)`", "one head of the width of the model", "B")
def heads_make_the_state_small():
    """One head of width $d$ has a state of $d^2$ numbers. $h$ heads have $h\\,(d/h)^2 = d^2/h$, and $h$ different things to
    look for."""
    d, h = 512, 8
    assert h * (d // h) ** 2 == d * d // h
    return f"d = 512: {d * d:,} numbers with one head, {h * (d // h) ** 2:,} with eight"


@erratum("C", "9–13, 23, 41, 51", "`python复制# 标准Attention计算伪代码`", "the listings")
def the_listings_do_not_run():
    """The words "python" and "copy" of a web page's button stand before the code, imports are missing, `d` is not
    defined and `softmax` has no `dim`."""
    listing = "python复制# \ndef attention(Q, K, V):\n    return softmax(Q @ K.T / sqrt(d)) @ V\nattention(Q, K, V)\n"
    try:
        exec(listing, {"Q": draw(4, 4), "K": draw(4, 4), "V": draw(4, 4)})
    except NameError as error:
        return f"NameError: {error}"
    raise AssertionError("the listing ran")


@erratum("C", "80", "先计算Q(K^TV)再除以√d比先缩放QK更稳定", "dividing afterwards is more stable")
def a_factor_commutes():
    r"""A factor of the output commutes with every product, and cancels if there is a normaliser. Inside $\phi$ it does not
    commute. If range is the worry, as in float16, late is *worse*: the product has overflowed by then."""
    q, k, v = (x[0, :, 0] for x in tokens(32, 8, 8))
    assert torch.allclose((q / 4) @ (k.T @ v), q @ (k.T @ v) / 4)
    assert not torch.allclose(feature_maps.elu1(q / 4), feature_maps.elu1(q) / 4)
    large = torch.tensor(1024.0, dtype=torch.float16)
    late, early = large * 64 / 8, large / 8 * 64
    assert late.isinf() and early == 8192
    return f"in float16, 1024 * 64 / 8 = {late.item()}, and 1024 / 8 * 64 = {early.item():.0f}"


@erratum("C", "81", "使用FP16计算时需要在softmax前转为FP32", "in FP16, convert to FP32 before the softmax")
def there_is_no_softmax_to_convert_before():
    """Linear attention has none. What needs float32 is what is summed over the text: the state, the normaliser, the running
    sums of log-decays."""
    ones = torch.ones(4096, dtype=torch.float16)
    naive = torch.zeros((), dtype=torch.float16)
    for x in ones:
        naive = naive + x
    assert naive == 2048
    return f"4,096 ones summed in float16 make {naive.item():.0f}, in float32 {ones.float().sum().item():.0f}"


@erratum("C", "79", "N(0, 1/√d)", "initialise with N(0, 1/sqrt(d))", "B")
def the_second_argument_is_a_variance_or_is_not():
    r"""As a standard deviation it is the usual initialisation, of variance $1/d$. Read as a variance, as the notation says,
    the outputs have standard deviation $d^{1/4}$."""
    d = 512
    x, W = draw(256, d, seed=1), draw(d, d, seed=2)
    as_deviation, as_variance = ((x @ (W * std)).std().item() for std in (d**-0.5, d**-0.25))
    assert abs(as_deviation - 1) < 0.05 and abs(as_variance / d**0.25 - 1) < 0.05
    return f"d = 512: outputs of deviation {as_deviation:.2f} or {as_variance:.2f}"


@erratum("C", "87", "PG-19数据集（平均长度5k tokens）", "PG-19, of mean length 5k tokens")
def books_are_longer():
    """The data set's own README counts 1,973,136,207 words in 28,602 books of the training part."""
    mean = 1_973_136_207 / 28_602
    assert 68_000 < mean < 70_000
    return f"{mean:,.0f} words a book"


@erratum("C", "93", "在Stable Diffusion的cross-attention层替换", "replace the cross-attention layers")
def cross_attention_is_linear_already():
    """Its keys are the 77 tokens of the prompt, whatever the size of the picture. Self-attention over the pixels is what
    grows with their square."""
    pixels, d = 64 * 64, 40
    cross, own = 4 * pixels * 77 * d, 4 * pixels * pixels * d
    linear_cross = 2 * 77 * d * d + 2 * pixels * d * d
    assert round(own / cross) == 53
    return f"at 64 x 64: self-attention has {own / cross:.0f} times the FLOPs; a linear form of cross-attention saves {1 - linear_cross / cross:.0%}"


@erratum("C", "101", "ELU的α参数建议设为1.0", "ELU's alpha is best set to 1.0", "B")
def alpha_has_to_be_one():
    r"""It has to be at most 1: $\phi(x) = \operatorname{ELU}(x) + 1$ tends to $1 - \alpha$, and a negative feature can make the
    denominator zero."""
    lowest = (F.elu(torch.tensor(-10.0), alpha=1.5) + 1).item()
    assert lowest < 0
    return f"alpha = 1.5 at x = -10: {lowest:.2f}"


@erratum("C", "102", "将d_model扩大1.5-2倍", "widen the model 1.5 to 2 times", "B")
def widen_the_state_not_the_model():
    """Doubling the width quadruples every matrix of the model. What holds more is the *state*: more or wider keys, a wider
    feature map."""
    matrix = lambda d: d * d
    state = lambda heads, K, V: heads * K * V
    assert matrix(1024) == 4 * matrix(512) and state(8, 128, 64) == 2 * state(8, 64, 64)
    return "twice the width: four times the weights; twice the key channels: twice the state, and only the q and k matrices grow"


@erratum("C", "109", "需要更长的warmup（30%总步数）", "a warm-up of 30 % of all steps is needed")
def published_warm_ups_are_short():
    """The papers: 0.5 of 15 billion tokens (GLA, 340M), 1 of 100 billion (GLA 1.3B, Gated DeltaNet), 375 of 25,000 steps
    (RetNet)."""
    published = {"GLA 340M": 0.5 / 15, "GLA 1.3B": 1 / 100, "Gated DeltaNet": 1 / 100, "RetNet": 375 / 25000}
    assert max(published.values()) < 0.04
    return ", ".join(f"{name} {share:.1%}" for name, share in published.items())


@erratum("C", "21–24", "标准Attention可以重写为", "standard attention can be rewritten as")
def replaced_not_rewritten():
    """Softmax is replaced by another function, so a trained model's outputs change."""
    q, k, v = (x[0, :, 0] for x in tokens(64, 16, 8))
    exact = torch.softmax(q @ k.T / math.sqrt(16), -1) @ v
    ours = linear.bidirectional(*(x[None, :, None] for x in (q, k, v)))[0][0, :, 0]
    change = ((ours - exact).norm() / exact.norm()).item()
    assert change > 0.3
    return f"on random tokens the output changes by {change:.0%} of its norm"
