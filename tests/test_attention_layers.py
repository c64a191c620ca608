"""The layers that attend, against a NumPy oracle: positions, gates, latent attention's two forms, their caches.

What they share with all layers, padding, packing and decoding, is in test_layers.py.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from linattn_edu.layers import Cache, GatedAttention, LatentAttention, SoftmaxAttention
from linattn_edu.layers.attention import attend

D, H = 12, 4
LATENT = dict(latent=6, nope_dim=4, rope_dim=2, v_dim=3)
MAKE = {
    "softmax": lambda: SoftmaxAttention(D, 3),
    "grouped": lambda: SoftmaxAttention(D, H, kv_heads=2, head_dim=6, rope_base=50.0, rope_channels=4),
    "normed": lambda: SoftmaxAttention(
        D, H, kv_heads=1, head_dim=6, qk_norm=True, zero_centred=True, eps=1e-3, bias=True
    ),
    "nope": lambda: SoftmaxAttention(D, 3, rope_base=None, qk_norm=True),
    **{
        f"{p}{'_headwise' * headwise}": lambda p=p, h=headwise: GatedAttention(
            D, H, position=p, headwise=h, kv_heads=2, head_dim=6, qk_norm=True, rope_base=30.0
        )
        for p in ("G1", "G2", "G3", "G4", "G5")
        for headwise in ((False,) if p == "G5" else (False, True))
    },
    "latent": lambda: LatentAttention(D, H, **LATENT),
    "latent_rope": lambda: LatentAttention(D, H, **LATENT, q_latent=5, rope_base=20.0, eps=1e-3, bias=True),
    "latent_bare": lambda: LatentAttention(D, H, **LATENT | {"rope_dim": 0}),
}
LAYERS = pytest.mark.parametrize("name", MAKE)


def shaken(name, dtype=torch.float64, seed=0):
    """The layer with every parameter off its initial value."""
    torch.manual_seed(seed)
    layer = MAKE[name]()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return layer.to(dtype)


def tokens(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, D, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


# The oracle: one sequence, one head, one token at a time; no torch in the arithmetic.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def turned(x, base, channels):
    """x [T, K]: channels (i, i + R/2) of token t as a complex number times exp(i t base^(-2i/R))."""
    if base is None:
        return x
    R = x.shape[1] if channels is None else channels
    z = x[:, : R // 2] + 1j * x[:, R // 2 : R]
    z = z * np.exp(1j * np.arange(len(x))[:, None] * base ** (-2 * np.arange(R // 2) / R))
    return np.concatenate([z.real, z.imag, x[:, R:]], 1)


def softmax_over_the_past(q, k, v):
    o = []
    for t in range(len(q)):
        p = np.exp(k[: t + 1] @ q[t] / np.sqrt(q.shape[1]))
        o.append(p @ v[: t + 1] / p.sum())
    return np.stack(o)


def weights_of(layer):
    w = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    linear = lambda name, x: x @ w[name + ".weight"].T + w.get(name + ".bias", 0)
    scale = lambda m: m.weight.detach().numpy() + m.zero_centred
    norm = lambda m, x: x / np.sqrt((x**2).mean(-1, keepdims=True) + m.eps) * scale(m)
    return w, linear, norm


def oracle(layer, x):
    """x [T, D] -> y [T, D]."""
    w, linear, norm = weights_of(layer)
    heads = lambda name, count: np.split(linear(name, x), count, 1)
    if isinstance(layer, LatentAttention):
        c = x if layer.q_down is None else norm(layer.q_norm, linear("q_down", x))
        q = np.split(linear("q_proj", c), layer.heads, 1)
        N, down = layer.nope_dim, linear("kv_down", x)
        c, shared = norm(layer.kv_norm, down[:, : layer.latent]), turned(down[:, layer.latent :], layer.rope_base, None)
        up, outputs = np.split(linear("kv_up", c), layer.heads, 1), []
        for q_h, up_h in zip(q, up):
            q_h = np.concatenate([q_h[:, :N], turned(q_h[:, N:], layer.rope_base, None)], 1)
            outputs.append(softmax_over_the_past(q_h, np.concatenate([up_h[:, :N], shared], 1), up_h[:, N:]))
        return linear("o_proj", np.concatenate(outputs, 1))
    gate, position = None, getattr(layer, "position", None)
    if position is not None:
        gate = sigmoid(linear("gate_proj", x))
    counts = {"q_proj": layer.heads, "k_proj": layer.kv_heads, "v_proj": layer.kv_heads}
    q, k, v = (heads(name, count) for name, count in counts.items())
    if position in ("G2", "G3", "G4"):
        X = {"G2": v, "G3": k, "G4": q}[position]
        X[:] = [each * g for each, g in zip(X, np.split(gate, len(X), 1))]
    place = lambda m, a: turned(a if m is None else norm(m, a), layer.rope_base, layer.rope_channels)
    q, k = [place(layer.q_norm, a) for a in q], [place(layer.k_norm, a) for a in k]
    group = layer.heads // layer.kv_heads
    o = [softmax_over_the_past(q[h], k[h // group], v[h // group]) for h in range(layer.heads)]
    if position == "G1":
        o = [each * g for each, g in zip(o, np.split(gate, len(o), 1))]
    y = linear("o_proj", np.concatenate(o, 1))
    return y * gate if position == "G5" else y


@LAYERS
def test_layer_is_its_formulas(name):
    layer, x = shaken(name), tokens(2, 7)
    y, cache = layer(x)
    assert isinstance(cache, Cache) and cache.seen.tolist() == [7, 7] and cache.mask is None
    for row, each in zip(x, y):
        np.testing.assert_allclose(each.detach().numpy(), oracle(layer, row.numpy()), rtol=0, atol=1e-10)


# The cache.


def test_the_cache_holds_what_it_should():
    """Keys and values of the shared heads; for MLA the latent and the shared key, whatever H."""
    x = tokens(3, 11, dtype=torch.float32)
    cache_of = lambda name: MAKE[name]()(x)[1]
    assert [list(t.shape) for t in cache_of("grouped").state] == [[3, 11, 2, 6], [3, 11, 2, 6]]
    assert list(cache_of("latent").state.shape) == [3, 11, 6 + 2]
    assert cache_of("latent").bytes == 3 * (11 * 8 * 4 + 8)
    assert cache_of("grouped").bytes == 3 * (11 * 2 * 2 * 6 * 4 + 8)


@LAYERS
def test_cache_bytes_are_those_of_a_real_cache(name):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer = shaken(name, dtype)
        for T in (0, 1, 13):
            _, cache = layer(tokens(1, T).to(dtype))
            assert cache.bytes == layer.cache_bytes(T, dtype=dtype)


# Decoding without gradients appends in place, and nobody can tell.


@LAYERS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_appending_in_place_changes_no_result(name, mode):
    layer, x = shaken(name), tokens(1, 91)
    whole, last = layer(x)
    with mode():
        outputs, cache = [], None
        for piece in x.split([5, *80 * [1], 3, 0, 3], 1):
            y, cache = layer(piece, cache=cache)
            outputs.append(y)
        close(torch.cat(outputs, 1), whole)
        for a, b in zip(cache.tensors, last.tensors, strict=True):
            close(a, b)
        assert cache.bytes == layer.cache_bytes(91, dtype=x.dtype)


@pytest.mark.parametrize("name", ["grouped", "latent"])
@torch.no_grad()
def test_every_branch_of_a_prompt_keeps_its_memory(name):
    """A tree of continuations: each branch is what it would be alone, whichever was taken first."""
    layer, x = shaken(name), tokens(1, 6)
    _, trunk = layer(x)
    _, trunk = layer(tokens(1, 1, seed=9), cache=trunk)  # from here on there is room behind the trunk
    x = torch.cat([x, tokens(1, 1, seed=9)], 1)
    branches = {(): trunk}
    for path in [(1,), (2,), (1, 3), (2, 3), (1, 4), (2, 4), (2, 4, 5), (1, 3, 6)]:
        _, branches[path] = layer(tokens(1, 1, seed=path[-1]), cache=branches[path[:-1]])
    for path, cache in branches.items():
        text = torch.cat([x, *(tokens(1, 1, seed=seed) for seed in path)], 1)
        for a, b in zip(cache.tensors, layer(text)[1].tensors, strict=True):
            close(a, b)


@torch.no_grad()
def test_decoding_copies_a_token_a_few_times_only():
    layer, where = SoftmaxAttention(D, 3), []
    _, cache = layer(tokens(1, 1000, dtype=torch.float32))
    for _ in range(1000):
        _, cache = layer(tokens(1, 1, dtype=torch.float32), cache=cache)
        k, v = cache.state
        where.append(k.data_ptr())
        assert k.untyped_storage().nbytes() <= k.nbytes * 9 / 8 + 64 * k[0, 0].nbytes
    moves = sum(x != y for x, y in pairwise(where))  # a move never ends where it began, but where an earlier one did
    assert 3 <= moves < 9


def test_modes_may_be_mixed():
    """A prompt read without gradients, continued with them, in inference mode and again without."""
    layer, x = shaken("grouped"), tokens(1, 9)
    whole, _ = layer(x)
    with torch.inference_mode():
        _, cache = layer(x[:, :3])
        _, cache = layer(x[:, 3:4], cache=cache)
    with torch.no_grad():
        outputs = [layer(x[:, 4:5], cache=cache)]
        outputs += [layer(x[:, 5:6], cache=outputs[-1][1])]
    with torch.inference_mode():
        outputs += [layer(x[:, 6:7], cache=outputs[-1][1])]
    with torch.no_grad():
        outputs += [layer(x[:, 7:8], cache=outputs[-1][1])]
    y, _ = layer(x[:, 8:], cache=outputs[-1][1])
    assert y.requires_grad
    close(torch.cat([*(o for o, _ in outputs), y], 1), whole[:, 4:])


# What the layers mean.


@pytest.mark.parametrize(
    "name, ordered", [("nope", False), ("latent", False), ("softmax", True), ("latent_rope", True)]
)
def test_without_positions_the_past_has_no_order(name, ordered):
    layer, x = shaken(name), tokens(1, 9)
    shuffled = x[:, [3, 0, 7, 5, 1, 2, 6, 4, 8]]
    difference = (layer(x)[0][:, -1] - layer(shuffled)[0][:, -1]).abs().max()
    assert (difference > 1e-3) == ordered and (ordered or difference < 1e-12)


@pytest.mark.parametrize("name", ["softmax", "grouped", "normed", "latent_rope"])
def test_only_distances_matter(name):
    """A sequence that starts at any other position gives the same outputs."""
    layer, x = shaken(name), tokens(1, 6)
    y, _ = layer(x)
    empty = [x.new_zeros(1, 0, *shape) for shape in layer.stored_shapes]
    moved, _ = layer.mix(x, empty, 1000 + torch.arange(6)[None], None)
    close(moved, y)


@pytest.mark.parametrize("position", ["G1", "G2", "G5"])
def test_a_gate_at_one_half_halves_the_output(position):
    torch.manual_seed(0)
    layer, plain = GatedAttention(D, 3, position=position).double(), SoftmaxAttention(D, 3).double()
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if "gate" not in name})
    torch.nn.init.zeros_(layer.gate_proj.weight)
    close(2 * layer(tokens(2, 5))[0], plain(tokens(2, 5))[0])


@pytest.mark.parametrize("name", ["latent", "latent_rope", "latent_bare"])
def test_absorbed_is_expanded(name):
    layer = shaken(name)
    row = torch.randn(2, 9, layer.latent + layer.rope_dim, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1], [1] * 9]).bool()
    for T in (1, 4, 9):
        q = torch.randn(2, T, H, layer.nope_dim + layer.rope_dim, dtype=torch.float64, requires_grad=True)
        for m in (None, mask):
            a, b = layer.absorbed(q, row, m), layer.expanded(q, row, m)
            close(a, b)
            inputs = [q, row, layer.kv_up.weight]
            for x, y in zip(*(torch.autograd.grad(o.square().sum(), inputs, allow_unused=True) for o in (a, b))):
                close(x, y)


def test_latent_attention_takes_the_cheaper_form(monkeypatch):
    """DeepSeek-V2's sizes: absorbed below T = 512 * 256 / (1024 - 256) = 170.7."""
    sizes = dict(latent=512, nope_dim=128, rope_dim=64, v_dim=128)
    layer, taken = LatentAttention(D, 1, **sizes), []
    for form in ("absorbed", "expanded"):
        monkeypatch.setattr(layer, form, lambda q, row, m, f=form: taken.append(f) or q.new_zeros(*q.shape[:3], 128))
    for T in (1, 170, 171, 300):
        layer(tokens(1, T, dtype=torch.float32))
    assert taken == ["absorbed", "absorbed", "expanded", "expanded"]


def test_decoding_reads_the_keys_where_they_lie(monkeypatch):
    """No copy of the cache for each query head: grouped queries go to the kernel as queries of the shared head."""
    name, seen = "scaled_dot_product_attention", []
    original = getattr(torch.nn.functional, name)
    monkeypatch.setattr(torch.nn.functional, name, lambda q, k, v, **o: seen.append(k) or original(q, k, v, **o))
    q, k, v = torch.randn(2, 1, 8, 4), torch.randn(2, 20, 2, 4), torch.randn(2, 20, 2, 4)
    attend(q, k, v)
    assert seen[0].data_ptr() == k.data_ptr() and seen[0].shape == (2, 2, 20, 4)


def test_no_softmax_is_empty(monkeypatch):
    """A row of padding sees itself at least: kernels disagree on what a softmax over nothing gives."""
    name, masks = "scaled_dot_product_attention", []
    original = getattr(torch.nn.functional, name)

    def spy(q, k, v, attn_mask=None, **options):
        masks.append(attn_mask)
        return original(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, name, spy)
    layer, mask = shaken("grouped"), torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]]).bool()
    _, cache = layer(tokens(2, 4), mask=mask)
    layer(tokens(2, 3), cache=cache, mask=mask[:, :3])
    layer(tokens(2, 1), cache=cache, mask=mask[:, 1:2])
    assert len(masks) == 3 and all(each.any(-1).all() for each in masks)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SoftmaxAttention(12, 5), "`heads`: got 5, expected a number that divides 1 * width = 12"),
        (lambda: SoftmaxAttention(12, 4, kv_heads=3), "`kv_heads`: got 3, expected a divisor of heads = 4"),
        (lambda: SoftmaxAttention(12, 4), "`head_dim`: got 3, expected an even number of channels"),
        (lambda: SoftmaxAttention(12, 2, rope_channels=8), "`rope_channels`: got 8, expected a whole number from"),
        (lambda: SoftmaxAttention(12, 2, rope_channels=3), "`rope_channels`: got 3, expected an even number"),
        (lambda: SoftmaxAttention(12, 2, rope_base=0), "`rope_base`: got 0, expected a finite positive number"),
        (lambda: SoftmaxAttention(12, 2, head_dim=0), "`head_dim`: got 0, expected a whole number of at least 1"),
        (lambda: LatentAttention(12, 2, rope_dim=-2), "`rope_dim`: got -2, expected a whole number of at least 0"),
        (lambda: LatentAttention(12, 2, rope_dim=0, rope_base=10.0), "`rope_dim`: got 0, expected an even number"),
        (lambda: LatentAttention(12, 2, q_latent=0), "`q_latent`: got 0, expected a whole number of at least 1"),
        (lambda: GatedAttention(12, 2, position="G6"), "`position`: got 'G6', expected one of G1, G2, G3, G4, G5"),
        (lambda: GatedAttention(12, 2, position="G5", headwise=True), "`headwise`: got True with position G5"),
        (lambda: LatentAttention(12, 2, rope_dim=3, rope_base=10.0), "`rope_dim`: got 3, expected an even number"),
    ],
)
def test_bad_sizes_are_named(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (dict(x=torch.randn(2, 5, 11)), "`x`: got shape"),
        (dict(mask=torch.ones(2, 4).bool()), "`mask`: got shape"),
        (dict(mask=torch.ones(2, 5).bool(), cu_seqlens=torch.tensor([0, 5])), "`mask`: got one together"),
        (dict(cu_seqlens=torch.tensor([0, 5])), "`cu_seqlens`: got B = 2"),
    ],
)
def test_bad_arguments_are_named(arguments, error):
    layer = SoftmaxAttention(12, 2)
    with pytest.raises(ValueError) as caught:
        layer(**dict(x=torch.randn(2, 5, 12)) | arguments)
    assert error in str(caught.value)
