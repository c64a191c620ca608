"""Whole models of transformers as oracles: random weights, none of them where it started."""

import torch


@torch.no_grad()
def shaken(hf_model, seed=0):
    """The model in eval mode with every parameter and buffer moved: norms, biases, gates, the router's correction.

    Larger steps than these make a model whose own float32 logits are 1e-4 away from its float64 ones.
    """
    torch.manual_seed(seed)
    for tensor in [*hf_model.parameters(), *(b for name, b in hf_model.named_buffers() if "inv_freq" not in name)]:
        tensor.add_((0.3 if tensor.ndim < 2 else 0.1) * torch.randn_like(tensor))
    return hf_model.eval()


def text(vocabulary, B, T, seed=1):
    return torch.randint(vocabulary, (B, T), generator=torch.Generator().manual_seed(seed))


def assert_same_logits(model, hf_model, T, pieces=None):
    """Ours in pieces of these sizes against theirs at once; logits must differ from token to token to count."""
    ids, cache, logits = text(model.config.vocabulary, 2, T), None, []
    with torch.no_grad():
        expected = hf_model(ids, use_cache=False).logits
        for piece in ids.split(pieces or [T], 1):
            y, cache = model(piece, cache)
            logits.append(y)
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=1e-4)


def assert_same_gradients(model, hf_model, T, pairs):
    """The gradient of the loss for pairs of (our parameter, theirs)."""
    ids = text(model.config.vocabulary, 2, T)
    for logits in (model(ids)[0], hf_model(ids, use_cache=False).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for ours, theirs in pairs:
        largest = theirs.grad.abs().max().item()
        assert largest > 1e-4
        torch.testing.assert_close(ours.grad.flatten(), theirs.grad.flatten(), rtol=0, atol=1e-3 * largest)


def assert_same_padded_logits(model, hf_model):
    ids, mask = text(model.config.vocabulary, 2, 75), torch.arange(75) >= torch.tensor([[0], [9]])
    with torch.no_grad():
        expected = hf_model(ids, attention_mask=mask.long(), use_cache=False).logits
        logits, _ = model(ids, mask=mask)
    torch.testing.assert_close(logits[mask], expected[mask], rtol=0, atol=1e-4)
