"""The training loop: its schedule, its losses, and that it repeats bit for bit."""

import copy
import csv
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from linattn_edu import data, models
from linattn_edu.models import ByteLM, ByteLMConfig, LanguageModel, LanguageModelConfig
from linattn_edu.train import adamw, checkpoint, evaluate, learning_rate, loss_by_position, parallel, summary, train
from linattn_edu.train.__main__ import arguments, build, command, main
from linattn_edu.train.loop import RECIPE, update


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


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate(0, steps=10, peak=2.0, warmup=0) == 2.0
    records = quick(small(), steps=3, lr=0.01, warmup=0)
    assert [r["lr"] for r in records] == pytest.approx([0.01, 0.0075, 0.0025])


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


def test_an_infinite_norm_leaves_the_gradient():
    assert quick(small(), steps=3, lr=0.1, clip=math.inf) == quick(small(), steps=3, lr=0.1, clip=1e9)
    assert quick(small(), steps=3, lr=0.1, clip=math.inf) != quick(small(), steps=3, lr=0.1, clip=1e-3)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(steps=-3), ValueError, "`steps`: got -3, expected a whole number of at least 1"),
        (dict(batch=2.5), TypeError, "`batch`: got float 2.5, expected a whole number"),
        (dict(length=0), ValueError, "`length`: got 0, expected"),
        (dict(warmup=-1), ValueError, "`warmup`: got -1, expected a whole number of at least 0"),
        (dict(seed=-1), ValueError, "`seed`: got -1, expected"),
        (dict(lr="fast"), TypeError, "`lr`: got str 'fast', expected a number"),
        (dict(weight_decay=math.nan), ValueError, "`weight_decay`: got nan, expected a finite number"),
        (dict(clip=0), ValueError, "`clip`: got 0, expected a finite positive number"),
        (dict(validate_every=-1), ValueError, "`validate_every`: got -1, expected"),
        (dict(checkpoint_every=0), ValueError, "`checkpoint_every`: got 0, expected"),
        (dict(bf16=np.True_), TypeError, "`bf16`: got "),
    ],
)
def test_bad_numbers_are_named_before_training(changes, error, message):
    with pytest.raises(error) as caught:
        quick(stop_at(small(), 1), **changes)
    assert message in str(caught.value)


def test_the_model_trains_in_training_mode_and_is_judged_and_left_in_eval_mode():
    model, modes = small(), []
    model.register_forward_pre_hook(lambda m, _: modes.append(m.training))
    quick(model, steps=3, validate_every=2)
    judged = [False] * 4  # 64 windows, 16 at a time
    assert modes == [True, True, *judged, True, *judged] and not model.training


FREE = ("A_log", "dt_bias", "D")  # of Mamba, Mamba-2, Gated DeltaNet and KDA, whatever their number of axes


def decayed(model):
    """Names of the parameters that a step with no gradient shrinks; it leaves the others as they are."""
    optimizer = adamw(model, lr=0.1, weight_decay=0.5)
    before, names = {name: p.detach().clone() for name, p in model.named_parameters()}, set()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        if not torch.equal(p, before[name]):
            torch.testing.assert_close(p.detach(), 0.95 * before[name])
            names.add(name)
    return names


@pytest.mark.parametrize("mixer", models.MIXERS)
def test_weight_decay_shrinks_matrices_and_leaves_vectors_rates_and_step_sizes(mixer):
    sizes = {"head_dim": 16, "state_dim": 4} if mixer == "mamba2" else {}
    config = LanguageModelConfig(width=16, heads=2, mixers=(mixer,), hidden=32, options={mixer: sizes}, norm="layer")
    model = LanguageModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.rand_like(p) + 0.1  # no zero, which would not shrink
    last = {name: name.rpartition(".")[2] for name, _ in model.named_parameters()}
    expected = {name for name, p in model.named_parameters() if p.ndim >= 2 and last[name] not in FREE}
    assert "embedding.weight" in expected and "norm.bias" not in expected
    loaded = LanguageModel.from_weights(config, {name: x.clone() for name, x in model.state_dict().items()})
    for each in (model, copy.deepcopy(model), loaded):
        assert decayed(each) == expected


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
    first, second = ({k: v for k, v in r.items() if k not in ("seconds", "tokens_per_second", "date")} for r in records)
    assert first == second
    model = models.load((tmp_path / "first.npz.xz").read_bytes(), ByteLMConfig(**first["config"]))
    assert first["validation_loss"] == pytest.approx(evaluate(model), abs=1e-6)
    assert model.config == ByteLMConfig(8, 2, ("softmax", "linear"), 8)
    assert [step for step, _ in first["validation_history"]] == [3]
    assert "--steps 3" in first["command"] and str(tmp_path) not in json.dumps(first)


# Checkpoints.


class Stopped(Exception):
    pass


def noisy(seed=0):
    """A model that draws random numbers in training, as one with dropout does."""
    model = small(seed)
    model.norm.register_forward_hook(lambda m, _, y: y + 0.1 * torch.randn_like(y) if m.training else y)
    return model


def stop_at(model, step):
    """Break off training in the forward pass of this step, counted from 1 in this process."""
    seen = []

    def count(m, _):
        seen.extend([1] if m.training else [])
        if len(seen) == step:
            raise Stopped

    model.register_forward_pre_hook(count)
    return model


@pytest.mark.parametrize("stops", [(2,), (5,), (5, 2, 2)])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, stops):
    settings = dict(steps=7, validate_every=3, checkpoint_every=2)
    whole, path = noisy(), tmp_path / "run.ckpt"
    torch.manual_seed(9)
    expected = quick(whole, **settings)
    for stop in stops:  # a new process each time: other weights and another state of the random numbers
        model = noisy(seed=1 if path.exists() else 0)
        torch.manual_seed(77 if path.exists() else 9)
        with pytest.raises(Stopped):
            quick(stop_at(model, stop), **settings, checkpoint=path)
    resumed, starts = noisy(seed=1 if path.exists() else 0), path.exists()
    torch.manual_seed(77 if starts else 9)
    assert quick(resumed, **settings, checkpoint=path) == expected
    assert torch.equal(parameters(resumed), parameters(whole))


def test_a_finished_run_is_not_run_again(tmp_path):
    settings = dict(steps=3, checkpoint=tmp_path / "run.ckpt")
    model = small()
    records, weights = quick(model, **settings), parameters(model)
    again = stop_at(small(seed=5), 1)
    assert quick(again, **settings) == records and torch.equal(parameters(again), weights) and not again.training


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    quick(small(), steps=2, checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(ValueError, match="`checkpoint`: got one of another run, lr = 0.004 where now 0.1, steps = 2 where now 3"):
        quick(small(), steps=3, lr=0.1, checkpoint=tmp_path / "run.ckpt")


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(mixers=("linear",)), r"config.mixers = \('softmax',\) where now \('linear',\)"),
        (dict(heads=4), "config.heads = 2 where now 4"),
        (dict(rope=()), r"config.rope = \('softmax',\) where now \(\)"),
        (dict(rope_base=100.0), "config.rope_base = 10000.0 where now 100.0"),
        (dict(width=32), "config.width = 16 where now 32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, changes, told):
    settings = dict(width=16, heads=2, mixers=("softmax",), hidden=16)
    quick(ByteLM(ByteLMConfig(**settings)), checkpoint=tmp_path / "run.ckpt")
    other = ByteLM(ByteLMConfig(**settings | changes))
    before = parameters(other)
    with pytest.raises(ValueError, match=f"`checkpoint`: got one of another run, {told}: expected"):
        quick(other, checkpoint=tmp_path / "run.ckpt")
    assert torch.equal(parameters(other), before)


def test_a_checkpoint_that_names_no_model_is_resumed(tmp_path):
    """As earlier versions wrote them."""
    settings, path = dict(width=16, heads=2, mixers=("softmax",), hidden=16), tmp_path / "run.ckpt"
    records = quick(ByteLM(ByteLMConfig(**settings)), checkpoint=path)
    content = torch.load(path)
    content["recipe"] = {name: x for name, x in content["recipe"].items() if name in RECIPE}
    torch.save(content, path)
    assert quick(ByteLM(ByteLMConfig(**settings)), checkpoint=path) == records


@pytest.mark.parametrize("never", [None, 0])
def test_without_validation_there_is_none(never):
    model = ByteLM(ByteLMConfig(width=16, heads=2, mixers=("softmax",), hidden=16))
    assert not any("validation" in record for record in quick(model, validate_every=never))


def test_a_checkpoint_of_another_dtype_or_of_another_module_is_refused(tmp_path):
    class Plain(torch.nn.Module):
        """Without a configuration: its own words tell it from others."""

        def __init__(self, act):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Embedding(256, 8), act, torch.nn.Linear(8, 256))

        def forward(self, ids):
            return self.layers(ids), None

    path = tmp_path / "run.ckpt"
    records = quick(Plain(torch.nn.ReLU()), checkpoint=path)
    assert quick(Plain(torch.nn.ReLU()), checkpoint=path) == records
    with pytest.raises(ValueError, match="(?s)`checkpoint`: got one of another run, model = .*ReLU.*where now .*Tanh"):
        quick(Plain(torch.nn.Tanh()), checkpoint=path)
    with pytest.raises(ValueError, match="another run, dtype = torch.float32 where now torch.float64"):
        quick(Plain(torch.nn.ReLU()).double(), checkpoint=path)


def test_a_feature_map_is_the_same_in_another_process():
    def model():
        def doubled(x):
            return 2 * x.exp()

        options = {"linear": {"feature_map": doubled}}
        return LanguageModel(LanguageModelConfig(width=8, mixers=("linear",), hidden=8, options=options))

    first, second = model(), model()
    assert first.config != second.config and checkpoint.identity(first) == checkpoint.identity(second)
    assert "doubled" in checkpoint.identity(first)["config.options"]


def test_numbers_of_numpy_are_resumed(tmp_path):
    rate, two = np.logspace(-4, -2, 3)[1], np.int64(2)
    settings = dict(steps=two, batch=two, length=16 * two, warmup=two, validate_every=two, seed=np.int32(3))
    settings |= dict(lr=rate, weight_decay=rate, clip=np.float32(1), checkpoint=tmp_path / "run.ckpt")
    records = quick(small(), **settings)
    assert quick(small(), **settings) == records and "validation" in records[1]


def test_the_folder_of_a_checkpoint_is_made_before_training(tmp_path):
    path = tmp_path / "new" / "folder" / "run.ckpt"
    with pytest.raises(Stopped):
        quick(stop_at(small(), 1), checkpoint=path)
    assert path.parent.is_dir() and quick(small(), checkpoint=path) and path.exists()


def test_a_half_written_file_never_replaces_a_good_one(tmp_path):
    path = tmp_path / "file"
    checkpoint.replace(path, lambda file: file.write(b"good"))

    def broken(file):
        file.write(b"ba")
        raise Stopped

    with pytest.raises(Stopped):
        checkpoint.replace(path, broken)
    assert path.read_bytes() == b"good"
    checkpoint.replace(path, lambda file: file.write(b"better"))
    assert path.read_bytes() == b"better" and list(tmp_path.iterdir()) == [path]


COMMAND = [
    "--mixers", "gated_deltanet,softmax", "--width", "16", "--heads", "2", "--hidden", "16", "--batch", "4", "--length", "32",
    "--checkpoint_every", "1", "--brief",
]  # fmt: skip


def log(path):
    with path.open() as file:
        return [{k: x for k, x in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def test_a_run_killed_at_any_moment_ends_like_one_that_was_not(tmp_path):
    run = [sys.executable, "-m", "linattn_edu.train", *COMMAND, "--steps", "40"]
    subprocess.run([*run, "--out", tmp_path / "whole"], check=True, capture_output=True)
    kept, kills = tmp_path / "run.ckpt", 0
    for delay in (0.13, 0.02):
        process = subprocess.Popen([*run, "--out", tmp_path / "killed", "--checkpoint", kept], stderr=subprocess.DEVNULL)
        before = kept.stat().st_mtime_ns if kept.exists() else 0
        while process.poll() is None and not (kept.exists() and kept.stat().st_mtime_ns > before):
            time.sleep(0.005)
        time.sleep(delay)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    subprocess.run([*run, "--out", tmp_path / "killed", "--checkpoint", kept], check=True, capture_output=True)
    assert kills == 2
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed"))
    assert first["validation_history"] == second["validation_history"] and first["command"] == second["command"]
    models_ = [LanguageModel.load(tmp_path / f"{name}.safetensors") for name in ("whole", "killed")]
    assert torch.equal(*map(parameters, models_))
    assert log(tmp_path / "whole.csv") == log(tmp_path / "killed.csv") and len(log(tmp_path / "killed.csv")) == 40


# Several processes, bfloat16, any mixer.


def test_two_processes_have_the_losses_of_one(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for name, launch in (("one", [sys.executable, "-m"]), ("two", torchrun)):
        command = [*launch, "linattn_edu.train", *COMMAND, "--steps", "12", "--out", tmp_path / name]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    one, two = (log(tmp_path / f"{name}.csv") for name in ("one", "two"))
    assert [float(r["loss"]) for r in two] == pytest.approx([float(r["loss"]) for r in one], abs=1e-4)
    assert float(two[-1]["validation"]) == pytest.approx(float(one[-1]["validation"]), abs=1e-4)
    assert json.loads((tmp_path / "two.json").read_text())["processes"] == 2


def test_shares_are_the_batch(monkeypatch):
    x, y = torch.arange(12).view(6, 2), torch.arange(6)
    assert all(map(torch.equal, parallel.share(x, y), (x, y)))
    shares = []
    for rank in range(3):
        monkeypatch.setattr(parallel, "place", lambda rank=rank: (rank, 3))
        shares.append(parallel.share(x, y))
    assert all(map(torch.equal, map(torch.cat, zip(*shares)), (x, y)))
    with pytest.raises(ValueError, match="`batch`: got 4, expected a multiple of the 3 processes"):
        quick(small())


def test_bf16_rounds_the_computation_and_not_the_weights():
    exact, rounded = (quick(small(), lr=1e-2, steps=4, bf16=bf16) for bf16 in (False, True))
    for a, b in zip(exact, rounded):
        assert a["loss"] != b["loss"] and a["loss"] == pytest.approx(b["loss"], rel=0.02)
    model = small()
    quick(model, bf16=True)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_command_trains_any_pattern_and_draws_its_log(tmp_path):
    threads = torch.get_num_threads()
    try:
        sizes = "--width 16 --heads 2 --hidden 16 --steps 2 --batch 2 --length 16 --bf16 --brief"
        record = main(f"--out {tmp_path / 'hybrid'} --mixers kda,gla,softmax --rope= {sizes}".split())
    finally:
        torch.set_num_threads(threads)
    model = LanguageModel.load(tmp_path / "hybrid.safetensors")
    assert model.config == LanguageModelConfig(**record["config"]) and model.config.mixers == ("kda", "gla", "softmax")
    assert model.blocks[2].mixer.rope_base is None
    assert record["validation_loss"] == pytest.approx(evaluate(model), abs=1e-6) and record["tokens_per_second"] > 0
    assert (tmp_path / "hybrid.png").read_bytes().startswith(b"\x89PNG")
    assert [float(row["loss"]) for row in log(tmp_path / "hybrid.csv")][0] == pytest.approx(math.log(256), rel=0.2)
    assert record["command"].startswith("python -m linattn_edu.train --mixers kda,gla,softmax --rope '' --width 16")


@pytest.mark.parametrize("words", [["--rope", ""], ["--rope=linear", "--bf16"], ["--device", "a place"], []])
def test_the_recorded_command_is_read_as_it_was_given(words):
    args = arguments(words)
    start, module, *again = shlex.split(command(args))[1:]
    assert (start, module) == ("-m", "linattn_edu.train") and vars(arguments(again)) == vars(args)


@pytest.mark.parametrize("mixers", ["softmax", "softmax,kda"])
@pytest.mark.parametrize("name", ["sofmax", "kda"])
def test_a_mixer_that_cannot_be_rotated_is_refused(mixers, name):
    with pytest.raises(ValueError, match=f"`rope`: got '{name}', expected names among softmax, linear"):
        build(arguments(["--mixers", mixers, "--rope", name]))


def test_without_safetensors_the_command_says_so_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr("linattn_edu.train.__main__.train", lambda *_, **__: pytest.fail("trains"))
    threads = torch.get_num_threads()
    try:
        with pytest.raises(ImportError, match=r'needs safetensors: pip install "linattn_edu\[models\]"'):
            main(["--out", str(tmp_path / "hybrid"), "--mixers", "kda,softmax", "--width", "16", "--hidden", "16"])
    finally:
        torch.set_num_threads(threads)


def test_without_tqdm_the_bar_says_so_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r'progress=False .* needs tqdm: pip install "linattn_edu\[train\]"'):
        quick(stop_at(small(), 1), progress=True)
