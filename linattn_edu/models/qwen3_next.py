"""Qwen3-Next: three layers of Gated DeltaNet to one of gated attention, a mixture of experts in each.

    x -> norm -> Gated DeltaNet or gated attention -> + x
      -> norm -> 10 of 512 experts and a shared one -> + x

Source: the configuration and code of Qwen3-Next-80B-A3B; Yang, Kautz and Hatamizadeh 2025 (Gated DeltaNet), Qiu et al.
2025 (gated attention).
"""

from dataclasses import dataclass

from linattn_edu import validate
from linattn_edu.layers import GatedAttention, GatedDeltaNet, MixtureOfExperts, RMSNorm, SwiGLU
from linattn_edu.layers.hf import instance
from linattn_edu.models import hf
from linattn_edu.models.causal_lm import Block, CausalLM


@dataclass(frozen=True)
class Qwen3NextConfig:
    """Sizes, those of Qwen3-Next-80B-A3B unless given.

    Attributes:
        vocabulary, width: number of ids, D.
        mixers: "gated_deltanet" or "gated_attention" for each layer; 48 layers, of which every fourth attends, if None.
        mlps: "moe" or "dense" for each layer; "moe" in all if None.
        key_heads, value_heads, key_dim, value_dim, conv_size: H, HV, K, V and W of Gated DeltaNet.
        heads, kv_heads, head_dim: HQ, H and K of gated attention.
        rope_base, rope_channels: its rotary positions; 64 of 256 channels turn.
        bias: give its projections a bias.
        experts, top_k, expert_hidden, shared_hidden: the mixture; `renormalize` makes its weights sum to 1.
        dense_hidden: width of the SwiGLU of a "dense" layer.
        eps: of all norms.
        tied: the head's weight is the embedding's.
    """

    vocabulary: int = 151_936
    width: int = 2048
    mixers: tuple[str, ...] | None = None
    mlps: tuple[str, ...] | None = None
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    conv_size: int = 4
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    rope_base: float = 10_000_000.0
    rope_channels: int = 64
    bias: bool = False
    experts: int = 512
    top_k: int = 10
    expert_hidden: int = 512
    shared_hidden: int = 512
    renormalize: bool = True
    dense_hidden: int = 5120
    eps: float = 1e-6
    tied: bool = False

    def __post_init__(self):
        mixers = 12 * (3 * ["gated_deltanet"] + ["gated_attention"]) if self.mixers is None else self.mixers
        object.__setattr__(self, "mixers", tuple(mixers))  # JSON gives lists
        mlps = ("moe",) * len(self.mixers) if self.mlps is None else tuple(self.mlps)
        object.__setattr__(self, "mlps", mlps)
        validate.names("mixers", self.mixers, ("gated_deltanet", "gated_attention"))
        validate.names("mlps", mlps, ("moe", "dense"))
        if len(mlps) != len(self.mixers):
            raise ValueError(f"`mlps`: got {len(mlps)} names, expected one for each of the {len(self.mixers)} mixers")


class Qwen3Next(CausalLM):
    """The model.

    Args:
        config: its sizes. `Qwen3Next(Qwen3NextConfig())` has 80 billion parameters: build it under
            `torch.device("meta")` to count them.

    Norms are zero-centred, except the gated one inside Gated DeltaNet. The released weights have a block more, for
    predicting two tokens at once (MTP); it takes no part in p(next token) and is left out, as in transformers.
    """

    Config = Qwen3NextConfig

    def __init__(self, config):
        def norm():
            return RMSNorm(config.width, eps=config.eps, zero_centred=True)

        blocks = (
            Block(self._mixers[mixer](config), self._mlps[mlp](config), norm)
            for mixer, mlp in zip(config.mixers, config.mlps)
        )
        super().__init__(config, blocks, norm())

    _mixers = {
        "gated_deltanet": lambda c: GatedDeltaNet(
            c.width, c.key_heads, key_dim=c.key_dim, value_heads=c.value_heads, value_dim=c.value_dim,
            conv_size=c.conv_size, eps=c.eps,
        ),
        "gated_attention": lambda c: GatedAttention(
            c.width, c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, rope_base=c.rope_base,
            rope_channels=c.rope_channels, qk_norm=True, zero_centred=True, eps=c.eps, bias=c.bias,
        ),
    }  # fmt: skip
    _mlps = {
        "moe": lambda c: MixtureOfExperts(
            c.width, c.expert_hidden, c.experts, c.top_k, shared=c.shared_hidden, shared_gate=True,
            renormalize=c.renormalize,
        ),
        "dense": lambda c: SwiGLU(c.width, c.dense_hidden),
    }  # fmt: skip

    @classmethod
    def from_hf(cls, hf_model):
        """The same model as a `Qwen3NextForCausalLM` of transformers, in eval mode.

        Args:
            hf_model: the model; its weights are copied.

        Raises:
            ValueError: a configuration that these layers do not know, such as scaled positions.
            TypeError: what is no such model, for instance its name.
        """
        instance("hf_model", hf_model, "Qwen3NextForCausalLM")
        return hf.assemble(cls, hf_model, hf.qwen3_next_config(hf_model.config), hf.qwen3_next_weights(hf_model))
