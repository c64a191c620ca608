"""What every layer promises: one function however its tokens arrive, padded or not, packed or not, piece by piece."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from operators import numpy_recurrence

from linattn_edu import kernels
from linattn_edu.layers import (
    Cache,
    DeltaNet,
    GatedAttention,
    GatedDeltaNet,
    GatedLinearAttention,
    KimiDeltaAttention,
    LatentAttention,
    LayerScale,
    LinearAttention,
    Mamba,
    Mamba2,
    Retention,
    RMSNorm,
    ShortConvolution,
    SoftmaxAttention,
    initial,
    packing,
    rope,
)

D = 12
TIGHT = dict(rtol=1e-10, atol=1e-10)

RECURRENT = {
    "LinearAttention": lambda: LinearAttention(D, 2),
    "LinearAttention, RoPE": lambda: LinearAttention(D, 2, value_dim=5, rope_base=10_000.0),
    "LinearAttention, norm": lambda: LinearAttention(
        D, 3, key_dim=5, normalize=False, feature_map="identity", conv_size=3
    ),
    "Retention": lambda: Retention(D, 2),
    "GatedLinearAttention": lambda: GatedLinearAttention(D, 2, gate_rank=3, tau=4.0),
    "DeltaNet": lambda: DeltaNet(D, 2, key_dim=5),
    "DeltaNet, gate": lambda: DeltaNet(D, 2, conv_size=None, output_gate=True, negative_eigenvalues=True),
    "GatedDeltaNet": lambda: GatedDeltaNet(D, 2, value_heads=4, value_dim=5, conv_size=3),
    "KimiDeltaAttention": lambda: KimiDeltaAttention(D, 2, value_dim=5),
    "KimiDeltaAttention, bound": lambda: KimiDeltaAttention(D, 1, value_heads=2, key_dim=3, lower_bound=-5.0),
    "Mamba": lambda: Mamba(D, state_dim=3),
    "Mamba2": lambda: Mamba2(D, head_dim=4, state_dim=5, groups=2),
    "ShortConvolution": lambda: ShortConvolution(D, bias=True),
}
ATTENTION = {
    "SoftmaxAttention": lambda: SoftmaxAttention(D, 2),
    "SoftmaxAttention, grouped": lambda: SoftmaxAttention(D, 4, kv_heads=2, head_dim=6, qk_norm=True, rope_channels=2),
    "SoftmaxAttention, NoPE": lambda: SoftmaxAttention(D, 3, rope_base=None, bias=True),
    "GatedAttention": lambda: GatedAttention(D, 2),
    "GatedAttention, G2 headwise": lambda: GatedAttention(D, 4, kv_heads=2, head_dim=4, position="G2", headwise=True),
    "GatedAttention, G5": lambda: GatedAttention(D, 3, position="G5", qk_norm=True, zero_centred=True),
    "LatentAttention": lambda: LatentAttention(D, 2, latent=5, nope_dim=4, rope_dim=2, v_dim=3),
    "LatentAttention, RoPE": lambda: LatentAttention(
        D, 2, latent=5, nope_dim=4, rope_dim=2, v_dim=3, rope_base=100.0, q_latent=6
    ),
}
LAYERS = RECURRENT | ATTENTION

every_layer = pytest.mark.parametrize("name", LAYERS)
every_recurrent_layer = pytest.mark.parametrize("name", RECURRENT)


def layer_of(name, dtype=torch.float64, seed=0):
    """The layer with every parameter shaken off its initial value."""
    torch.manual_seed(seed)
    layer = LAYERS[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype)


def tokens(T=70, B=3, dtype=torch.float64, seed=1):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def in_pieces(layer, x, sizes, cache=None, **options):
    """The outputs of calls on pieces of these sizes, each with the cache of the one before."""
    outputs = []
    for piece in x.split(sizes, 1):
        y, cache = layer(piece, cache=cache, **options)
        outputs.append(y)
    return torch.cat(outputs, 1), cache


def assert_same(one, other, **tolerance):
    """Two caches are equal."""
    assert len(one.tensors) == len(other.tensors)
    for a, b in zip(one.tensors, other.tensors):
        torch.testing.assert_close(a, b, **tolerance)


# One function, however the tokens arrive.


@every_layer
@pytest.mark.parametrize("T", [9, 70])
def test_prefill_and_decode_are_one_forward(name, T):
    layer, x = layer_of(name, torch.float32), tokens(T, dtype=torch.float32)
    y, cache = layer(x)
    pieces, last = in_pieces(layer, x, [T - 5] + [1] * 5)
    torch.testing.assert_close(pieces, y, rtol=0, atol=1e-5)
    assert_same(last, cache, rtol=1e-4, atol=1e-5)


@every_layer
def test_chunked_prefill_is_one_forward(name):
    layer, x = layer_of(name), tokens()
    y, cache = layer(x)
    pieces, last = in_pieces(layer, x, [2, 0, 1, 65, 2])
    torch.testing.assert_close(pieces, y, **TIGHT)
    assert_same(last, cache, **TIGHT)
    assert torch.equal(last.seen, torch.tensor([70, 70, 70]))


@every_layer
def test_decode_from_the_first_token_is_one_forward(name):
    layer, x = layer_of(name), tokens(5)
    torch.testing.assert_close(in_pieces(layer, x, 1)[0], layer(x)[0], **TIGHT)


@every_layer
def test_no_output_depends_on_a_later_token(name):
    layer, x = layer_of(name), tokens(70)
    changed = x.clone()
    changed[:, 66:] = tokens(4, seed=2)
    y, z = layer(x)[0], layer(changed)[0]
    torch.testing.assert_close(y[:, :66], z[:, :66], **TIGHT)
    assert not torch.allclose(y[:, 66:], z[:, 66:])


@every_layer
def test_a_prompt_can_be_continued_many_times(name):
    layer, x = layer_of(name), tokens(8)
    _, cache = layer(x)
    before = cache.map(torch.clone)
    first = layer(tokens(3, seed=2), cache=cache)[0]
    layer(tokens(1, seed=3), cache=cache)
    layer(tokens(2, seed=3), cache=cache, mask=torch.tensor([[True, False]] * 3))
    assert_same(cache, before, rtol=0, atol=0)
    assert torch.equal(layer(tokens(3, seed=2), cache=cache)[0], first)


@every_layer
def test_gradients_pass_through_the_cache(name):
    layer = layer_of(name)
    x, pieces = tokens(6).requires_grad_(), tokens(6).requires_grad_()
    weight = tokens(6, seed=5)
    (layer(x)[0] * weight).sum().backward()
    whole = {key: p.grad.clone() for key, p in layer.named_parameters()}
    layer.zero_grad()
    (in_pieces(layer, pieces, [3, 1, 2])[0] * weight).sum().backward()
    torch.testing.assert_close(pieces.grad, x.grad, **TIGHT)
    for key, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, whole[key], **TIGHT)


# Padding.


MASKS = {
    "left": torch.arange(7) >= torch.tensor([0, 4, 6])[:, None],
    "right": torch.arange(7) < torch.tensor([7, 3, 1])[:, None],
    "anywhere": torch.tensor([[1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0, 0], [1] * 7]).bool(),
}


@every_layer
@pytest.mark.parametrize("side", MASKS)
def test_padded_is_unpadded(name, side):
    layer, mask = layer_of(name), MASKS[side]
    start, x, more = tokens(4, seed=2), tokens(7), tokens(1, seed=3)
    _, old = layer(start)
    padded = x.masked_fill(~mask[..., None], float("nan")).requires_grad_()
    y, cache = layer(padded, cache=old, mask=mask)
    weight = tokens(7, seed=4)
    (y * weight).sum().backward()
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask])) and torch.equal(cache.seen, 4 + mask.sum(1))
    after = layer(more, cache=cache)[0]
    for b in range(3):
        alone = x[b : b + 1, mask[b]].requires_grad_()
        expected, cache_b = layer(alone, cache=old.map(lambda s: s[b : b + 1].detach()))
        (expected * weight[b, mask[b]]).sum().backward()
        torch.testing.assert_close(y[b, mask[b]], expected[0], **TIGHT)
        torch.testing.assert_close(padded.grad[b, mask[b]], alone.grad[0], **TIGHT)
        torch.testing.assert_close(after[b : b + 1], layer(more[b : b + 1], cache=cache_b)[0], **TIGHT)


@every_recurrent_layer
def test_padding_leaves_no_trace_in_a_recurrent_cache(name):
    layer, x, mask = layer_of(name), tokens(7), MASKS["anywhere"]
    _, cache = layer(x, mask=mask)
    for b in range(3):
        assert_same(cache.map(lambda s: s[b : b + 1]), layer(x[b : b + 1, mask[b]])[1], **TIGHT)


@every_layer
def test_padded_decoding_is_unpadded_decoding(name):
    """Rows of one batch that end at different times go on as padding."""
    layer, x = layer_of(name), tokens(6)
    mask = torch.arange(6) < torch.tensor([6, 4, 1])[:, None]
    cache, outputs = None, []
    for t in range(6):
        y, cache = layer(x[:, t : t + 1], cache=cache, mask=mask[:, t : t + 1])
        outputs.append(y)
    expected = layer(x)[0] * mask[..., None]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, **TIGHT)
    assert torch.equal(cache.seen, torch.tensor([6, 4, 1]))


@every_layer
def test_a_row_of_padding_and_no_tokens_at_all(name):
    layer, x = layer_of(name), tokens(4)
    mask = torch.tensor([[True], [False], [True]]).expand(3, 4)
    y, cache = layer(x, mask=mask)
    torch.testing.assert_close(y[::2], layer(x[::2])[0], **TIGHT)
    assert torch.equal(y[1], torch.zeros(4, D, dtype=y.dtype)) and torch.equal(cache.seen, torch.tensor([4, 0, 4]))
    y, same = layer(x, cache=cache, mask=torch.zeros(3, 4, dtype=torch.bool))
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(same.seen, cache.seen)
    y, empty = layer(x[:, :0])
    assert y.shape == (3, 0, D) and torch.equal(empty.seen, torch.zeros(3, dtype=torch.int64))
    for given in (empty, layer(x[:, :0], cache=empty, mask=mask[:, :0])[1]):
        torch.testing.assert_close(layer(x, cache=given)[0], layer(x)[0], **TIGHT)
    assert layer(x[:0])[0].shape == (0, 4, D)


# Packed sequences.


@every_layer
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_are_separate_sequences(name, dtype):
    layer, x, more = layer_of(name), tokens(75, B=1), tokens(9, B=1, seed=2)
    y, cache = layer(x, cu_seqlens=torch.tensor([0, 3, 3, 70, 75], dtype=dtype))
    z, cache = layer(more, cache=cache, cu_seqlens=torch.tensor([0, 4, 6, 6, 9], dtype=dtype))
    assert torch.equal(cache.seen, torch.tensor([7, 2, 67, 8]))
    pieces = x.split([3, 0, 67, 5], 1), more.split([4, 2, 0, 3], 1)
    for n, (first, second) in enumerate(zip(*pieces)):
        out, last = in_pieces(layer, torch.cat([first, second], 1), [first.shape[1], second.shape[1]])
        both = torch.cat([y.split([3, 0, 67, 5], 1)[n], z.split([4, 2, 0, 3], 1)[n]], 1)
        torch.testing.assert_close(both, out, **TIGHT)
        if name in RECURRENT:
            assert_same(cache.map(lambda s: s[n : n + 1]), last, **TIGHT)


def test_positions_count_from_what_was_seen():
    x, seen = tokens(5, B=1), torch.tensor([0, 10, 3])
    packed = packing.positions(x, seen, torch.tensor([0, 2, 2, 5]))
    assert torch.equal(packed, torch.tensor([[0, 1, 3, 4, 5]]))
    assert torch.equal(packing.positions(x, None, torch.tensor([0, 2, 5])), torch.tensor([[0, 1, 0, 1, 2]]))
    assert torch.equal(packing.positions(tokens(2), None, None), torch.tensor([[0, 1]] * 3))
    assert torch.equal(packing.positions(tokens(2), seen, None), torch.tensor([[0, 1], [10, 11], [3, 4]]))


# The recipes, against loops that share no line with the package.


def weighted(layer, name, x):
    """x through the projection `name`, a matrix or two."""
    module = layer.get_submodule(name)
    for matrix in module if isinstance(module, torch.nn.Sequential) else [module]:
        x = x @ matrix.weight.T + (0 if matrix.bias is None else matrix.bias)
    return x


def heads_of(layer, x, silu=True):
    """q, k and v by torch's own convolution."""
    q, k, v = (weighted(layer, f"{each}_proj", x) for each in "qkv")
    if layer.conv is not None:
        taps = layer.conv.weight.split([q.shape[-1], k.shape[-1], v.shape[-1]])
        padded = [F.pad(each.mT, [layer.conv.size - 1, 0]) for each in (q, k, v)]
        q, k, v = (F.conv1d(each, tap[:, None], groups=len(tap)).mT for each, tap in zip(padded, taps))
    if layer.conv is not None or silu:
        q, k, v = (F.silu(each) for each in (q, k, v))
    B, T, _ = x.shape
    return q.view(B, T, layer.heads, -1), k.view(B, T, layer.heads, -1), v.view(B, T, layer.value_heads, -1)


def rotated(x):
    """RoPE as complex numbers."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), frequency)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([z.real, z.imag], -1)


def unit(x):
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def normed(layer, o):
    weight = 1.0 if layer.norm.weight is None else layer.norm.weight
    return weight * o / (o.pow(2).mean(-1, keepdim=True) + layer.norm.eps).sqrt()


def recurrence(delta, **arguments):
    return torch.from_numpy(numpy_recurrence(arguments, delta)[0])


def expected_output(name, layer, x):
    """y of the layer, from the formulas of its docstring."""
    kind = name.split(",")[0]
    q, k, v = heads_of(layer, x, silu="Delta" in kind)

    def gate(f):
        return f(weighted(layer, "z_proj", x)).view(*x.shape[:2], layer.value_heads, -1)

    if kind == "LinearAttention":
        if layer.rope_base is not None:
            q, k = rotated(q), rotated(k)
        if layer.normalize:
            o = recurrence(False, q=q, k=k, v=v)
        else:
            o = normed(layer, recurrence(False, q=q, k=k, v=v, normalize=False, feature_map="identity"))
    elif kind == "Retention":
        g = torch.log(1 - 2.0 ** (-5 - torch.arange(layer.heads, dtype=x.dtype)))
        g = g.float().to(x.dtype).expand(v.shape[:-1])  # the layer's buffer is rounded to float32
        o = normed(layer, recurrence(False, q=rotated(q), k=rotated(k), v=v, g=g)) * gate(F.silu)
    elif kind == "GatedLinearAttention":
        g = torch.sigmoid(weighted(layer, "a_proj", x)).log().view_as(k) / 4
        o = normed(layer, recurrence(False, q=q, k=k, v=v, g=g)) * gate(F.silu)
    else:
        beta = torch.sigmoid(weighted(layer, "b_proj", x)) * (2 if layer.negative_eigenvalues else 1)
        arguments = dict(q=unit(q), k=unit(k), v=v, beta=beta)
        if kind != "DeltaNet":
            logits = weighted(layer, "a_proj", x).view(*v.shape[:-1], -1) + layer.dt_bias.view(layer.value_heads, -1)
            rate = layer.A_log.exp()[:, None]
            bounded = "bound" in name
            g = -5 * torch.sigmoid(rate * logits) if bounded else -rate * torch.log1p(logits.exp())
            arguments["g"] = g if kind == "KimiDeltaAttention" else g[..., 0]
        o = normed(layer, recurrence(True, **arguments))
        if layer.z_proj is not None:
            o = o * gate(torch.sigmoid if kind == "KimiDeltaAttention" else F.silu)
    return weighted(layer, "o_proj", o.flatten(2))


@pytest.mark.parametrize("name", [name for name in RECURRENT if not name.startswith(("Mamba", "Short"))])
@torch.no_grad()
def test_a_layer_is_its_recipe(name):
    layer, x = layer_of(name), tokens(9, B=2)
    torch.testing.assert_close(layer(x)[0], expected_output(name, layer, x), **TIGHT)


@every_recurrent_layer
def test_all_forms_are_one_layer(name):
    layer, weight = layer_of(name), tokens(seed=2)
    results = []
    for form in ("recurrent", "parallel", "chunkwise", "fused"):
        layer.form = form
        layer.zero_grad()
        y, cache = layer(tokens())
        (y * weight).sum().backward()
        results.append([y, *cache.tensors, *(p.grad for p in layer.parameters())])
    for other in results[1:]:
        for a, b in zip(results[0], other):
            torch.testing.assert_close(a, b, **TIGHT)


@pytest.mark.skipif(kernels.mode() == "missing", reason="no Triton on this system")
def test_layers_on_the_kernels_in_the_interpreter(root):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_layers.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


# Training.


@every_layer
def test_gradients_reach_every_parameter(name):
    layer = layer_of(name, torch.float32)
    layer(tokens(20, dtype=torch.float32))[0].square().sum().backward()
    for key, p in layer.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, key


@every_layer
def test_state_dict_makes_the_same_layer(name, tmp_path):
    layer, other = layer_of(name), layer_of(name, seed=7)
    assert not torch.equal(layer(tokens(5))[0], other(tokens(5))[0])
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(layer(tokens(5))[0], other(tokens(5))[0])
    assert torch.equal(layer(tokens(5))[0], copy.deepcopy(layer)(tokens(5))[0])


@every_layer
def test_bfloat16_is_close_to_float32(name):
    layer, x = layer_of(name, torch.float32), tokens(20, dtype=torch.float32)
    y, cache = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, mixed_cache = layer(x)
        again, _ = layer(x[:, :1], cache=mixed_cache)
    low, low_cache = layer.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16 and again.isfinite().all()
    for z in (mixed, low):
        assert (z.float() - y).norm() < 0.03 * y.norm()
    if name in RECURRENT:
        states = [s for c in (mixed_cache, low_cache) for s in (c.state if isinstance(c.state, tuple) else (c.state,))]
        assert all(s is None or s.dtype == torch.float32 for s in states)


# The cache.


@every_recurrent_layer
def test_a_recurrent_cache_has_one_size(name):
    layer = layer_of(name, torch.float32)
    sizes = {layer(tokens(T, B=1, dtype=torch.float32))[1].bytes for T in (1, 9, 70)}
    assert sizes == {layer.cache_bytes(1), layer.cache_bytes(10**6), layer.initial_cache(1).bytes}


@every_recurrent_layer
def test_the_initial_cache_is_none(name):
    layer, x = layer_of(name), tokens(6)
    y, cache = layer(x, cache=layer.initial_cache(3, dtype=torch.float64))
    assert torch.equal(y, layer(x)[0])
    assert_same(cache, layer(x)[1], rtol=0, atol=0)


def test_cache_bytes_of_qwen3_next_are_what_its_configuration_says():
    with torch.device("meta"):
        layer = GatedDeltaNet(2048, 16, key_dim=128, value_heads=32, value_dim=128, conv_size=4)
    state, conv = 32 * 128 * 128 * 4, 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert layer.cache_bytes(262_144, dtype=torch.bfloat16) == state + conv + 8


def test_a_cache_maps_and_detaches():
    layer = layer_of("LinearAttention")
    _, cache = layer(tokens(4))
    assert cache.state[0].requires_grad and not any(x.requires_grad for x in cache.detach().tensors)
    picked = cache.map(lambda x: x[[2, 2]])
    y = layer(tokens(1, seed=2)[:2], cache=picked)[0]
    torch.testing.assert_close(y[1:], layer(tokens(1, seed=2)[1:2], cache=cache.map(lambda x: x[2:]))[0], **TIGHT)
    assert cache.bytes == sum(x.numel() * x.element_size() for x in (*cache.state, cache.seen))
    with pytest.raises(AttributeError):
        cache.state = None


# Errors, by name.


@every_layer
def test_wrong_arguments_are_named(name):
    layer, x = layer_of(name), tokens(4)
    mask, cu = torch.ones(3, 4, dtype=torch.bool), torch.tensor([0, 4])
    _, cache = layer(x)
    cases = [
        (ValueError, "`x`", dict(x=x[0])),
        (ValueError, "`x`", dict(x=x[..., 1:])),
        (ValueError, "`x`", dict(x=x.long())),
        (TypeError, "`x`", dict(x=None)),
        (ValueError, "`mask`", dict(x=x, mask=mask.long())),
        (ValueError, "`mask`", dict(x=x, mask=mask[:, :3])),
        (TypeError, "`mask`", dict(x=x, mask=True)),
        (ValueError, "`mask`", dict(x=x[:1], mask=mask[:1], cu_seqlens=cu)),
        (ValueError, "`cu_seqlens`", dict(x=x, cu_seqlens=cu)),
        (ValueError, "`cu_seqlens`", dict(x=x[:1], cu_seqlens=torch.tensor([0, 3]))),
        (TypeError, "`cu_seqlens`", dict(x=x[:1], cu_seqlens=[0, 4])),
        (TypeError, "`cache`", dict(x=x, cache=cache.tensors)),
        (ValueError, "`cache`", dict(x=x, cache=Cache())),
        (ValueError, "`cache`", dict(x=x[:2], cache=cache)),
        (ValueError, "`cache`", dict(x=x[:1], cache=cache, cu_seqlens=cu)),
    ]
    for error, argument, arguments in cases:
        with pytest.raises(error, match=argument):
            layer(**arguments)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "ShortConvolution"])  # which has no matrix
def test_the_dtype_and_the_device_of_x_are_those_of_the_weights(name):
    layer = layer_of(name, torch.float32)
    for x, difference in (
        (tokens(2), "dtype torch.float64, expected torch.float32"),
        (tokens(2, dtype=torch.float32).to("meta"), "device meta, expected cpu"),
    ):
        with pytest.raises(ValueError, match=rf"`x`: got {difference} as in `\w+\.weight`"):
            layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(tokens(2).bfloat16())[0].isfinite().all()


def test_a_projection_of_another_class_may_take_any_dtype():
    class Cast(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype))

    layer = DeltaNet(D, 2, conv_size=None).float()
    for name in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj"):
        layer.get_submodule(name).__class__ = Cast
    assert layer(tokens(2))[0].isfinite().all()


def test_a_projection_with_a_hook_may_take_any_dtype():
    """As where weights are offloaded, and are on no device until their layer is called."""
    layer = DeltaNet(D, 2, conv_size=None).float()
    for name in ("q_proj", "k_proj", "v_proj", "b_proj"):
        layer.get_submodule(name).register_forward_pre_hook(lambda module, x: (x[0].to(module.weight.dtype),))
    assert layer(tokens(2))[0].isfinite().all()


def test_the_matrix_that_x_does_not_meet_is_not_asked():
    class Cast(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype))

    layer = DeltaNet(D, 2, conv_size=None).float()
    for name in ("q_proj", "k_proj", "v_proj", "b_proj"):
        layer.get_submodule(name).__class__ = Cast
    assert layer(tokens(2))[0].isfinite().all()


def test_the_cache_of_another_layer_is_refused():
    x = tokens(4)
    _, short = layer_of("ShortConvolution")(x)
    for name in RECURRENT:
        if name != "ShortConvolution":
            with pytest.raises(ValueError, match="`cache`"):
                layer_of(name)(x, cache=short)


@pytest.mark.parametrize(
    "make, argument",
    [
        (lambda: DeltaNet(10, 3), "heads"),
        (lambda: DeltaNet(12, 2, form="fast"), "form"),
        (lambda: GatedDeltaNet(12, 2, value_heads=3), "value_heads"),
        (lambda: Retention(12, 4, key_dim=3), "key_dim"),
        (lambda: Mamba2(12, head_dim=5), "head_dim"),
        (lambda: Mamba2(12, head_dim=8, groups=2), "head_dim"),
        (lambda: LinearAttention(12, 2, feature_map="nope"), "feature_map"),
        (lambda: ShortConvolution(12, activation="gelu"), "activation"),
        (lambda: GatedDeltaNet(12, 2, A_range=(2.0, 1.0)), "A_range"),
        (lambda: Mamba(12, dt_min=0.0), "dt_min"),
        (lambda: Mamba(12, dt_min=0.2), "dt_max"),
        (lambda: RMSNorm(12, gate="relu"), "gate"),
        (lambda: RMSNorm(12, groups=5), "groups"),
        (lambda: RMSNorm(12, eps=-1e-6), "eps"),
        (lambda: DeltaNet(12, 2, key_dim=0), "key_dim"),
        (lambda: DeltaNet(12, 2, value_dim=0), "value_dim"),
        (lambda: DeltaNet(12, 2, conv_size=0), "conv_size"),
        (lambda: Retention(12, 2, value_dim=0), "value_dim"),
        (lambda: Retention(12, 2, rope_base=-1.0), "rope_base"),
        (lambda: LinearAttention(12, 2, rope_base=0), "rope_base"),
        (lambda: LinearAttention(12, 2, key_dim=3, rope_base=100.0), "key_dim"),
        (lambda: LinearAttention(12, 2, feature_map=lambda x: x.sum()), "feature_map"),
        (lambda: GatedLinearAttention(12, 2, key_dim=0), "key_dim"),
        (lambda: GatedLinearAttention(12, 2, gate_rank=0), "gate_rank"),
        (lambda: GatedLinearAttention(12, 2, tau=0), "tau"),
        (lambda: GatedDeltaNet(12, 2, value_heads=0), "value_heads"),
        (lambda: GatedDeltaNet(12, 2, value_dim=0), "value_dim"),
        (lambda: KimiDeltaAttention(12, 2, gate_rank=0), "gate_rank"),
        (lambda: KimiDeltaAttention(12, 2, lower_bound=0.0), "lower_bound"),
        (lambda: KimiDeltaAttention(12, 2, A_range=(1.0, float("inf"))), "A_range"),
        (lambda: Mamba(12, expand=0), "expand"),
        (lambda: Mamba(12, expand=0.01), r"expand \* width"),
        (lambda: Mamba(12, dt_rank=0), "dt_rank"),
        (lambda: Mamba(12, conv_size=0), "conv_size"),
        (lambda: Mamba2(12, head_dim=0), "head_dim"),
        (lambda: Mamba2(12, head_dim=4, groups=0), "groups"),
        (lambda: Mamba2(12, head_dim=4, dt_limit=(0.2, 0.1)), "dt_limit"),
        (lambda: layer_of("DeltaNet").cache_bytes(-1), "T"),
        (lambda: layer_of("SoftmaxAttention").cache_bytes(-1), "T"),
    ],
)
def test_wrong_sizes_are_named(make, argument):
    with pytest.raises(ValueError, match=f"`{argument}`"):
        make()


@pytest.mark.parametrize(
    "make, argument",
    [
        (lambda: DeltaNet(12, 2, negative_eigenvalues=1), "negative_eigenvalues"),
        (lambda: LinearAttention(12, 2, normalize=1), "normalize"),
        (lambda: Retention(12, 2, rope_base=None), "rope_base"),
        (lambda: KimiDeltaAttention(12, 2, gate_rank=2.5), "gate_rank"),
        (lambda: GatedDeltaNet(12, 2, A_range=3), "A_range"),
        (lambda: GatedDeltaNet(12, 2, A_range=(1.0, 2.0, 3.0)), "A_range"),
        (lambda: Mamba2(12, head_dim=4, dt_limit=3), "dt_limit"),
        (lambda: Mamba(12, conv_size=None), "conv_size"),
        (lambda: RMSNorm(12, eps="1e-6"), "eps"),
        (lambda: RMSNorm(12, zero_centred=2), "zero_centred"),
        (lambda: layer_of("DeltaNet").cache_bytes(2.5), "T"),
        (lambda: layer_of("SoftmaxAttention").cache_bytes(2.5), "T"),
    ],
)
def test_sizes_of_another_kind_are_named(make, argument):
    with pytest.raises(TypeError, match=f"`{argument}`"):
        make()


ROPE = [
    (ValueError, dict(positions=torch.tensor([3])), "`positions`: got shape [1], expected [T] with T = 5 as in `x`"),
    (ValueError, dict(positions=torch.zeros(3, 5).long()), "`positions`: got shape [3, 5], expected [B, T] with B = 2"),
    (ValueError, dict(positions=torch.tensor(3)), "`positions`: got shape [], expected [B, T] with B = 2"),
    (ValueError, dict(positions=torch.linspace(0, 1, 5)), "`positions`: got dtype torch.float32, expected an integer"),
    (ValueError, dict(positions=torch.ones(5).bool()), "`positions`: got dtype torch.bool, expected an integer dtype"),
    (ValueError, dict(positions=torch.arange(5, device="meta")), "`positions`: got device meta, expected cpu as in"),
    (TypeError, dict(positions=[0, 1, 2, 3, 4]), "`positions`: got list [0, 1, 2, 3, 4], expected a tensor [B, T]"),
    (TypeError, dict(start="a"), "`start`: got str 'a', expected a whole number"),
    (TypeError, dict(start=0.5), "`start`: got float 0.5, expected a whole number"),
]


@pytest.mark.parametrize("error, arguments, message", ROPE)
def test_wrong_positions_are_named(error, arguments, message):
    with pytest.raises(error) as raised:
        rope(torch.randn(2, 5, 2, 4), **arguments)
    assert message in str(raised.value)


def test_positions_of_any_integer_dtype_are_the_place_of_each_token():
    x = torch.randn(2, 5, 2, 4, dtype=torch.float64)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        t = torch.arange(3, 8, dtype=dtype)
        for positions in (t, t.expand(2, 5)):
            assert torch.equal(rope(x, positions=positions), rope(x, start=3))
    there = rope(x, start=4)
    torch.testing.assert_close(torch.cat([rope(there[:, t : t + 1], start=-4 - t) for t in range(5)], 1), x, **TIGHT)


# Initial values.


def test_initial_gates_lie_in_the_ranges_asked_for():
    torch.manual_seed(0)
    A, dt = initial.rates([4000], (0.0, 16.0)).exp(), F.softplus(initial.step_sizes([4000], 0.001, 0.1))
    assert 0 < A.min() and A.max() <= 16.001 and abs(A.mean() - 8) < 0.3
    assert 0.000999 < dt.min() and dt.max() < 0.1001 and abs(dt.log().mean() - torch.tensor(0.01).log()) < 0.1
    slow = GatedDeltaNet(D, 2, A_range=(1, 1), dt_min=0.007, dt_max=0.007)
    alpha = torch.exp(-slow.A_log.exp() * F.softplus(slow.dt_bias))
    torch.testing.assert_close(alpha, torch.tensor([0.993, 0.993]), rtol=0, atol=1e-4)
    torch.testing.assert_close(alpha**99, torch.tensor([0.5, 0.5]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "make, matrices, more",
    [
        (LinearAttention, 4, 0),
        (Retention, 8, 0),
        (GatedLinearAttention, 4, 16 * 64 + 32 * 16 + 32 + 64 + 32),  # W_a1, W_a2, b_a, b_z, norm
        (DeltaNet, 4, 4 * 3 * 64 + 2 * 64 + 32),  # convolution, W_b, norm
        (GatedDeltaNet, 5, 4 * 3 * 64 + 2 * 2 * 64 + 2 * 2 + 32),  # and W_a, W_b, A_log and dt_bias
        (KimiDeltaAttention, 4, 4 * 3 * 64 + 2 * 64 + 4 * 32 * 64 + 2 + 64 + 32),  # and W_a, W_z of rank K
    ],
)
def test_parameters_by_default_are_those_of_the_recipe(make, matrices, more):
    assert sum(p.numel() for p in make(64, 2).parameters()) == matrices * 64**2 + more


# Norms.


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("gate", [None, "silu", "sigmoid"])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_rms_norm_is_its_formula(groups, gate, gate_first, zero_centred):
    torch.manual_seed(0)
    norm = RMSNorm(6, eps=0.1, groups=groups, gate=gate, gate_first=gate_first, zero_centred=zero_centred).double()
    norm.weight.data.normal_()
    x, z = torch.randn(2, 5, 4, 6, dtype=torch.float64)
    f = {None: torch.ones_like, "silu": F.silu, "sigmoid": torch.sigmoid}[gate](z)
    y = x * f if gate_first else x
    for i in range(0, 6, 6 // groups):
        part = y[..., i : i + 6 // groups]
        part = part / (part.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
        y = torch.cat([y[..., :i], part, y[..., i + 6 // groups :]], -1)
    y = y * (norm.weight + zero_centred)
    torch.testing.assert_close(norm(x) if gate is None else norm(x, z), y if gate_first else y * f, **TIGHT)


def test_rms_norm_computes_in_float32():
    torch.manual_seed(0)
    norm, (x, z) = RMSNorm(64, gate="silu"), torch.randn(2, 8, 64).bfloat16()
    norm.weight.data.normal_()
    assert torch.equal(norm(x, z), norm(x.float(), z.float()).bfloat16())  # rounded once, at the end
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # the square is beyond float16
    assert torch.equal(RMSNorm(4)(x), torch.ones(1, 4, dtype=torch.float16))
    assert RMSNorm(4).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(RMSNorm(4, zero_centred=True).weight, torch.zeros(4)) and RMSNorm(4, weight=False).weight is None
    with pytest.raises(TypeError, match="`z`"):
        RMSNorm(4)(x, x)
    with pytest.raises(TypeError, match="`z`"):
        RMSNorm(4, gate="silu")(x)


def test_layer_scale_scales_channels():
    scale, x = LayerScale(3, initial=0.1), torch.randn(2, 3)
    torch.testing.assert_close(scale(x), 0.1 * x)
    scale.gamma.data = torch.tensor([1.0, 0.0, -2.0])
    torch.testing.assert_close(scale(x), x * torch.tensor([1.0, 0.0, -2.0]))
    assert scale(x.bfloat16()).dtype == torch.bfloat16


def test_an_empty_cache_is_no_memory():
    assert Cache().tensors == [] and Cache().bytes == 0
