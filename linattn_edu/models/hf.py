"""Models of transformers under our names: their configurations and weights, handed over as they are."""

import torch


def refuse(given, **expected):
    """Check that fields of a configuration, `given` by name, have the only values that our layers know.

    Raises:
        ValueError: a field has another value.
    """
    for name, only in expected.items():
        value = getattr(given, name, only)
        if value != only:
            raise ValueError(f"`hf_model`: got a configuration with {name} = {value!r}, expected {only!r}")


def inside(prefix, weights):
    """The same weights one level down."""
    return {f"{prefix}.{name}": weight for name, weight in weights.items()}


def linears(module, **names):
    """Weights, and biases where there are some, of Linear or norm modules: ours = theirs."""
    weights = {}
    for ours, theirs in names.items():
        each = module.get_submodule(theirs)
        weights |= inside(ours, {name: p for name, p in each.named_parameters()})
    return weights


def swiglu(module):
    """gate_proj above up_proj, down_proj."""
    return {
        "up.weight": torch.cat([module.gate_proj.weight, module.up_proj.weight]),
        "down.weight": module.down_proj.weight,
    }


def experts(module):
    """The routed experts, which transformers stacks as we do."""
    return {"up": module.gate_up_proj, "down": module.down_proj}


def assemble(cls, hf_model, sizes, weights):
    """The model of class `cls` with copies of these weights, if they are all of `hf_model`'s.

    Raises:
        ValueError: some of its numbers are left over.
    """
    theirs = hf_model.state_dict()
    left = sum(x.numel() for x in theirs.values()) - sum(x.numel() for x in weights.values())
    if left:
        raise ValueError(f"`hf_model`: got {left} numbers more than the {cls.__name__} of its configuration holds")
    tied = hf_model.lm_head.weight is hf_model.model.embed_tokens.weight  # not every model heeds tie_word_embeddings
    return cls.from_weights(cls.Config(**sizes, tied=tied), {name: x.detach().clone() for name, x in weights.items()})


def qwen3_next_config(c):
    rope = c.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"`hf_model`: got rope_type = {rope['rope_type']!r}, expected 'default'")
    refuse(c, hidden_act="silu")
    steps = range(1, c.num_hidden_layers + 1)
    sparse = [c.num_experts > 0 and i - 1 not in c.mlp_only_layers and i % c.decoder_sparse_step == 0 for i in steps]
    return dict(
        vocabulary=c.vocab_size, width=c.hidden_size,
        mixers=["gated_attention" if kind == "full_attention" else "gated_deltanet" for kind in c.layer_types],
        mlps=["moe" if each else "dense" for each in sparse],
        key_heads=c.linear_num_key_heads, value_heads=c.linear_num_value_heads, key_dim=c.linear_key_head_dim,
        value_dim=c.linear_value_head_dim, conv_size=c.linear_conv_kernel_dim, heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads, head_dim=c.head_dim, rope_base=rope["rope_theta"],
        rope_channels=int(c.head_dim * rope.get("partial_rotary_factor", 1.0)), bias=c.attention_bias,
        experts=c.num_experts, top_k=c.num_experts_per_tok, expert_hidden=c.moe_intermediate_size,
        shared_hidden=c.shared_expert_intermediate_size, renormalize=c.norm_topk_prob, dense_hidden=c.intermediate_size,
        eps=c.rms_norm_eps,
    )  # fmt: skip


def qwen3_next_weights(hf_model):
    body = hf_model.model
    weights = linears(body, embedding="embed_tokens", norm="norm") | linears(hf_model, head="lm_head")
    for i, layer in enumerate(body.layers):
        linear = layer.block_type == "linear_attention"
        mixer = _gated_deltanet(layer.linear_attn) if linear else _gated_attention(layer.self_attn)
        mlp = _qwen3_next_mixture(layer.mlp) if hasattr(layer.mlp, "experts") else swiglu(layer.mlp)
        norms = linears(layer, mixer_norm="input_layernorm", mlp_norm="post_attention_layernorm")
        weights |= inside(f"blocks.{i}", norms | inside("mixer", mixer) | inside("mlp", mlp))
    return weights


def _gated_deltanet(m):
    """Theirs projects to (q, k, v, z) and (b, a) key head by key head, each with its value heads; ours part by part."""
    each = m.num_v_heads // m.num_k_heads
    qkvz = m.in_proj_qkvz.weight.unflatten(0, (m.num_k_heads, -1))
    parts = qkvz.split([m.head_k_dim, m.head_k_dim, each * m.head_v_dim, each * m.head_v_dim], 1)
    parts = [*parts, *m.in_proj_ba.weight.unflatten(0, (m.num_k_heads, -1)).split([each, each], 1)]
    weights = {f"{name}_proj.weight": part.flatten(0, 1) for name, part in zip("qkvzba", parts)}
    weights |= {"conv.weight": m.conv1d.weight[:, 0], "A_log": m.A_log, "dt_bias": m.dt_bias}
    return weights | linears(m, norm="norm", o_proj="out_proj")


def _gated_attention(m):
    """Their q_proj holds query and gate, head by head."""
    weights = linears(m, k_proj="k_proj", v_proj="v_proj", o_proj="o_proj", q_norm="q_norm", k_norm="k_norm")
    for name, both in m.q_proj.named_parameters():
        both = both.unflatten(0, (-1, 2, m.head_dim))
        weights |= {f"q_proj.{name}": both[:, 0].flatten(0, 1), f"gate_proj.{name}": both[:, 1].flatten(0, 1)}
    return weights


def _qwen3_next_mixture(m):
    weights = experts(m.experts) | linears(m, shared_gate="shared_expert_gate")
    return weights | {"router.weight": m.gate.weight} | inside("shared", swiglu(m.shared_expert))


def kimi_linear_config(c):
    refuse(c, hidden_act="silu", num_key_value_heads=c.num_attention_heads)
    return dict(
        vocabulary=c.vocab_size, width=c.hidden_size,
        mixers=["latent_attention" if kind == "full_attention" else "kda" for kind in c.layer_types],
        mlps=["moe" if kind == "sparse" else "dense" for kind in c.mlp_layer_types],
        linear_heads=c.linear_num_heads, linear_head_dim=c.linear_head_dim, conv_size=c.linear_conv_kernel_dim,
        heads=c.num_attention_heads, latent=c.kv_lora_rank, nope_dim=c.qk_nope_head_dim, rope_dim=c.qk_rope_head_dim,
        v_dim=c.v_head_dim, q_latent=c.q_lora_rank, bias=c.attention_bias, experts=c.num_local_experts,
        top_k=c.num_experts_per_tok, expert_hidden=c.moe_intermediate_size,
        shared_hidden=c.moe_intermediate_size * c.n_shared_experts, groups=c.n_group, top_groups=c.topk_group,
        renormalize=c.norm_topk_prob, scale=c.routed_scaling_factor, dense_hidden=c.intermediate_size,
        eps=c.rms_norm_eps,
    )  # fmt: skip


def kimi_linear_weights(hf_model):
    body = hf_model.model
    weights = linears(body, embedding="embed_tokens", norm="norm") | linears(hf_model, head="lm_head")
    for i, layer in enumerate(body.layers):
        mixer = (_kda if layer.block_type == "linear_attention" else _latent_attention)(layer.self_attn)
        mlp = _kimi_linear_mixture(layer.mlp) if hasattr(layer.mlp, "experts") else swiglu(layer.mlp)
        norms = linears(layer, mixer_norm="input_layernorm", mlp_norm="post_attention_layernorm")
        weights |= inside(f"blocks.{i}", norms | inside("mixer", mixer) | inside("mlp", mlp))
    return weights


def _kda(m):
    gate, same = m.forget_gate, {name: name for name in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj")}
    weights = linears(m, **same, norm="o_norm", **{"z_proj.0": "g_a_proj", "z_proj.1": "g_b_proj"})
    weights |= linears(gate, **{"a_proj.0": "f_a_proj", "a_proj.1": "f_b_proj"})
    dt_bias = gate.dt_bias.view(m.num_heads, m.head_dim)
    return weights | {"conv.weight": m.conv1d.weight[:, 0], "A_log": gate.A_log.flatten(), "dt_bias": dt_bias}


def _latent_attention(m):
    names = dict(kv_down="kv_a_proj_with_mqa", kv_norm="kv_a_layernorm", kv_up="kv_b_proj", o_proj="o_proj")
    if m.q_lora_rank is None:
        return linears(m, **names, q_proj="q_proj")
    return linears(m, **names, q_down="q_a_proj", q_norm="q_a_layernorm", q_proj="q_b_proj")


def _kimi_linear_mixture(m):
    weights = experts(m.experts) | inside("shared", swiglu(m.shared_experts))
    return weights | {"router.weight": m.gate.weight, "router.correction_bias": m.gate.e_score_correction_bias}
