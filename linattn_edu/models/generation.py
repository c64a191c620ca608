"""Decoding: one token after another, each read once and then remembered in the cache."""

import torch

from linattn_edu import validate


def choose(logits, *, temperature=1.0, top_p=1.0, generator=None):
    """Draw one id a row from softmax(logits / temperature), among the likeliest ids that together reach `top_p`.

    Args:
        logits: [B, vocabulary].
        temperature: 0 takes the likeliest id.
        top_p: the nucleus: the fewest likeliest ids whose probabilities sum to at least top_p. 1 keeps all.
        generator: where the randomness comes from; torch's own if None.

    Returns:
        ids [B].

    Raises:
        ValueError: a temperature below 0, or a top_p that is not above 0 and at most 1.
        TypeError: what should be a number is none.

    Source: nucleus sampling, Holtzman et al. 2020.
    """
    temperature, top_p = _numbers(temperature, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    p, ids = (logits.float() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= top_p, 0) if top_p < 1 else p
    return ids.gather(-1, torch.multinomial(p, 1, generator=generator))[:, 0]


def _numbers(temperature, top_p):
    """Both as floats, checked."""
    temperature, top_p = validate.number("temperature", temperature), validate.number("top_p", top_p, positive=True)
    if temperature < 0 or top_p > 1:
        raise ValueError(f"`temperature`, `top_p`: got {temperature} and {top_p}, expected at least 0 and at most 1")
    return temperature, top_p


def stream(model, ids, *, max_new_tokens, temperature=1.0, top_p=1.0, stop=(), seed=None, mask=None):
    """Continue each row, and yield the new ids [B] as soon as they are known.

    Args:
        model: a language model of this package.
        ids: the prompts [B, T], int64 or int32, T at least 1; `ids[None]` for one prompt [T].
        max_new_tokens: at most so many ids a row.
        temperature: 0 always takes the likeliest id, 1 draws from the model's own distribution.
        top_p: draw among the likeliest ids that together have this probability.
        stop: an id or several. A row that has got one of them is done, and gets the same again while others go on.
        seed: of the draws; None continues torch's own randomness.
        mask: [B, T] bool, True for a real token, where prompts differ in length; padding may stand on either side.

    Raises:
        ValueError: a number out of range, a wrong shape or dtype of ids, or a prompt without a token.
        TypeError: what should be a number or a tensor is none.
    """
    count = validate.count("max_new_tokens", max_new_tokens)
    _numbers(temperature, top_p)
    validate.token_ids(ids)
    if ids.shape[1] == 0 or (mask is not None and not mask.any(1).all()):
        raise ValueError("`ids`: got a row without a token, expected a prompt in each")
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    ends = torch.tensor([stop] if isinstance(stop, int) else list(stop), dtype=ids.dtype, device=ids.device)
    return _tokens(model, ids, count, ends, mask, temperature=temperature, top_p=top_p, generator=generator)


@torch.no_grad()
def _tokens(model, ids, count, ends, mask, **drawing):
    """What `stream` yields: a generator apart, so that `stream` checks its arguments when it is called."""
    x, cache = model.hidden(ids, mask=mask)
    last = x[:, -1] if mask is None else x[torch.arange(len(x)), _last(mask)]
    new = choose(model.head(last), **drawing)
    for _ in range(count - 1):
        yield new
        done = torch.isin(new, ends)
        if done.all():
            return
        x, cache = model.hidden(new[:, None], cache)
        new = torch.where(done, new, choose(model.head(x[:, -1]), **drawing))
    yield new


def generate(model, ids, **options):
    """The prompts and their continuations, [B, T + new]: all that `stream` yields, with the same arguments."""
    return torch.cat([ids, torch.stack(list(stream(model, ids, **options)), 1)], 1)


def _last(mask):
    """The place of the last real token of each row."""
    return mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
