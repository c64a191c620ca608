"""The training loop: its schedule, its losses, and that it repeats bit for bit."""

import json
import math

import pytest
import torch

from linattn_edu import data, models
from linattn_edu.models import ByteLM, ByteLMConfig
from linattn_edu.train import adamw, evaluate, learning_rate, loss_by_position, summary, train
from linattn_edu.train.__main__ import main
from linattn_edu.train.loop import update


def small(seed=0, mixers=("softmax",)):
    torch.manual_seed(seed)
    return ByteLM(ByteLMConfig(width=16, heads=2, mixers=mixers, hidden=32))


def quick(model, seed=0, **changes):
    settings = dict(steps=2, batch=4, length=32, validate_every=10**9, progress=False) | changes
    return train(model, seed=seed, **settings)


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("mixers", [("softmax",), ("linear",)])
def test_two_steps_repeat_bit_for_bit(mixers):
    runs = []
    for _ in range(2):
        model = small(mixers=mixers)
        runs.append((quick(model), parameters(model)))
    (first, weights), (second, again) = runs
    assert first == second and torch.equal(weights, again)
    assert first[0]["loss"] != first[1]["loss"]


def test_seed_chooses_the_windows():
    one, other = quick(small(), seed=0), quick(small(), seed=1)
    assert one[0]["loss"] != other[0]["loss"]


def test_first_recorded_loss_is_that_of_the_first_batch_before_any_update():
    x, y = next(data.batches("train", batch=4, length=32, seed=5))
    expected = torch.nn.functional.cross_entropy(small()(x)[0].flatten(0, 1), y.flatten()).item()
    assert quick(small(), seed=5)[0]["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mixers", [("softmax",), ("linear",)])
def test_training_teaches_more_than_the_frequency_of_bytes(mixers):
    model = small(mixers=mixers)
    quick(model, steps=150, batch=16, length=64, lr=1e-2, warmup=10)
    frequency = torch.bincount(torch.cat([data.load_bytes(n) for n in data.members("train")]).long(), minlength=256) + 1
    _, targets = data.windows("validation", length=256, count=64)
    unigram = -(frequency / frequency.sum())[targets].log().mean().item()
    assert evaluate(model) < unigram - 0.3


def test_validation_is_recorded_on_schedule_and_after_the_last_step():
    model = small()
    records = quick(model, steps=5, validate_every=2)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert [r["step"] for r in records if "validation" in r] == [2, 4, 5]
    assert records[-1]["validation"] == evaluate(model)
    assert summary(records, last=2) == {
        "loss": (records[3]["loss"] + records[4]["loss"]) / 2,
        "validation": records[-1]["validation"],
    }


def test_learning_rate_warms_up_and_falls_to_zero():
    rate = [learning_rate(s, steps=1000, peak=2.0, warmup=100) for s in range(1000)]
    assert rate[0] == pytest.approx(2.0 / 100)
    assert all(a < b for a, b in zip(rate[:90], rate[1:91])) and all(a > b for a, b in zip(rate[100:], rate[101:]))
    assert rate[500] == pytest.approx(1.0) and rate[999] < 1e-4 * 2
    for s in (150, 777):
        assert rate[s] == pytest.approx(1 + math.cos(math.pi * s / 1000))


def test_records_carry_the_learning_rate_that_was_used():
    records = quick(small(), steps=3, lr=0.01, warmup=2)
    assert [r["lr"] for r in records] == [learning_rate(s, steps=3, peak=0.01, warmup=2) for s in range(3)]


def test_update_at_rate_zero_changes_nothing_and_clips_the_gradient():
    model = small()
    before, (x, y) = parameters(model), next(data.batches(batch=4, length=32))
    norms = []
    for clip in (1e9, 0.5):
        update(model, adamw(model, lr=1.0, weight_decay=0.1), x, y, rate=0.0, clip=clip)
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
    assert torch.equal(parameters(model), before)
    assert norms[0] > 0.5 and norms[1] == pytest.approx(0.5, rel=1e-4)


def test_update_is_adamw_by_its_formulas():
    """Loshchilov and Hutter 2019, algorithm 2, with the gradients that the model itself reports."""
    model, stream = small().double(), data.batches(batch=4, length=32)
    lr, decay, beta1, beta2, eps = 0.01, 0.3, 0.9, 0.99, 1e-8
    optimizer = adamw(model, lr=lr, weight_decay=decay)
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    first, second = ({n: torch.zeros_like(p) for n, p in theta.items()} for _ in range(2))
    for step in (1, 2, 3):
        update(model, optimizer, *next(stream), rate=lr / step, clip=1e9)
        for n, p in model.named_parameters():
            first[n] = beta1 * first[n] + (1 - beta1) * p.grad
            second[n] = beta2 * second[n] + (1 - beta2) * p.grad**2
            m, v = first[n] / (1 - beta1**step), second[n] / (1 - beta2**step)
            theta[n] *= 1 - lr / step * (decay if p.ndim == 2 else 0.0)
            theta[n] -= lr / step * m / (v.sqrt() + eps)
            torch.testing.assert_close(p.detach(), theta[n], rtol=0, atol=1e-10)


def test_the_model_trains_in_training_mode_and_is_judged_and_left_in_eval_mode():
    model, modes = small(), []
    model.register_forward_pre_hook(lambda m, _: modes.append(m.training))
    quick(model, steps=3, validate_every=2)
    judged = [False] * 4  # 64 windows, 16 at a time
    assert modes == [True, True, *judged, True, *judged] and not model.training


def test_weight_decay_shrinks_matrices_and_leaves_vectors():
    model = small()
    optimizer = adamw(model, lr=0.1, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if p.ndim >= 2 else 1.0))


def test_loss_by_position_is_the_mean_over_windows_of_each_column():
    model, (x, y) = small(), data.windows("validation", length=20, count=7)
    got = loss_by_position(model, x, y, batch=3)
    assert got.shape == (20,) and got.dtype == torch.float64
    with torch.no_grad():
        for t in range(20):
            logp = model(x[:, : t + 1])[0][:, -1].double().log_softmax(-1)  # a model that has read t + 1 bytes
            expected = -logp.gather(1, y[:, t : t + 1]).mean().item()
            assert got[t].item() == pytest.approx(expected, abs=1e-5)
    assert evaluate(model, length=20, count=7) == got.mean().item()


def test_command_repeats_and_writes_a_model_that_loads_and_a_true_record(tmp_path):
    sizes = "--mixers softmax,linear --width 8 --heads 2 --hidden 8 --steps 3 --batch 2 --length 16 --seed 4"
    threads, records = torch.get_num_threads(), []
    try:
        for name in ("first", "second"):
            main(f"--out {tmp_path / name} {sizes}".split())
            records.append(json.loads((tmp_path / f"{name}.json").read_text("utf-8")))
    finally:
        torch.set_num_threads(threads)
    first, second = ({k: v for k, v in r.items() if k not in ("seconds", "date")} for r in records)
    assert first == second
    model = models.load((tmp_path / "first.npz.xz").read_bytes(), ByteLMConfig(**first["config"]))
    assert first["validation_loss"] == pytest.approx(evaluate(model), abs=1e-6)
    assert model.config == ByteLMConfig(8, 2, ("softmax", "linear"), 8)
    assert [step for step, _ in first["validation_history"]] == [3]
    assert "--steps 3" in first["command"] and str(tmp_path) not in json.dumps(first)
