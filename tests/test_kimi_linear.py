"""Kimi Linear against transformers, and its real size."""

import dataclasses
import json

import pytest
import torch
from hf_models import assert_same_gradients, assert_same_logits, assert_same_padded_logits, shaken
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from linattn_edu import models
from linattn_edu.models import KimiLinear

SMALL = dict(
    vocab_size=37, hidden_size=32, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=4, linear_head_dim=8, linear_num_heads=3, kv_lora_rank=10, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=7, num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=12,
    pad_token_id=None, bos_token_id=1, eos_token_id=2,
    layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention"],
)  # fmt: skip
FEW = dict(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
CONFIGS = {
    "3 to 1": {},
    "groups": dict(n_group=4, topk_group=2, n_shared_experts=2, num_experts_per_tok=2),
    "low-rank queries": FEW | dict(q_lora_rank=9, attention_bias=True, rms_norm_eps=1e-2, tie_word_embeddings=True),
    "raw weights": FEW | dict(norm_topk_prob=False, routed_scaling_factor=0.7, linear_conv_kernel_dim=2),
    "all sparse": FEW | dict(mlp_layer_types=["sparse", "sparse"], num_experts_per_tok=8, linear_head_dim=5),
    "all dense": FEW | dict(mlp_layer_types=["dense", "dense"]),
}
EVERY = pytest.mark.parametrize("name", CONFIGS)


def hf_model_of(name, seed=0):
    torch.manual_seed(seed)
    return shaken(KimiLinearForCausalLM(KimiLinearConfig(**(SMALL | CONFIGS[name]))), seed)


def pair_of(name):
    hf_model = hf_model_of(name)
    return KimiLinear.from_hf(hf_model), hf_model


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
    theirs, last = hf_model.model, model.blocks[-1]
    kda = theirs.layers[-1].self_attn
    pairs = [
        (model.embedding.weight, theirs.embed_tokens.weight),
        (model.norm.weight, theirs.norm.weight),
        (last.mixer_norm.weight, theirs.layers[-1].input_layernorm.weight),
        (last.mixer.dt_bias, kda.forget_gate.dt_bias),
        (last.mixer.A_log, kda.forget_gate.A_log),
        (last.mixer.norm.weight, kda.o_norm.weight),
        (last.mixer.k_proj.weight, kda.k_proj.weight),
    ]
    assert_same_gradients(model, hf_model, 70, pairs)


@EVERY
def test_padding_is_that_of_transformers(name):
    assert_same_padded_logits(*pair_of(name))


def test_greedy_continuations_are_those_of_transformers():
    model, hf_model = pair_of("3 to 1")
    ids = torch.arange(3, 15).view(2, 6)
    expected = hf_model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(model.generate(ids, max_new_tokens=20, temperature=0), expected)


def test_the_correction_bias_takes_part():
    """Without the router's buffer the model would choose other experts."""
    model, hf_model = pair_of("3 to 1")
    for block in model.blocks[1:]:
        assert block.mlp.router.correction_bias.abs().max() > 0.05
        block.mlp.router.correction_bias.zero_()
    with pytest.raises(AssertionError):
        assert_same_logits(model, hf_model, 40)


def test_what_the_layers_do_not_know_is_refused():
    hf_model = KimiLinearForCausalLM(KimiLinearConfig(**(SMALL | dict(hidden_act="gelu"))))
    with pytest.raises(ValueError, match="hidden_act = 'gelu', expected 'silu'"):
        KimiLinear.from_hf(hf_model)


def test_what_is_no_such_model_is_named():
    for given, got in (
        ("some/model", "str 'some/model', expected a KimiLinearForCausalLM of transformers: load it there first"),
        (None, "nothing .None., expected"),
        (hf_model_of("3 to 1").model, "KimiLinearModel, expected a KimiLinearForCausalLM of transformers"),
    ):
        with pytest.raises(TypeError, match=f"`hf_model`: got {got}"):
            KimiLinear.from_hf(given)


def test_a_saved_copy_comes_back(tmp_path):
    model, hf_model = pair_of("groups")
    model.save(tmp_path / "model.safetensors")
    assert_same_logits(KimiLinear.load(tmp_path / "model.safetensors"), hf_model, 5)
    config = models.KimiLinearConfig(**json.loads(json.dumps(dataclasses.asdict(model.config))))
    assert config == model.config


# Kimi-Linear-48B-A3B, on the meta device.


@pytest.fixture(scope="module")
def real():
    with torch.device("meta"):
        return KimiLinear(models.KimiLinearConfig()).bfloat16()


def test_the_real_model_has_48_billion_parameters(real):
    """49.1B with embedding and head; active are 3.1B, the shared expert beside the eight chosen."""
    assert real.parameters_total == 49_122_675_072 and real.parameters_active == 3_106_968_192
    kinds = [type(block.mixer).__name__ for block in real.blocks]
    assert [i for i, kind in enumerate(kinds, 1) if kind == "LatentAttention"] == [4, 8, 12, 16, 20, 24, 27]
    assert kinds.count("KimiDeltaAttention") == 20


def test_the_parameters_are_those_of_transformers(real):
    """transformers' defaults are the released sizes, but for the places of the attending layers."""
    full = [4, 8, 12, 16, 20, 24, 27]
    config = KimiLinearConfig(
        layer_types=["full_attention" if i in full else "linear_attention" for i in range(1, 28)], num_experts_per_tok=8
    )
    with torch.device("meta"):
        hf_model = KimiLinearForCausalLM(config)
    assert models.KimiLinearConfig(**models.hf.kimi_linear_config(config)) == real.config
    count = lambda module: sum(p.numel() for p in module.parameters()) + sum(b.numel() for b in module.buffers())
    assert count(hf_model) == count(real)
    assert [count(layer) for layer in hf_model.model.layers] == [count(block) for block in real.blocks]


def test_the_real_cache(real):
    """2 MiB of state and 72 KiB of convolution a KDA layer; 576 numbers a token in each of the seven others."""
    kda, mla = real.blocks[0].mixer, real.blocks[3].mixer
    assert kda.cache_bytes(0, dtype=torch.bfloat16) == 32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2 + 8
    assert mla.cache_bytes(1, dtype=torch.bfloat16) - 8 == (512 + 64) * 2
    assert real.cache_bytes(1) - real.cache_bytes(0) == 7 * 1152
    state = 32 * 128 * 128 * 4
    assert state / 1152 == pytest.approx(1820.4, abs=0.1), "break-even of a state with the latent of one layer"


def test_the_cache_shrinks_to_7_of_27(real):
    """74.1 % less than latent attention in every layer, not 75 %, and only at length."""
    with torch.device("meta"):
        full = KimiLinear(dataclasses.replace(real.config, mixers=27 * ("latent_attention",))).bfloat16()
    assert round(1 - real.cache_bytes(2**20) / full.cache_bytes(2**20), 3) == 0.739 and round(1 - 7 / 27, 3) == 0.741
    assert real.break_even(full) == 1885 and real.cache_bytes(1884) > full.cache_bytes(1884)
