"""Kimi Linear: three layers of Kimi Delta Attention to one of latent attention without positions, a mixture of experts.

    x -> norm -> KDA or MLA -> + x
      -> norm -> 8 of 256 experts and a shared one (in the first layer one dense SwiGLU) -> + x

Source: Kimi Team 2025 (2510.26692); the sizes are those of the released Kimi-Linear-48B-A3B.
"""

from dataclasses import dataclass

from linattn_edu import validate
from linattn_edu.layers import KimiDeltaAttention, LatentAttention, MixtureOfExperts, RMSNorm, SwiGLU
from linattn_edu.layers.hf import instance
from linattn_edu.models import hf
from linattn_edu.models.causal_lm import Block, CausalLM


@dataclass(frozen=True)
class KimiLinearConfig:
    """Sizes, those of Kimi-Linear-48B-A3B unless given.

    Attributes:
        vocabulary, width: number of ids, D.
        mixers: "kda" or "latent_attention" for each layer; 27 layers, of which 4, 8, ..., 24 and 27 attend, if None.
        mlps: "moe" or "dense" for each layer; "dense" in the first and "moe" in the others if None.
        linear_heads, linear_head_dim, conv_size: H, K = V and W of KDA.
        heads, latent, nope_dim, rope_dim, v_dim, q_latent: those of `LatentAttention`.
        bias: give W_D and W_O of it a bias.
        experts, top_k, expert_hidden, shared_hidden: the mixture, with sigmoid scores and a correction bias.
        groups, top_groups, renormalize, scale: its routing.
        dense_hidden: width of the SwiGLU of a "dense" layer.
        eps: of all norms but the two inside latent attention, which have 1e-6.
        tied: the head's weight is the embedding's.
    """

    vocabulary: int = 163_840
    width: int = 2304
    mixers: tuple[str, ...] | None = None
    mlps: tuple[str, ...] | None = None
    linear_heads: int = 32
    linear_head_dim: int = 128
    conv_size: int = 4
    heads: int = 32
    latent: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    q_latent: int | None = None
    bias: bool = False
    experts: int = 256
    top_k: int = 8
    expert_hidden: int = 1024
    shared_hidden: int = 1024
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 2.446
    dense_hidden: int = 9216
    eps: float = 1e-5
    tied: bool = False

    def __post_init__(self):
        released = 6 * (3 * ["kda"] + ["latent_attention"]) + ["kda", "kda", "latent_attention"]
        object.__setattr__(self, "mixers", tuple(released if self.mixers is None else self.mixers))  # JSON gives lists
        mlps = ("dense",) + ("moe",) * (len(self.mixers) - 1) if self.mlps is None else tuple(self.mlps)
        object.__setattr__(self, "mlps", mlps)
        validate.names("mixers", self.mixers, ("kda", "latent_attention"))
        validate.names("mlps", mlps, ("moe", "dense"))
        if len(mlps) != len(self.mixers):
            raise ValueError(f"`mlps`: got {len(mlps)} names, expected one for each of the {len(self.mixers)} mixers")


class KimiLinear(CausalLM):
    """The model.

    Args:
        config: its sizes. `KimiLinear(KimiLinearConfig())` has 49 billion parameters: build it under
            `torch.device("meta")` to count them.
    """

    Config = KimiLinearConfig

    def __init__(self, config):
        def norm():
            return RMSNorm(config.width, eps=config.eps)

        blocks = (
            Block(self._mixers[mixer](config), self._mlps[mlp](config), norm)
            for mixer, mlp in zip(config.mixers, config.mlps)
        )
        super().__init__(config, blocks, norm())

    _mixers = {
        "kda": lambda c: KimiDeltaAttention(
            c.width, c.linear_heads, key_dim=c.linear_head_dim, conv_size=c.conv_size, eps=c.eps
        ),
        "latent_attention": lambda c: LatentAttention(
            c.width, c.heads, latent=c.latent, nope_dim=c.nope_dim, rope_dim=c.rope_dim, v_dim=c.v_dim,
            q_latent=c.q_latent, bias=c.bias,
        ),
    }  # fmt: skip
    _mlps = {
        "moe": lambda c: MixtureOfExperts(
            c.width, c.expert_hidden, c.experts, c.top_k, shared=c.shared_hidden, scoring="sigmoid",
            renormalize=c.renormalize, scale=c.scale, groups=c.groups, top_groups=c.top_groups,
        ),
        "dense": lambda c: SwiGLU(c.width, c.dense_hidden),
    }  # fmt: skip

    @classmethod
    def from_hf(cls, hf_model):
        """The same model as a `KimiLinearForCausalLM` of transformers, in eval mode.

        Args:
            hf_model: the model; its weights are copied.

        Raises:
            ValueError: a configuration that these layers do not know.
            TypeError: what is no such model, for instance its name.
        """
        instance("hf_model", hf_model, "KimiLinearForCausalLM")
        return hf.assemble(cls, hf_model, hf.kimi_linear_config(hf_model.config), hf.kimi_linear_weights(hf_model))
