"""The plain language model: one function however its tokens arrive, for every mixer; its sizes and its files."""

import dataclasses
import json
import sys

import pytest
import torch

from linattn_edu import layers, models
from linattn_edu.models import MIXERS, LanguageModel, LanguageModelConfig

OPTIONS = {
    "latent_attention": dict(latent=6, nope_dim=4, rope_dim=2, v_dim=5),
    "gla": dict(gate_rank=3),
    "mamba": dict(state_dim=3),
    "mamba2": dict(head_dim=4, state_dim=5),
}
PATTERNS = {
    **{name: (name, name) for name in MIXERS},
    "hybrid": ("gated_deltanet", "kda", "softmax", "mamba2", "gated_attention", "retention"),
}
EVERY = pytest.mark.parametrize("pattern", PATTERNS)


def shaken(pattern, dtype=torch.float64, seed=0, **changes):
    """A model with every parameter off its initial value."""
    torch.manual_seed(seed)
    sizes = dict(vocabulary=31, width=12, heads=2, mixers=PATTERNS[pattern], hidden=10, options=OPTIONS)
    model = LanguageModel(LanguageModelConfig(**(sizes | changes)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model.to(dtype).eval()


def text(B, T, seed=1):
    return torch.randint(31, (B, T), generator=torch.Generator().manual_seed(seed))


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


def test_model_is_its_blocks():
    """norm, mixer, residual, norm, SwiGLU, residual; LayerScale on both branches; the norm before the head."""
    model, ids = shaken("hybrid", tied=False, layer_scale=0.3), text(2, 5)
    x = model.embedding.weight[ids]
    for block in model.blocks:
        y, _ = block.mixer(block.mixer_norm(x))
        x = x + block.mixer_scale.gamma * y
        a, b = (block.mlp_norm(x) @ block.mlp.up.weight.T).chunk(2, -1)
        x = x + block.mlp_scale.gamma * ((a * a.sigmoid() * b) @ block.mlp.down.weight.T)
    rms = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * model.norm.weight
    close(model(ids)[0], rms @ model.head.weight.T)


@EVERY
def test_mixers_are_those_that_the_configuration_names(pattern):
    model = shaken(pattern)
    assert [type(block.mixer) for block in model.blocks] == [MIXERS[name] for name in PATTERNS[pattern]]


@EVERY
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_prefill_and_decode_are_one_forward(pattern, dtype, tolerance):
    model, ids = shaken(pattern, dtype), text(2, 70)
    with torch.no_grad():
        whole, _ = model(ids)
        for pieces in ([65, 1, 1, 1, 1, 1], [3, 30, 37]):
            logits, cache = [], None
            for piece in ids.split(pieces, 1):
                y, cache = model(piece, cache)
                logits.append(y)
            close(torch.cat(logits, 1), whole, tolerance * whole.abs().max().item())


@EVERY
def test_padding_and_packing_change_nothing(pattern):
    model, ids = shaken(pattern), text(2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1, 0]]).bool()
    padded = torch.zeros(2, 9, dtype=torch.int64).index_put((mask,), ids.flatten())
    with torch.no_grad():
        logits, cache = model(ids)
        out, other = model(padded, mask=mask)
        close(out[mask].view_as(logits), logits)
        close(model(ids[:, :1], other)[0], model(ids[:, :1], cache)[0])
        packed, _ = model(ids.view(1, 14), cu_seqlens=torch.tensor([0, 7, 14]))
        close(packed.view_as(logits), logits)


@EVERY
def test_no_token_sees_a_later_one(pattern):
    model, ids = shaken(pattern), text(1, 12)
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % 31
    with torch.no_grad():
        moved = (model(ids)[0] - model(changed)[0]).abs().amax(-1)[0]
    assert moved[:7].max() < 1e-12 and moved[7:].min() > 1e-9


@EVERY
def test_every_parameter_learns(pattern):
    model, ids = shaken(pattern), text(2, 9)
    logits, _ = model(ids)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any() for p in model.parameters())


# Sizes.


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_are_those_of_a_real_cache(pattern, dtype):
    model = shaken(pattern, dtype)
    for T in (0, 1, 2, 30):
        with torch.no_grad():
            _, cache = model(text(1, T))
        assert model.cache_bytes(T) == sum(each.bytes for each in cache)


def test_parameters_are_counted_once():
    """D = 12, F = 10, 31 ids: attention 4 D^2, SwiGLU 3 D F, two norms of D a layer, and a last one."""
    attention, mlp = 4 * 12 * 12, 3 * 12 * 10
    layers_of_two = 2 * (attention + mlp + 2 * 12)
    tied, free = shaken("softmax"), shaken("softmax", tied=False)
    assert tied.parameters_total == 31 * 12 + layers_of_two + 12
    assert free.parameters_total == tied.parameters_total + 31 * 12
    assert tied.parameters_active == tied.parameters_total
    assert free.parameters_active == free.parameters_total - 30 * 12, "a token meets its row of an untied embedding"


def test_break_even_is_where_the_caches_meet():
    sizes = dict(vocabulary=31, width=32, heads=2, hidden=10)
    make = lambda *mixers: LanguageModel(LanguageModelConfig(mixers=mixers, **sizes))
    hybrid, softmax, linear = make("kda", "softmax"), make("softmax", "softmax"), make("linear", "linear")
    T = hybrid.break_even(softmax)
    more = [hybrid.cache_bytes(t) - softmax.cache_bytes(t) for t in (T - 1, T)]
    assert T > 5 and more[0] > 0 >= more[1]
    assert softmax.break_even(hybrid) is None and softmax.break_even(softmax) == 0
    assert linear.break_even(make("kda", "kda")) == 0 and make("kda", "kda").break_even(linear) is None


def test_a_cache_of_another_depth_is_refused():
    _, cache = shaken("softmax")(text(1, 3))
    with pytest.raises(ValueError, match="`cache`: got one of 2 layers, expected the 6 of this model"):
        shaken("hybrid")(text(1, 3), cache)
    with pytest.raises(ValueError, match=r"`ids`: got shape \[3\], expected \[B, T\]"):
        shaken("softmax")(text(1, 3)[0])


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(mixers=("softmax", "attention")), "`mixers`: got 'attention', expected names among softmax, gated_atten"),
        (dict(options={"sofmax": {}}), "`options`: got 'sofmax', expected names among softmax"),
        (dict(norm="batch"), "`norm`: got 'batch', expected names among rms, layer"),
    ],
)
def test_bad_configurations_are_named(changes, message):
    with pytest.raises(ValueError) as error:
        LanguageModelConfig(**changes)
    assert message in str(error.value)


def test_configurations_survive_json():
    config = LanguageModelConfig(mixers=PATTERNS["hybrid"], options=OPTIONS, layer_scale=0.1, norm="layer")
    assert LanguageModelConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


# The start.


@EVERY
def test_a_new_model_keeps_the_scale_of_its_stream(pattern):
    """Logits of a tied model start small, and no branch of eight layers blows the stream up."""
    torch.manual_seed(0)
    mixers = tuple(PATTERNS[pattern][i % len(PATTERNS[pattern])] for i in range(8))
    config = LanguageModelConfig(vocabulary=64, width=64, heads=2, mixers=mixers, hidden=64, options=OPTIONS)
    model = LanguageModel(config)
    with torch.no_grad():
        x = model.embedding(torch.randint(64, (2, 40)))
        start = x.square().mean()
        for block in model.blocks:
            x, _ = block(x)
    assert 0.1 < x.square().mean() - start < 10  # the embedding has mean square 1/64, each branch adds about 1/16


def test_special_starts_are_left_alone():
    """Gates and Mamba's step sizes keep the start that their layers draw."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(width=64, heads=2, mixers=("gated_deltanet", "kda", "mamba", "mamba2")))
    gdn, kda, mamba, mamba2 = (block.mixer for block in model.blocks)
    for layer in (gdn, kda, mamba, mamba2):
        dt = torch.nn.functional.softplus(layer.dt_bias)
        assert 0.0009 < dt.min() and dt.max() < 0.101
    assert mamba.dt_proj.weight.abs().max() <= mamba.dt_proj.weight.shape[1] ** -0.5
    assert abs(gdn.q_proj.weight.std() * 8 - 1) < 0.05


def test_what_is_added_to_the_stream_starts_small():
    """Four layers add eight times: the last projection of each branch has 1 / sqrt(8) of the usual scale."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(width=64, heads=2, mixers=4 * ("gated_deltanet",), hidden=100))
    config = models.Qwen3NextConfig(
        256, 64, 4 * ("gated_attention",), heads=2, kv_heads=2, head_dim=32, rope_channels=8, experts=16,
        expert_hidden=100, shared_hidden=100, top_k=2,
    )  # fmt: skip
    mixture = models.Qwen3Next(config).blocks[0].mlp
    usual = lambda weight: (weight.std() * weight.shape[-1] ** 0.5).item()
    mixer, mlp = model.blocks[1].mixer, model.blocks[1].mlp
    for weight in (mixer.o_proj.weight, mlp.down.weight, mixture.down, mixture.shared.down.weight):
        assert abs(usual(weight) * 8**0.5 - 1) < 0.05
    for weight in (mixer.q_proj.weight, mlp.up.weight, mixture.up, mixture.shared.up.weight):
        assert abs(usual(weight) - 1) < 0.05


# Files.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_comes_back_bit_for_bit(tied, dtype, tmp_path):
    model, ids = shaken("hybrid", dtype, tied=tied), text(2, 9)
    model.save(tmp_path / "model.safetensors")
    back = LanguageModel.load(tmp_path / "model.safetensors")
    assert back.config == model.config and not back.training
    assert (back.head.weight is back.embedding.weight) == tied
    for (name, x), (other, y) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other and x.dtype == y.dtype and torch.equal(x, y)
    with torch.no_grad():
        assert torch.equal(model(ids)[0], back(ids)[0])
    assert all(p.requires_grad for p in back.parameters())


def test_a_file_of_another_model_is_refused(tmp_path):
    shaken("softmax").save(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="`path`: got a file of the model LanguageModel, expected ByteLM"):
        models.ByteLM.load(tmp_path / "model.safetensors")


def test_a_feature_map_that_no_file_can_hold_is_refused_with_advice(tmp_path):
    path = tmp_path / "model.safetensors"
    model = shaken("linear", options={"linear": {"feature_map": torch.nn.functional.relu}})
    with pytest.raises(ValueError, match="`config`: got function <function relu.*name the feature map, .*torch.save"):
        model.save(path)
    assert not path.exists()
    shaken("linear", options={"linear": {"feature_map": "relu"}}).save(path)
    assert LanguageModel.load(path).config.options["linear"] == {"feature_map": "relu"}


def test_without_safetensors_files_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    for use in (shaken("softmax").save, LanguageModel.load):
        words = rf'`{use.__name__}` needs safetensors: pip install "linattn_edu\[models\]"'
        with pytest.raises(ImportError, match=words):
            use(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "ids, error, message",
    [
        (torch.arange(5), ValueError, r"`ids`: got shape \[5\], expected \[B, T\]: ids\[None\] for one prompt"),
        (torch.zeros(1, 5), ValueError, "`ids`: got dtype torch.float32, expected torch.int32 or torch.int64"),
        ([[1, 2]], TypeError, r"`ids`: got list \[\[1, 2\]\], expected an integer tensor \[B, T\]"),
    ],
)
def test_what_is_no_ids_is_named(ids, error, message):
    for read in (shaken("softmax"), shaken("softmax").hidden):
        with pytest.raises(error, match=message):
            read(ids)


def test_byte_lm_is_a_language_model():
    """The preset of the first chapters, with other names for the same sizes."""
    mixers, options = ("softmax", "linear"), {"softmax": {"rope_base": None}, "linear": {"rope_base": 50.0}}
    byte = models.ByteLMConfig(width=16, heads=2, mixers=mixers, hidden=20, rope=("linear",), rope_base=50.0)
    general = LanguageModelConfig(256, 16, 2, mixers, 20, options)
    model, same = models.ByteLM(byte), LanguageModel(general)
    same.load_state_dict(model.state_dict())
    ids = torch.randint(256, (1, 9))
    assert torch.equal(model(ids)[0], same(ids)[0]) and isinstance(model, LanguageModel)


def test_qkv_of_linear_attention_follows_its_place():
    model = shaken("linear", options={"linear": {"rope_base": 30.0}})
    layer, x = model.blocks[0].mixer, torch.randn(1, 9, 12, dtype=torch.float64)
    whole, late = layer.qkv(x), layer.qkv(x[:, 4:], start=4)
    for a, b in zip(whole, late):
        close(a[:, 4:], b)
    q, k, v = whole
    o, _ = layers.linear_attention.linear.recurrent(q, k, v)
    close(layer.o_proj(o.flatten(2)), layer(x)[0])
    assert (layer.qkv(x)[0] - layer.qkv(x, start=1)[0]).abs().max() > 1e-2
