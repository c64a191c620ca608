"""ByteLM against a NumPy oracle, its queries and keys, its files, and the model that ships."""

import doctest
import hashlib
import shlex
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest
import torch

from linattn_edu import data, models
from linattn_edu.models import ByteLM, ByteLMConfig, rope
from linattn_edu.train import evaluate, loss_by_position


@pytest.fixture(scope="module")
def pretrained():
    return models.pretrained()


def small(seed=0, **changes):
    """A float64 model with every parameter, norms too, off its initial value."""
    torch.manual_seed(seed)
    sizes = dict(width=24, heads=3, mixers=("softmax", "linear", "softmax"), hidden=20)
    model = ByteLM(ByteLMConfig(**(sizes | changes))).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def text(T, B=2):
    x, _ = data.windows("validation", length=T, count=B)
    return x


# The oracle: one head, one pair of positions at a time, complex rotation, no torch.


def rotated(x, base):
    """x [T, K] -> each pair (i, i + K/2) as a complex number times exp(i t base^(-2i/K))."""
    T, K = x.shape
    z = x[:, : K // 2] + 1j * x[:, K // 2 :]
    z = z * np.exp(1j * np.arange(T)[:, None] * base ** (-2 * np.arange(K // 2) / K))
    return np.concatenate([z.real, z.imag], axis=1)


def attend(name, q, k, v):
    o = np.zeros_like(v)
    for t in range(len(q)):
        if name == "softmax":
            weight = np.exp(k[: t + 1] @ q[t] / np.sqrt(q.shape[1]))
            o[t] = weight @ v[: t + 1] / weight.sum()
        else:
            phi = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
            weight = phi(k[: t + 1]) @ phi(q[t])
            o[t] = weight @ v[: t + 1] / (weight.sum() + 1e-6)
    return o


def oracle(model, ids):
    """ids [T] -> logits [T, 256]."""
    config = model.config
    w = {name: p.detach().numpy() for name, p in model.state_dict().items()}
    norm = lambda x, name: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[name + ".weight"]
    x, D = w["embedding.weight"][ids], config.width
    K = D // config.heads
    for i, name in enumerate(config.mixers):
        p = f"blocks.{i}."
        projected = [norm(x, p + "mixer_norm") @ w[p + f"mixer.{each}_proj.weight"].T for each in "qkv"]
        heads = []
        for h in range(config.heads):
            q, k, v = (each[:, h * K : (h + 1) * K] for each in projected)
            if name in config.rope:
                q, k = rotated(q, config.rope_base), rotated(k, config.rope_base)
            heads.append(attend(name, q, k, v))
        x = x + np.concatenate(heads, axis=1) @ w[p + "mixer.o_proj.weight"].T
        up = norm(x, p + "mlp_norm") @ w[p + "mlp.up.weight"].T
        gate, value = up[:, : config.hidden], up[:, config.hidden :]
        x = x + (gate / (1 + np.exp(-gate)) * value) @ w[p + "mlp.down.weight"].T
    return norm(x, "norm") @ w["head.weight"].T


@pytest.mark.parametrize("T", [1, 2, 67, 130])
@pytest.mark.parametrize(
    "changes", [{}, {"tied": False}, {"rope": ("softmax", "linear"), "rope_base": 50.0}, {"rope": ()}]
)
def test_model_is_its_formulas(T, changes):
    model, ids = small(**changes), text(T)
    with torch.no_grad():
        logits, _ = model(ids)
    assert logits.shape == (2, T, 256)
    for row, each in zip(ids, logits):
        np.testing.assert_allclose(each.numpy(), oracle(model, row.numpy()), rtol=0, atol=1e-10)


def test_logits_see_the_past_alone():
    model, ids = small(), text(40, B=1)
    changed = ids.clone()
    changed[0, 25] ^= 1
    with torch.no_grad():
        difference = (model(ids)[0] - model(changed)[0]).abs().amax(-1)[0]
    assert difference[:25].max() == 0 and difference[25:].min() > 0


def test_qkv_is_what_the_mixers_see(pretrained):
    """Softmax over the handed-out q and k, applied to v, gives back each layer's mixer output."""
    ids, outputs = text(50), []
    hooks = [b.mixer.register_forward_hook(lambda m, i, o: outputs.append(o[0])) for b in pretrained.blocks]
    with torch.no_grad():
        pretrained(ids)
        for hook in hooks:
            hook.remove()
        seen = pretrained.qkv(ids)
    assert len(seen) == len(outputs) == len(pretrained.blocks)
    for (q, k, v), output, block in zip(seen, outputs, pretrained.blocks):
        assert q.shape == k.shape == v.shape == (2, 50, 2, 32)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * 32**-0.5
        weights = scores.masked_fill(~torch.ones(50, 50).tril().bool(), -torch.inf).softmax(-1)
        o = torch.einsum("bhts,bshv->bthv", weights, v).flatten(2)
        torch.testing.assert_close(block.mixer.o_proj(o), output, rtol=1e-4, atol=1e-5)


def test_rope_turns_positions_into_differences():
    q, k = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64).unbind(0)
    at = lambda x, t: rope(x, base=100.0, start=t)
    dot = lambda s, t: (at(q, s) * at(k, t)).sum(-1)
    for s, t in [(0, 0), (5, 2), (3, 40)]:
        torch.testing.assert_close(dot(s, t), dot(s + 11, t + 11), rtol=0, atol=1e-12)
    assert (dot(5, 2) - dot(5, 3)).abs().min() > 1e-3
    torch.testing.assert_close(at(q, 7).norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(at(q, 0), q, rtol=0, atol=0)


def test_rope_of_a_later_part_is_a_part_of_rope():
    x = torch.randn(2, 20, 3, 8)
    torch.testing.assert_close(rope(x, start=4)[:, 9:], rope(x[:, 9:], start=13), rtol=0, atol=0)


def test_tied_head_is_the_embedding():
    tied, free = small(tied=True), small(tied=False)
    assert tied.head.weight is tied.embedding.weight and free.head.weight is not free.embedding.weight
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert count(free) - count(tied) == 256 * 24


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 36, "heads": 5}, "`width`: got 36, expected a multiple of 2 * heads = 10"),
        ({"width": 9, "heads": 3}, "`width`: got 9, expected a multiple of 2 * heads = 6"),
        ({"mixers": ("softmax", "kda")}, "`mixers`: got 'kda', expected names among softmax, linear"),
        ({"rope": ("soft",)}, "`rope`: got 'soft', expected names among softmax, linear"),
    ],
)
def test_bad_configurations_are_named(changes, message):
    with pytest.raises(ValueError) as error:
        ByteLMConfig(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize("tied", [True, False])
def test_saved_weights_come_back_rounded_to_float16(tied, tmp_path):
    model = small(tied=tied).float()
    packed = models.save(model, tmp_path / "m.npz.xz")
    assert (tmp_path / "m.npz.xz").read_bytes() == packed
    back = models.load(packed, model.config)
    assert not back.training
    for (name, p), (other, r) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert name == other and torch.equal(p.half().float(), r)
    assert (back.head.weight is back.embedding.weight) == tied


def test_weights_of_another_configuration_are_refused(tmp_path):
    packed = models.save(small(), tmp_path / "m")
    with pytest.raises(ValueError, match="`packed`: weights blocks.0.mlp.down.weight, blocks.0.mlp.up"):
        models.load(packed, ByteLMConfig(24, 3, ("softmax", "linear", "softmax"), 21))
    with pytest.raises(ValueError, match="`packed`: weights blocks.2"):
        models.load(packed, ByteLMConfig(24, 3, ("softmax", "linear"), 20))


# The shipped model.


SHIPPED = pytest.mark.parametrize("mixer", ["softmax", "linear"])


@SHIPPED
def test_shipped_file_is_the_recorded_one(mixer):
    record, folder = models.pretrained_record(mixer), files("linattn_edu.models").joinpath("weights")
    packed = folder.joinpath(f"byte_lm_{mixer}.npz.xz").read_bytes()
    assert hashlib.sha256(packed).hexdigest() == record["sha256"]
    assert len(packed) < 350_000
    assert record["parameters"] == sum(p.numel() for p in models.pretrained(mixer).parameters())


def test_shipped_models_differ_in_the_mixer_alone():
    softmax, linear = (models.pretrained_record(mixer) for mixer in ("softmax", "linear"))
    for key in ("parameters", "steps", "batch", "length", "lr", "seed"):
        assert softmax[key] == linear[key]
    different = {key for key, x in softmax["config"].items() if linear["config"][key] != x}
    assert different == {"mixers", "rope"} and "linear" in linear["config"]["rope"]
    with pytest.raises(ValueError, match="`mixer`: got 'gla', expected one of softmax, linear"):
        models.pretrained("gla")


@SHIPPED
def test_recorded_command_is_the_recorded_recipe(mixer):
    from linattn_edu.train.__main__ import arguments

    record = models.pretrained_record(mixer)
    start, module, argv = record["command"].partition("python -m linattn_edu.train ")
    assert start == "" and module
    args = arguments(shlex.split(argv))
    for name in ("steps", "batch", "length", "lr", "seed", "threads"):
        assert getattr(args, name) == record[name]
    config = ByteLMConfig(args.width, args.heads, args.mixers.split(","), args.hidden, args.rope.split(","))
    assert config == ByteLMConfig(**record["config"])
    if mixer == "softmax":
        assert vars(arguments([])) == vars(args), "the defaults are the recipe"


def test_loading_is_deterministic(pretrained):
    again = models.pretrained()
    assert again is not pretrained and not again.training
    for p, r in zip(pretrained.parameters(), again.parameters(), strict=True):
        assert p.dtype == torch.float32 and torch.equal(p, r)


@SHIPPED
def test_validation_loss_is_the_recorded_one(mixer):
    # The mean of 16,384 losses moves by 4e-7 from float32 to float64 arithmetic, so by no more on another CPU.
    recorded = models.pretrained_record(mixer)["validation_loss"]
    assert abs(evaluate(models.pretrained(mixer)) - recorded) < 1e-5


def test_shipped_model_beats_unigrams_and_bigrams(pretrained):
    """Both counted on the training novels with one added to every count, judged on the same windows."""
    counts = torch.zeros(256, 256, dtype=torch.float64)
    for name in data.members("train"):
        raw = data.load_bytes(name).long()
        counts += torch.bincount(256 * raw[:-1] + raw[1:], minlength=256 * 256).view(256, 256)
    x, y = data.windows("validation", length=256, count=64)
    single = counts.sum(0) + 1
    unigram = -(single / single.sum())[y].log().mean().item()
    pairs = counts + 1
    bigram = -(pairs / pairs.sum(1, keepdim=True))[x, y].log().mean().item()
    assert evaluate(pretrained) < 1.45 < bigram - 0.9 < unigram - 1.3


def test_shipped_model_has_sharp_heads_and_one_that_reads_the_previous_byte(pretrained):
    x, _ = data.windows("validation", length=256, count=16)
    with torch.no_grad():
        seen = pretrained.qkv(x)
    weights = []
    for q, k, _ in seen:
        scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        weights.append(scores.masked_fill(~torch.ones(256, 256).tril().bool(), -torch.inf).softmax(-1)[:, :, 64:])
    weights = torch.stack(weights)  # [layer, window, head, 192 queries, 256 keys]
    largest = weights.amax(-1).mean((1, 3))
    previous = weights.diagonal(63, 3, 4).mean((1, 3))
    assert previous.shape == largest.shape == (3, 2)
    assert largest.max() > 0.75 and previous[0].max() > 0.5
    # A uniform head would give each of its 160 visible bytes, on average, under a hundredth.
    assert (largest > 0.3).all()


def test_shipped_model_uses_its_context_and_fails_beyond_its_training_length(pretrained):
    loss = loss_by_position(pretrained, *data.windows("validation", length=512, count=48))
    assert loss[0] > 2.2 and loss[1:4].mean() > 1.6
    assert loss[:16].mean() - 0.2 > loss[16:256].mean()
    assert models.pretrained_record()["length"] == 256
    assert loss[384:].mean() > loss[64:256].mean() + 1.0


def test_models_and_data_need_no_extras():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['tqdm', 'matplotlib', 'IPython']));"
        "import linattn_edu.data, linattn_edu.models as m; m.pretrained();"
        "assert 'linattn_edu.train' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_docstring_examples_run():
    result = doctest.testmod(models)
    assert result.attempted >= 5 and result.failed == 0
