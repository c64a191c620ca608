"""Qwen3-Next against transformers, and its real size."""

import dataclasses
import json

import pytest
import torch
from hf_models import assert_same_gradients, assert_same_logits, assert_same_padded_logits, shaken
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from linattn_edu import models
from linattn_edu.models import Qwen3Next

SMALL = dict(
    vocab_size=37, hidden_size=32, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
CONFIGS = {
    "3 to 1": {},
    "uneven": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3, num_hidden_layers=3,
        rms_norm_eps=1e-2, layer_types=["full_attention", "linear_attention", "full_attention"], num_experts_per_tok=6,
    ),
    "equal heads": dict(
        linear_num_value_heads=2, num_key_value_heads=4, norm_topk_prob=False, tie_word_embeddings=True,
        attention_bias=True, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    ),
    "dense layers": dict(decoder_sparse_step=2, mlp_only_layers=[3]),
    "all rotated": dict(
        num_hidden_layers=1, layer_types=["full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", CONFIGS)


def hf_model_of(name, seed=0):
    torch.manual_seed(seed)
    return shaken(Qwen3NextForCausalLM(Qwen3NextConfig(**(SMALL | CONFIGS[name]))), seed)


def pair_of(name):
    hf_model = hf_model_of(name)
    return Qwen3Next.from_hf(hf_model), hf_model


@EVERY
@pytest.mark.parametrize("T", [1, 2, 40, 64, 65, 150])
def test_logits_are_those_of_transformers(name, T):
    assert_same_logits(*pair_of(name), T)


@EVERY
def test_token_by_token_is_the_whole_forward_of_transformers(name):
    model, hf_model = pair_of(name)
    assert_same_logits(model, hf_model, 70, [1] * 70)
    assert_same_logits(model, hf_model, 140, [66, 1, 1, 70, 1, 1])


@EVERY
def test_gradients_are_those_of_transformers(name):
    model, hf_model = pair_of(name)
    theirs, first = hf_model.model, model.blocks[0]
    pairs = [(model.embedding.weight, theirs.embed_tokens.weight), (model.norm.weight, theirs.norm.weight)]
    pairs += [(first.mixer_norm.weight, theirs.layers[0].input_layernorm.weight)]
    if "linear_attention" in hf_model.config.layer_types[0]:
        linear = theirs.layers[0].linear_attn
        pairs += [(first.mixer.A_log, linear.A_log), (first.mixer.dt_bias, linear.dt_bias)]
        pairs += [(first.mixer.norm.weight, linear.norm.weight), (first.mixer.o_proj.weight, linear.out_proj.weight)]
    assert_same_gradients(model, hf_model, 70, pairs)


@EVERY
def test_padding_is_that_of_transformers(name):
    assert_same_padded_logits(*pair_of(name))


def test_greedy_continuations_are_those_of_transformers():
    model, hf_model = pair_of("3 to 1")
    ids = torch.arange(12).view(2, 6)
    expected = hf_model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=20, temperature=0), expected)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(hidden_act="gelu"), "hidden_act = 'gelu', expected 'silu'"),
        (
            dict(rope_parameters=ROPE | {"rope_type": "linear", "factor": 2.0}),
            "rope_type = 'linear', expected 'default'",
        ),
    ],
)
def test_what_the_layers_do_not_know_is_refused(change, message):
    hf_model = Qwen3NextForCausalLM(Qwen3NextConfig(**(SMALL | change)))
    with pytest.raises(ValueError) as error:
        Qwen3Next.from_hf(hf_model)
    assert message in str(error.value)


def test_what_is_no_such_model_is_named():
    for given, got in (
        ("some/model", "str 'some/model', expected a Qwen3NextForCausalLM of transformers: load it there first"),
        (None, "nothing .None., expected"),
        (hf_model_of("3 to 1").model, "Qwen3NextModel, expected a Qwen3NextForCausalLM of transformers"),
    ):
        with pytest.raises(TypeError, match=f"`hf_model`: got {got}"):
            Qwen3Next.from_hf(given)


def test_a_forgotten_weight_is_noticed(monkeypatch):
    hf_model = hf_model_of("3 to 1")
    hf_model.model.layers[1].register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="`hf_model`: got 3 numbers more than the Qwen3Next"):
        Qwen3Next.from_hf(hf_model)


def test_the_copy_is_its_own(tmp_path):
    model, hf_model = pair_of("dense layers")
    assert not model.training and all(p.requires_grad for p in model.parameters())
    assert_same_logits(model, hf_model, 5)
    model.save(tmp_path / "model.safetensors")
    assert_same_logits(Qwen3Next.load(tmp_path / "model.safetensors"), hf_model, 5)
    with torch.no_grad():
        model.head.weight.zero_()
    assert hf_model.lm_head.weight.abs().max() > 0
    config = models.Qwen3NextConfig(**json.loads(json.dumps(dataclasses.asdict(model.config))))
    assert config == model.config


# Qwen3-Next-80B-A3B. Nothing is computed on the meta device, and nothing is stored.


@pytest.fixture(scope="module")
def real():
    with torch.device("meta"):
        return Qwen3Next(models.Qwen3NextConfig()).bfloat16()


def with_full_attention(model):
    """The same model with softmax attention in every layer."""
    config = dataclasses.replace(model.config, mixers=("gated_attention",) * len(model.blocks))
    with torch.device("meta"):
        return Qwen3Next(config).bfloat16()


def test_the_real_model_has_80_billion_parameters(real):
    """The model card: 80B in total, 79B without embedding and head, 3B activated."""
    tables = 2 * 151_936 * 2048
    assert real.parameters_total == 79_674_391_296 and round((real.parameters_total - tables) / 1e9) == 79
    # A token meets its row of the embedding and the whole head, as much as 0.3B of these.
    assert real.parameters_active == 3_563_766_528
    assert len(real.blocks) == 48 and sum(type(b.mixer).__name__ == "GatedAttention" for b in real.blocks) == 12


def test_the_parameters_are_those_of_transformers(real):
    """transformers' model of the released configuration, layer by layer, also on the meta device."""
    config = Qwen3NextConfig(intermediate_size=5120, rope_parameters=ROPE)
    with torch.device("meta"):
        hf_model = Qwen3NextForCausalLM(config)
    assert models.Qwen3NextConfig(**models.hf.qwen3_next_config(config)) == real.config
    count = lambda module: sum(p.numel() for p in module.parameters())
    assert count(hf_model) == real.parameters_total
    assert [count(layer) for layer in hf_model.model.layers] == [count(block) for block in real.blocks]


def test_the_real_state_and_kv_bytes(real):
    """2 MiB of float32 state and 48 KiB of convolution a linear layer, 2 KiB a token a full layer, in bfloat16."""
    linear, full = real.blocks[0].mixer, real.blocks[3].mixer
    state, conv, counter = 32 * 128 * 128 * 4, 3 * 8192 * 2, 8
    assert linear.cache_bytes(0, dtype=torch.bfloat16) == state + conv + counter == 2 * 2**20 + 48 * 2**10 + 8
    assert full.cache_bytes(1, dtype=torch.bfloat16) - counter == 2 * 2 * 256 * 2 == 2048
    assert real.cache_bytes(1) - real.cache_bytes(0) == 12 * 2048 == 24 * 2**10


def test_a_linear_layer_is_larger_below_1024_tokens(real):
    """Break-even of the state alone is 2 MiB / 2 KiB; with the convolution's inputs 24 tokens more."""
    linear, full = (real.blocks[i].mixer for i in (0, 3))
    assert 32 * 128 * 128 * 4 // (full.cache_bytes(1, dtype=torch.bfloat16) - 8) == 1024
    bytes_of = lambda layer, T: layer.cache_bytes(T, dtype=torch.bfloat16)
    assert next(T for T in range(2000) if bytes_of(full, T) >= bytes_of(linear, T)) == 1024 + 24
    assert real.break_even(with_full_attention(real)) == 1024 + 24


def test_the_hybrid_saves_three_quarters_only_at_length(real):
    """At 262,144 tokens 25.8 GB for 48 full layers, 6.5 GB for the hybrid: 3.95 times, not 4."""
    full, hybrid = with_full_attention(real).cache_bytes(262_144), real.cache_bytes(262_144)
    assert round(full / 1e9, 1) == 25.8 and round(hybrid / 1e9, 1) == 6.5 and round(full / hybrid, 2) == 3.95
    assert real.cache_bytes(512) > with_full_attention(real).cache_bytes(512)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(mixers=("gated_deltanet", "kda")), "`mixers`: got 'kda', expected names among gated_deltanet, gated_att"),
        (dict(mlps=48 * ("sparse",)), "`mlps`: got 'sparse', expected names among moe, dense"),
        (dict(mlps=("moe",)), "`mlps`: got 1 names, expected one for each of the 48 mixers"),
    ],
)
def test_bad_configurations_are_named(changes, message):
    with pytest.raises(ValueError) as error:
        models.Qwen3NextConfig(**changes)
    assert message in str(error.value)
