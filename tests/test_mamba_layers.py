"""The Mamba and Mamba-2 layers against transformers' own, with every weight off its initial value."""

import pytest
import torch
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from linattn_edu.layers import Mamba, Mamba2

CLOSE = dict(rtol=0, atol=1e-4)
SMALL = dict(vocab_size=11, hidden_size=24, num_hidden_layers=2, state_size=5)

CONFIGS = {
    "mamba": (Mamba, MambaConfig(**SMALL)),
    "mamba, biases": (Mamba, MambaConfig(**SMALL, conv_kernel=3, use_bias=True, use_conv_bias=False, time_step_rank=4)),
    "mamba, narrow": (Mamba, MambaConfig(**SMALL, expand=1, conv_kernel=2, tie_word_embeddings=False)),
    "mamba2": (Mamba2, Mamba2Config(**SMALL, num_heads=6, head_dim=8, n_groups=1, chunk_size=16)),
    "mamba2, groups": (
        Mamba2,
        Mamba2Config(**SMALL, num_heads=12, head_dim=4, n_groups=3, chunk_size=16, conv_kernel=3, use_bias=True),
    ),
    "mamba2, limits": (
        Mamba2,
        Mamba2Config(
            **SMALL, num_heads=4, head_dim=12, n_groups=2, chunk_size=16, use_conv_bias=False, layer_norm_epsilon=1e-2,
            time_step_limit=(0.05, 0.3),
        ),
    ),
}  # fmt: skip

every_config = pytest.mark.parametrize("name", CONFIGS)


def model_of(name, seed=0):
    """A transformers model with random weights, none of them where it started."""
    torch.manual_seed(seed)
    kind, config = CONFIGS[name]
    model = (MambaForCausalLM if kind is Mamba else Mamba2ForCausalLM)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def pair_of(name):
    """Their mixer and our layer."""
    mixer = model_of(name).backbone.layers[1].mixer
    return mixer, CONFIGS[name][0].from_hf(mixer)


def tokens(T, B=2):
    return torch.randn(B, T, 24, generator=torch.Generator().manual_seed(T))


@every_config
@pytest.mark.parametrize("T", [1, 3, 16, 70, 130])
@torch.no_grad()
def test_a_layer_is_transformers_mixer(name, T):
    mixer, layer = pair_of(name)
    expected = mixer(tokens(T))
    torch.testing.assert_close(layer(tokens(T))[0], expected, **CLOSE)
    assert expected.std() > 0.1


@every_config
@torch.no_grad()
def test_token_by_token_is_transformers_whole_forward(name):
    mixer, layer = pair_of(name)
    x, cache, outputs = tokens(40), None, []
    for piece in x.split([20] + [1] * 20, 1):
        y, cache = layer(piece, cache=cache)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), mixer(x), **CLOSE)


class Ours(torch.nn.Module):
    """Our layer where a transformers block expects its mixer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.layer(hidden_states, mask=None if attention_mask is None else attention_mask.bool())[0]


@every_config
@pytest.mark.parametrize("T", [5, 70])
@torch.no_grad()
def test_with_our_layers_the_model_gives_the_same_logits(name, T):
    model, ids = model_of(name), torch.randint(11, (2, T), generator=torch.Generator().manual_seed(0))
    expected = model(ids, use_cache=False).logits
    for block in model.backbone.layers:
        block.mixer = Ours(CONFIGS[name][0].from_hf(block.mixer))
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **CLOSE)


@pytest.mark.parametrize("name", [name for name in CONFIGS if not CONFIGS[name][1].use_bias])
@torch.no_grad()
def test_left_padding_is_transformers_left_padding(name):
    """Without biases; with them transformers lets padding into the convolution."""
    mixer, layer = pair_of(name)
    x, mask = tokens(30), torch.arange(30) >= torch.tensor([[0], [17]])
    y, expected = layer(x, mask=mask)[0], mixer(x, attention_mask=mask)
    torch.testing.assert_close(y[mask], expected[mask], **CLOSE)


@every_config
def test_the_weights_are_copies_in_the_same_dtype(name):
    mixer, layer = pair_of(name)
    theirs, ours = dict(mixer.named_parameters()), dict(layer.named_parameters())
    assert sorted(p.numel() for p in theirs.values()) == sorted(p.numel() for p in ours.values())
    before = layer(tokens(4))[0]
    with torch.no_grad():
        for p in theirs.values():
            p.zero_()
    assert torch.equal(layer(tokens(4))[0], before)
    assert {p.dtype for p in CONFIGS[name][0].from_hf(mixer.double()).parameters()} == {torch.float64}


def test_another_activation_is_refused():
    config = MambaConfig(**SMALL, hidden_act="gelu")
    with pytest.raises(ValueError, match="`mixer`: got the activation 'gelu'"):
        Mamba.from_hf(MambaForCausalLM(config).backbone.layers[0].mixer)


@pytest.mark.parametrize("layer", [Mamba, Mamba2])
def test_a_mixer_of_another_kind_is_refused(layer):
    """FalconMamba's has the weights of Mamba's, and norms without weights in between."""
    with pytest.raises(TypeError, match="`mixer`: got FalconMambaMixer, expected a Mamba2?Mixer"):
        layer.from_hf(FalconMambaForCausalLM(FalconMambaConfig(**SMALL)).backbone.layers[0].mixer)
