"""Decoding: greedy, drawn, cut to the nucleus, streamed, stopped, and from prompts of several lengths."""

import pytest
import torch

from linattn_edu import models
from linattn_edu.models import LanguageModel, LanguageModelConfig, choose

PATTERNS = [("softmax", "softmax"), ("kda", "kda", "gated_attention"), ("mamba2", "latent_attention")]
EVERY = pytest.mark.parametrize("mixers", PATTERNS)
OPTIONS = {"mamba2": dict(head_dim=8, state_dim=4), "latent_attention": dict(latent=6, nope_dim=4, rope_dim=2, v_dim=4)}


def model_of(mixers, seed=0):
    torch.manual_seed(seed)
    sizes = dict(vocabulary=23, width=16, heads=2, hidden=12, options=OPTIONS, tied=False)
    return LanguageModel(LanguageModelConfig(mixers=mixers, **sizes)).double().eval()


def prompts(B=2, T=5, seed=1):
    return torch.randint(23, (B, T), generator=torch.Generator().manual_seed(seed))


def without_cache(model, ids, count):
    """Greedy decoding that reads the whole text for every token."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], 1)
    return ids


@EVERY
def test_greedy_is_the_likeliest_token_after_the_whole_text(mixers):
    model, ids = model_of(mixers), prompts()
    expected = without_cache(model, ids, 30)
    assert torch.equal(model.generate(ids, max_new_tokens=30, temperature=0), expected)
    assert len(expected[:, 5:].unique()) > 3


@EVERY
def test_every_token_is_read_once(mixers, monkeypatch):
    """A prompt of 5 and 8 new ids: one call with 5 tokens and seven with 1, and the head reads one position a call."""
    model, read, judged = model_of(mixers), [], []
    model.embedding.register_forward_pre_hook(lambda m, x: read.append(x[0].shape[1]))
    model.head.register_forward_pre_hook(lambda m, x: judged.append(tuple(x[0].shape)))
    model.generate(prompts(), max_new_tokens=8)
    assert read == [5] + 7 * [1] and judged == 8 * [(2, 16)]


@EVERY
@pytest.mark.parametrize("left", [True, False])
def test_prompts_of_several_lengths_go_on_as_they_would_alone(mixers, left):
    model, rows = model_of(mixers), [prompts(1, T, seed=T) for T in (3, 7, 1)]
    mask, ids = torch.zeros(3, 7, dtype=torch.bool), torch.zeros(3, 7, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(7 - row.shape[1], None) if left else slice(0, row.shape[1])
        mask[i, place], ids[i, place] = True, row[0]
    together = model.generate(ids, max_new_tokens=12, temperature=0, mask=mask)[:, 7:]
    for row, new in zip(rows, together):
        assert torch.equal(without_cache(model, row, 12)[0, row.shape[1] :], new)


def test_draws_follow_the_model():
    """4,000 draws after one prompt against softmax(logits / temperature), each count within four sigma."""
    model, ids = model_of(("kda", "softmax")), prompts(1)
    model.head.weight.data *= 8
    for temperature in (0.5, 1.0, 2.0):
        p = (model(ids)[0][0, -1] / temperature).softmax(-1)
        drawn = model.generate(ids.expand(4000, -1), max_new_tokens=1, temperature=temperature, seed=0)[:, -1]
        counts = torch.bincount(drawn, minlength=23)
        sigma = (4000 * p * (1 - p)).sqrt()
        assert ((counts - 4000 * p).abs() <= 4 * sigma + 1).all()


def test_the_nucleus_is_the_fewest_likeliest_ids_that_reach_top_p():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    drawn = lambda top_p: set(choose(logits.expand(2000, -1), top_p=top_p).tolist())
    torch.manual_seed(0)
    assert drawn(0.01) == drawn(0.39) == {0}
    assert drawn(0.41) == drawn(0.69) == {0, 1}
    assert drawn(0.71) == drawn(0.89) == {0, 1, 2}
    assert drawn(0.91) == drawn(1.0) == {0, 1, 2, 3}
    equal = choose(torch.zeros(2000, 4, dtype=torch.float64), top_p=0.5)
    assert len(equal.unique()) == 2, "two quarters reach a half exactly"
    kept = choose(logits[[2, 0, 3, 1]].expand(4000, -1), top_p=0.6)  # any order of ids; 4 : 3 within the nucleus
    share = (kept == 1).double().mean()
    assert set(kept.tolist()) == {1, 3} and abs(share - 4 / 7) < 0.04


def test_a_seed_repeats_and_leaves_torchs_randomness_alone():
    model, ids = model_of(("softmax",)), prompts()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (model.generate(ids, max_new_tokens=15, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    free = model.generate(ids, max_new_tokens=15)
    torch.manual_seed(5)
    assert torch.equal(free, model.generate(ids, max_new_tokens=15))


def test_a_stream_comes_token_by_token():
    model, ids, read = model_of(("gla", "softmax")), prompts(), []
    expected = model.generate(ids, max_new_tokens=6, temperature=0)[:, 5:]
    model.embedding.register_forward_pre_hook(lambda m, x: read.append(x[0].shape[1]))
    for i, new in enumerate(model.stream(ids, max_new_tokens=6, temperature=0)):
        assert torch.equal(new, expected[:, i]) and len(read) == i + 1 and not new.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("several", [False, True])
def test_a_row_stops_and_the_others_go_on(several):
    model, ids = model_of(("kda", "softmax")), prompts(4)
    free = model.generate(ids, max_new_tokens=25, temperature=0)[:, 5:].tolist()
    stops = [free[0][3], *([free[1][6]] if several else [])]
    stop = stops if several else stops[0]
    stopped = model.generate(ids, max_new_tokens=25, temperature=0, stop=stop)[:, 5:].tolist()
    ends = [next((t for t, new in enumerate(row) if new in stops), 24) for row in free]
    for row, cut, end in zip(free, stopped, ends):
        assert cut == (row[: end + 1] + 25 * [row[end]])[: max(ends) + 1]
    assert len(set(ends)) > 1
    assert model.generate(ids[:1], max_new_tokens=25, temperature=0, stop=stop).shape[1] == 5 + ends[0] + 1


def test_functions_and_methods_are_one():
    model, ids = model_of(("softmax",)), prompts()
    options = dict(max_new_tokens=4, seed=3)
    all_at_once, one_by_one = model.generate(ids, **options), list(models.stream(model, ids, **options))
    assert torch.equal(models.generate(model, ids, **options), all_at_once)
    assert torch.equal(torch.stack(one_by_one, 1), all_at_once[:, 5:])


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(max_new_tokens=0), ValueError, "`max_new_tokens`: got 0, expected a whole number of at least 1"),
        (dict(temperature=-1.0), ValueError, "`temperature`, `top_p`: got -1.0 and 1.0, expected at least 0"),
        (dict(top_p=1.5), ValueError, "`temperature`, `top_p`: got 1.0 and 1.5"),
        (dict(top_p=0.0), ValueError, "`top_p`: got 0.0, expected a finite positive number"),
        (dict(temperature="hot"), TypeError, "`temperature`: got str"),
        (dict(ids=torch.zeros(2, 0, dtype=torch.int64)), ValueError, "`ids`: got a row without a token"),
        (dict(ids=prompts()[0]), ValueError, "`ids`: got shape [5], expected [B, T]: ids[None] for one prompt"),
        (dict(ids=prompts()[None]), ValueError, "`ids`: got shape [1, 2, 5], expected [B, T]"),
        (dict(ids=prompts().byte()), ValueError, "`ids`: got dtype torch.uint8, expected torch.int32 or torch.int64"),
        (dict(ids="She had"), TypeError, "`ids`: got str 'She had', expected an integer tensor [B, T]"),
        (dict(ids=[[1, 2]]), TypeError, "`ids`: got list [[1, 2]], expected an integer tensor [B, T]"),
        (dict(mask=torch.zeros(2, 5).bool()), ValueError, "`ids`: got a row without a token"),
    ],
)
def test_bad_arguments_are_named_at_the_call(options, error, message):
    with pytest.raises(error) as caught:
        model_of(("softmax",)).stream(**dict(ids=prompts(), max_new_tokens=3) | options)
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_both_dtypes_go_on_alike(dtype):
    model, ids = model_of(("kda", "softmax")), prompts()
    expected = model.generate(ids, max_new_tokens=9, temperature=0)
    stop = expected[0, 7].item()
    options = dict(max_new_tokens=9, temperature=0, stop=stop)
    assert torch.equal(model.generate(ids.to(dtype), **options), model.generate(ids, **options))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(temperature=-1.0), ValueError, "`temperature`, `top_p`: got -1.0 and 1.0, expected at least 0"),
        (dict(top_p=0), ValueError, "`top_p`: got 0, expected a finite positive number"),
        (dict(top_p=1.5), ValueError, "`temperature`, `top_p`: got 1.0 and 1.5"),
        (dict(temperature=None), TypeError, "`temperature`: got nothing (None), expected a number"),
    ],
)
def test_choose_names_bad_numbers(options, error, message):
    with pytest.raises(error) as caught:
        choose(torch.tensor([[0.0, 9.0]]), **options)
    assert message in str(caught.value)


def test_the_shipped_model_writes_words():
    """Most words of 200 bytes are words of the novels that it was trained on."""
    from linattn_edu import data

    model = models.pretrained()
    ids = model.generate(data.encode("She had been ")[None], max_new_tokens=200, temperature=0.7, top_p=0.9, seed=0)
    text = bytes(ids[0].tolist()).decode("utf-8", "replace")
    words = text.split()[1:-1]
    known = {word for name in data.members("train") for word in data.load_text(name).split()}
    assert sum(word in known for word in words) > 0.6 * len(words) > 15
