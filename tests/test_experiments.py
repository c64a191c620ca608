"""The experiments teach what their docstrings say: one seed of a short setting, and the recorded tables of three."""

import inspect
from math import nan
from pathlib import Path

import pytest
import torch

from linattn_edu import data, experiments, linear, softmax
from linattn_edu.experiments import (
    extrapolation,
    h200,
    images,
    language,
    memory,
    recall,
    registry,
    state_tracking,
    tips,
)
from linattn_edu.experiments.__main__ import main
from linattn_edu.models import LanguageModel
from linattn_edu.train import evaluate


def table(name, value, by, seed=0, **changes):
    """{key: value} of one seed."""
    return {
        key: mean
        for key, (_, mean, _) in experiments.spread(experiments.run(name, [seed], **changes), value, by).items()
    }


# Registry, command, tables.


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_an_experiment_has_a_short_and_a_gpu_setting_and_says_what_its_arguments_are(name):
    short, gpu = (experiments.settings(name, setting) for setting in ("short", "gpu"))
    assert (
        short["device"] == "cpu"
        and gpu["device"] == "cuda"
        and short.keys() == gpu.keys()
        and short != gpu | {"device": "cpu"}
    )
    documented = inspect.getdoc(experiments.find(name)).split("Args:")[1]
    for argument in short:
        assert argument in documented, argument


def test_seeds_repeat_alone_in_order_and_in_processes():
    few = {"dims": (8,), "loads": (0.5, 1.0), "trials": 3}
    rows = experiments.run("capacity", [0, 1], **few)
    assert rows == experiments.run("capacity", [0], **few) + experiments.run("capacity", [1], **few)
    assert rows == experiments.run("capacity", [0, 1], workers=2, **few)
    assert rows[0]["error"] != next(row for row in rows if row["seed"] == 1)["error"]


STEP = {"steps": 1, "batch": 1}
FEW = {
    "parity": STEP | {"length": 4, "lengths": (4,)},
    "swaps": STEP | {"length": 4, "lengths": (4,)},
    "mqar": STEP,
    "mqar_rebinding": STEP | {"writes": 16},
    "gate_start": STEP,
    "language": STEP | {"length": 8},
    "equal_state": STEP | {"length": 8},
    "short_convolution": STEP | {"length": 8},
    "attention_gate": STEP | {"length": 8},
    "extrapolation": STEP | {"length": 8, "longest": 16},
    "sink": STEP | {"length": 8},
}
"""What takes no time; of experiments on images nothing does."""


@pytest.mark.parametrize("name", FEW)
def test_parts_of_an_experiment_give_the_rows_of_the_whole(name):
    arguments = experiments.settings(name) | FEW[name]
    part = experiments.find(name).parts
    arguments[part] = arguments[part][-2:]
    whole = experiments.find(name)(0, **arguments)
    assert experiments.run(name, [0], **arguments) == [{"seed": 0, **row} for row in whole]


@pytest.mark.parametrize("name", ["parity", "mqar", "language", "extrapolation"])
def test_the_gpu_setting_takes_a_step(name):
    part = experiments.find(name).parts
    few = FEW[name] | {"device": "cpu", part: experiments.settings(name)[part][-1:]}
    assert experiments.run(name, [0], setting="gpu", **few)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="`name`: got 'nothing'"):
        experiments.run("nothing")
    with pytest.raises(ValueError, match="`setting`: got 'long'"):
        experiments.settings("capacity", "long")


def test_spread_is_least_mean_and_greatest():
    rows = [
        {"seed": s, "kind": kind, "x": x}
        for s, (kind, x) in enumerate([("a", 1.0), ("b", 7.0), ("a", 2.0), ("a", 6.0)])
    ]
    assert experiments.spread(rows, "x", "kind") == {"a": (1.0, 3.0, 6.0), "b": (7.0, 7.0, 7.0)}


def test_the_command_lists_prints_and_records(tmp_path, capsys, monkeypatch):
    threads = torch.get_num_threads()
    try:
        main([])
        assert all(f"\n{name} " in "\n" + capsys.readouterr().out for name in ["capacity"])
        out = tmp_path / "forgetting.csv"
        main(["forgetting", "--seeds", "0", "2", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
    rows, about = registry.tables.read(out)
    assert rows == experiments.run("forgetting", [0, 2])
    assert about["command"] == f"python -m linattn_edu.experiments forgetting --seeds 0 2 --out {out}"
    assert about["trials"] == "40" and {"machine", "torch", "date"} <= about.keys()


RECORDED = sorted(path.stem for path in (Path(__file__).parents[1] / "book" / "data" / "experiments").glob("*.csv"))


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_table_is_the_short_setting_with_three_seeds(name):
    rows, about = experiments.recorded(name)
    seeds = [[row for row in rows if row["seed"] == seed] for seed in (0, 1, 2)]
    assert len(rows) == 3 * len(seeds[0]) == 3 * len(seeds[1]) == 3 * len(seeds[2])
    assert (
        about["command"]
        == f"python -m linattn_edu.experiments {name} --seeds 0 1 2 --out book/data/experiments/{name}.csv"
    )
    assert {key: about[key] for key in experiments.settings(name)} == {
        k: str(x) for k, x in experiments.settings(name).items()
    }


def recorded(name, value, by):
    """{key: (least, mean, greatest)} of the recorded table."""
    return experiments.spread(experiments.recorded(name)[0], value, by)


def always_above(table, high, low):
    """In every seed: the least of one is above the greatest of the other."""
    return table[high][0] > table[low][2]


# Memories.


def test_additive_error_is_the_law_and_all_dimensions_share_one_curve():
    rows = experiments.run("capacity", trials=100)
    for row in rows:
        if row["memory"] == "additive":
            assert row["error"] == pytest.approx(row["theory"], rel=0.12 if row["N"] < 8 else 0.05)
        if row["memory"] == "softmax":
            assert row["error"] < 1e-3
    errors = experiments.spread([row for row in rows if row["d"] > 16], "error", ["memory", "load"])
    for memory_name in ("additive", "delta"):
        for load in (0.5, 1.0, 2.0, 4.0):
            least, _, greatest = errors[memory_name, load]
            assert greatest < 1.06 * least


def test_delta_has_the_smaller_error_and_the_additive_memory_the_better_accuracy_on_random_keys():
    error = table("capacity", "error", ["memory", "d", "load"])
    right = table("capacity", "accuracy", ["memory", "d", "load"])
    for d in (16, 32, 64):
        for load in (1.0, 2.0, 4.0):
            assert error["delta", d, load] < 0.7 * error["additive", d, load]
            assert right["delta", d, load] < right["additive", d, load] - 0.1


def test_overwriting_leaves_the_delta_rule_with_the_second_value_alone():
    first, second = (table("overwriting", column, "memory") for column in ("first", "second"))
    for name, expected in {
        "additive": (1, 1), "softmax": (0.5, 0.5), "delta": (0, 1), "delta, beta 0.5": (0.25, 0.5),
        "decay 0.9": (0.9**7, 1),
    }.items():  # fmt: skip
        assert (first[name], second[name]) == pytest.approx(expected, abs=0.05), name
    assert first["ELU+1"] == pytest.approx(second["ELU+1"], abs=0.03)


def test_after_eight_rebindings_the_additive_memory_guesses_and_the_delta_rule_knows():
    right = table("rebinding", "accuracy", ["memory", "rebindings"])
    assert right["additive", 0] > 0.99 and right["softmax", 0] > 0.99
    assert right["additive", 8] < 1 / 9 < 0.95 < right["delta", 8]
    assert right["softmax", 8] < 1 / 9 and right["softmax", 1] == pytest.approx(0.5, abs=0.02)
    assert right["decay 0.97", 8] < right["decay 0.9", 8] < right["delta", 8]


def test_correlated_keys_blow_the_additive_error_up_and_not_the_delta_rules():
    error, right = (table("correlation", column, ["memory", "cosine", "N"]) for column in ("error", "accuracy"))
    for N in (16, 32):
        assert error["additive", 0.6, N] > 10 * error["additive", 0.0, N]
        assert error["delta, beta 0.5", 0.6, N] < error["delta", 0.6, N] < 1.2 < 5 < error["additive", 0.6, N]
    assert right["additive", 0.0, 32] > right["delta", 0.0, 32] + 0.1
    for cosine in (0.3, 0.6):
        assert right["delta", cosine, 32] > right["additive", cosine, 32]


def test_repetition_teaches_the_delta_rule_only():
    error, rescaled = (table("repetition", column, ["memory", "passes"]) for column in ("error", "rescaled"))
    assert error["delta", 1] > 0.2 and error["delta", 16] < 1e-2
    assert (
        rescaled["additive", 16] == pytest.approx(rescaled["additive", 1], rel=1e-3) and rescaled["additive", 16] > 0.2
    )


def test_a_channel_gate_clears_one_subspace_and_a_scalar_gate_cannot():
    error, energy = (table("forgetting", column, ["gate", "part"]) for column in ("error", "energy"))
    assert error["channels", "A"] == pytest.approx(error["none", "A"], abs=1e-5)
    assert energy["channels", "B"] < 1e-3 * energy["none", "B"]
    for gate in ("all", "half"):
        kept = [energy[gate, part] / energy["none", part] for part in "AB"]
        assert kept[0] == pytest.approx(kept[1], rel=1e-4) and error[gate, "A"] > error["none", "A"] + 0.1


def test_recall_is_the_recurrence_of_each_memory():
    draw = torch.Generator().manual_seed(0)
    k, v = memory.random_keys(draw, 2, 5, 4), memory.random_values(draw, 2, 5, 3)
    g, beta = torch.tensor(0.8).log().item(), 0.7
    S = torch.zeros(2, 4, 3)
    for t in range(5):
        k_t, v_t = k[:, t, :, None], v[:, t, None]
        S = 0.8 * S
        S = S + beta * k_t @ (v_t - k_t.mT @ S)
    torch.testing.assert_close(memory.recall("gated delta", k, v, k, g=g, beta=beta), k @ S)
    torch.testing.assert_close(memory.recall("additive", k, v, k), k @ k.mT @ v)
    weights = (memory.SHARPNESS * k @ k.mT).softmax(-1)
    torch.testing.assert_close(memory.recall("softmax", k, v, k), weights @ v)
    phi = torch.nn.functional.elu(2 * k) + 1
    torch.testing.assert_close(
        memory.recall("ELU+1", k, v, k), (phi @ phi.mT) @ v / (phi @ phi.mT).sum(-1, keepdim=True)
    )


def test_the_score_shares_a_tie():
    values = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [5.0, 5.0]]])
    answers = torch.tensor([[[0.0, 0.0], [0.9, 0.0], [0.9, 0.0]]])
    assert memory.accuracy(answers, values, torch.tensor([[1, 0, 2]])) == pytest.approx((0.5 + 1 + 0) / 3)


# State tracking.


def test_the_words_are_labelled_with_the_state_after_every_token():
    draw = torch.Generator().manual_seed(0)
    bits, parity = state_tracking.parity_batch(draw, 3, 9)
    for row, wanted in zip(bits.tolist(), parity.tolist()):
        assert wanted == [sum(row[: t + 1]) % 2 for t in range(9)]
    words, first = state_tracking.swap_batch(draw, 3, 9)
    for row, wanted in zip(words.tolist(), first.tolist()):
        items = [0, 1, 2]
        for word, seen in zip(row, wanted):
            i, j = [(0, 0), (0, 1), (0, 2), (1, 2)][word]
            items[i], items[j] = items[j], items[i]
            assert items[0] == seen


def test_parity_needs_negative_eigenvalues():
    cases = (("deltanet", "(0, 2)"), ("deltanet", "(0, 1)"))
    right = table("parity", "accuracy", ["beta", "T"], seed=0, cases=cases, steps=180, lengths=(32, 64))
    assert min(right["(0, 2)", 32], right["(0, 2)", 64]) > 0.95
    assert 0.4 < min(right["(0, 1)", 32], right["(0, 1)", 64]) and max(right["(0, 1)", 32], right["(0, 1)", 64]) < 0.6


def test_recorded_parity_is_solved_with_negative_eigenvalues_alone():
    for (_, beta, T), (least, _, greatest) in recorded("parity", "accuracy", ["operator", "beta", "T"]).items():
        if beta == "(0, 2)" and T <= 128:
            assert least > 0.95
        if beta != "(0, 2)":
            assert 0.47 < least and greatest < 0.53


# Recall.


def test_sequences_ask_for_what_was_written_last():
    for make, n in ((recall.recall_batch, 7), (recall.rebinding_batch, 24)):
        ids, wanted = make(torch.Generator().manual_seed(1), 5, n)
        for row, answers in zip(ids.tolist(), wanted.tolist()):
            memory_of_row = {}
            for key, value in zip(row[: 2 * n : 2], row[1 : 2 * n : 2]):
                assert key < recall.KEYS <= value
                memory_of_row[key] = value - recall.KEYS
            assert [memory_of_row[key] for key in row[2 * n :]] == answers and len(set(row[2 * n :])) == len(answers)


def test_curriculum_begins_small_and_ends_with_all_pairs():
    plan = recall.curriculum(0, 200, 32)
    assert (
        len(plan) == 200 and set(plan[:30]) == {8} and set(plan[30:100]) == {4, 8, 16, 32} and set(plan[100:]) == {32}
    )


def test_a_layer_learns_to_recall():
    right = table("mqar", "accuracy", "mixer", mixers=("deltanet",), pairs=(8,), steps=200)
    assert right["deltanet"] > 0.9


# Language models.


def test_models_that_are_compared_have_equal_parameters_and_equal_states():
    few = {"width": 32, "steps": 1, "batch": 1, "length": 8}
    for name in ("language", "equal_state", "attention_gate"):
        rows = experiments.run(name, **few)
        sizes = [row["parameters"] for row in rows]
        assert max(sizes) < 1.01 * min(sizes), name
    for name, row in zip((row["model"] for row in rows), rows):
        assert row["training"] > 0, name
    held = {row["model"]: row["cache_bytes"] for row in experiments.run("equal_state", **few)}
    normaliser = 2 * 2 * 16 * 4  # depth, heads, K, bytes
    assert held.pop("linear") - normaliser == held["deltanet"] and len(set(held.values())) == 1


# Long texts.


def test_yarn_slows_what_turns_slowly_and_keeps_what_turns_fast():
    plain, one = extrapolation.yarn_frequencies(64, 1e4, 1, 4096)
    slowed, scale = extrapolation.yarn_frequencies(64, 1e4, 8, 4096)
    turns = 4096 * plain / (2 * torch.pi)
    assert one == 1 and scale == pytest.approx(1.2079, abs=1e-4)
    torch.testing.assert_close(slowed[turns > 32], plain[turns > 32])
    torch.testing.assert_close(slowed[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 32)
    assert between.any() and (slowed < plain)[between].all() and (slowed > plain / 8)[between].all()


@pytest.mark.parametrize("name", ["softmax", "gated attention"])
def test_a_stretch_by_one_changes_nothing_and_by_four_something(name):
    model = LanguageModel(extrapolation.pattern(name, 32, 2, 2))
    ids = data.encode("It is a truth universally acknowledged, that a single man")[None]
    plain, outputs = model(ids)[0], []
    for factor in (1, 4):
        extrapolation.stretch(model, factor, 16)
        outputs.append(model(ids)[0])
    torch.testing.assert_close(outputs[0], plain)
    assert (outputs[1] - plain).abs().max() > 1e-3


def test_what_follows_a_trigger_is_what_came_before_it():
    ids = extrapolation.backcopy_batch(torch.Generator().manual_seed(0), 64, 50)
    trigger = ids[:, 1:-1] > extrapolation.WORDS - extrapolation.TRIGGERS
    assert trigger.float().mean() > 0.03 and (ids[:, 2:][trigger] == ids[:, :-2][trigger]).all()
    assert not (ids[:, 2:] == ids[:, :-2])[~trigger].all() and (ids[:, 0] == 0).all() and (ids[:, 1:] > 0).all()


@pytest.mark.parametrize("name", ["softmax", "gated_attention"])
def test_attention_to_the_first_is_what_the_operator_gives_it(name):
    model = LanguageModel(language.reference(16, 1, 1, mixers=(name,)))
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    first, gate = extrapolation.attention_to_the_first(model, ids)
    [(q, k, _)] = model.qkv(ids)
    mark = torch.zeros_like(q)
    mark[:, 0] = 1
    torch.testing.assert_close(first, softmax.parallel(q, k, mark)[0][:, :, 0, 0])
    assert (gate == 1).all() if name == "softmax" else (0 < gate).all() and (gate < 1).all()


def test_recorded_softmax_fails_beyond_its_training_length_and_states_do_not():
    rows, about = experiments.recorded("extrapolation")
    loss = recorded("extrapolation", "loss", ["model", "position"])
    near, far = int(about["length"]), int(about["longest"])
    for model in ("softmax", "gated attention"):
        assert loss[model, far][0] > loss[model, near][2] + 0.1
    for model in ("gated_deltanet", "kda", "hybrid", "hybrid, no positions"):
        assert loss[model, far][2] < loss[model, near][1] and loss[model, far][2] < loss["softmax", far][0] - 0.3
    assert loss["softmax, no positions", far][2] < loss["softmax, no positions", near][0]
    assert loss["softmax, no positions", near][0] > loss["softmax", near][2] + 0.2


def test_recorded_yarn_helps_both_models_and_the_gated_one_loses_more():
    rows, _ = experiments.recorded("yarn")
    loss = {(row["seed"], row["model"], row["factor"], row["yarn"]): row["loss"] for row in rows}
    for seed in (0, 1, 2):
        lost = {}
        for model in ("softmax", "gated attention"):
            assert loss[seed, model, 8, 1] < loss[seed, model, 8, 0] - 0.05
            lost[model] = loss[seed, model, 8, 1] - loss[seed, model, 1, 1]
        assert lost["gated attention"] > lost["softmax"] > 0.1
        assert loss[seed, "gated attention", 1, 0] < loss[seed, "softmax", 1, 0]


def test_recorded_attention_rests_on_the_first_token_and_a_gate_a_head_closes():
    rows, about = experiments.recorded("sink")
    uniform = sum(1 / (t + 1) for t in range(1, int(about["length"]))) / (int(about["length"]) - 1)
    at = {(row["seed"], row["model"], row["at"]): row for row in rows}
    for seed in (0, 1, 2):
        for model in extrapolation.GATED:
            assert at[seed, model, "others"]["first"] > max(uniform, 1.5 * at[seed, model, "triggers"]["first"])
        assert at[seed, "gate a head", "others"]["gate"] <= 0.51 * at[seed, "gate a head", "triggers"]["gate"]


# Images.


def test_patches_are_squares_and_come_back():
    image = torch.arange(64.0).view(1, 8, 8) / 64
    patches = images.to_patches(image)
    torch.testing.assert_close((patches[0, 5] + 1) / 2 * 64, torch.tensor([18.0, 19.0, 26.0, 27.0]))
    torch.testing.assert_close(images.to_images(patches), image)


def test_attention_over_all_tokens_is_the_operators():
    q, k, v = torch.randn(3, 2, 7, 3, 4, generator=torch.Generator().manual_seed(0)).unbind()
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(
        images.attend("linear", *heads).transpose(1, 2), linear.bidirectional(q, k, v)[0], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        images.attend("softmax", *heads).transpose(1, 2), softmax.parallel(q, k, v, causal=False)[0]
    )
    torch.testing.assert_close(images.attend("mean", *heads)[:, :, 0], heads[2].mean(2))


def test_the_judge_knows_real_digits():
    (known, names), (test, wanted) = map(data.digits, ("train", "test"))
    assert (images.nearest_digit(known, known, names) == names).all()
    assert (images.nearest_digit(test, known, names) == wanted).float().mean() > 0.97


def test_a_reader_of_pixels_reads_all_of_them_in_order():
    torch.manual_seed(0)
    model, x = images.PixelReader("kda", 16, 2, 1), torch.rand(2, 64)
    for i in (0, 30, 63):
        changed = x.clone()
        changed[:, i] += 1
        assert (model(changed) - model(x)).abs().max() > 1e-6
    assert (model(x.flip(1)) - model(x)).abs().max() > 1e-4


def test_recorded_pixels_are_read_better_with_gates_and_erasing():
    rows, _ = experiments.recorded("pixels")
    right = {(row["seed"], row["mixer"]): row["accuracy"] for row in rows}
    for seed in (0, 1, 2):
        assert right[seed, "kda"] > 0.9 and min(right[seed, "gated_deltanet"], 0.9) > right[seed, "linear"] + 0.2
        assert min(right[seed, x] for x in ("kda", "gated_deltanet")) > right[seed, "softmax"] + 0.03
    assert always_above(recorded("pixels", "accuracy", "mixer"), "softmax", "linear")


# Advice.


def test_the_baseline_of_the_tips_is_the_usual_training():
    few = {"width": 32, "steps": 4, "batch": 2, "length": 16, "lr": 1e-2}
    [row] = experiments.run("training_tips", tips=("baseline",), mixer="softmax", **few)
    recipe = {key: few[key] for key in ("steps", "batch", "length", "lr")}
    model, usual = language.fit(0, language.reference(32, 2, 2), device="cpu", **recipe)
    assert row["parameters"] == usual["parameters"] and row["gain"] == 0
    assert row["validation"] == usual["validation"] == evaluate(model, length=16, count=48)


def test_after_the_swap_the_other_model_goes_on_with_the_weights():
    config = language.reference(16, 2, 1)
    recipe = {"seed": 0, "device": "cpu", "steps": 3, "batch": 2, "length": 16, "lr": 1e-2, "warmup": 1}
    torch.manual_seed(0)
    model, other = LanguageModel(config), LanguageModel(config)
    torch.manual_seed(0)
    alone = tips._train(LanguageModel(config), None, None, **recipe)
    swapped = tips._train(model, other, 3, **recipe)
    assert swapped is model and evaluate(swapped, length=16, count=4) == evaluate(alone, length=16, count=4)
    assert tips._train(LanguageModel(config), other, 2, **recipe) is other


def test_division_at_the_end_overflows_sooner_and_is_never_more_exact():
    error, lost = (
        table("division_order", column, ["dtype", "d", "scale", "order"]) for column in ("error", "not_finite")
    )
    assert lost["float16", 64, 8.0, "divide last"] > 0.5 > 0.1 > lost["float16", 64, 8.0, "divide q first"]
    for dtype in ("bfloat16", "float16"):
        assert error[dtype, 64, 1.0, "divide last"] == error[dtype, 64, 1.0, "divide q first"]
        assert error[dtype, 48, 1.0, "divide last"] > 1.2 * error[dtype, 48, 1.0, "divide q first"]


def test_sums_belong_in_float32():
    error = table("half_precision", "error", ["attention", "inside", "T"], lengths=(256, 2048))
    assert error["softmax", "float16", 2048] > 20 * error["softmax", "float32", 2048]
    assert error["linear", "float16", 256] < 2e-3 and error["linear", "float16", 2048] > 0.9
    assert error["linear", "float32", 2048] < 2e-4


# What a large GPU is for, at the size of a CPU.


def test_one_step_in_bfloat16_is_near_that_in_float32():
    sizes = h200.TINY["layers"] | {"mixers": ("gated_deltanet", "mamba"), "width": 16}
    rows = list(h200.layers(device="cpu", **sizes))
    assert [(row["form"], row["dtype"]) for row in rows[:3]] == [
        ("chunkwise", "float32"),
        ("chunkwise", "bfloat16"),
        ("fused", "bfloat16"),
    ]
    for exact, chunkwise, fused in (rows[:3], rows[3:]):
        assert exact["gradient_error"] == 0 < chunkwise["gradient_error"] < chunkwise["worst_error"] < 0.2
        assert chunkwise == fused | {"form": "chunkwise"}
    assert all(row["loss_after"] < row["loss"] for row in rows)


def test_kernels_that_lose_digits_are_named():
    def row(mixer, form, whole, worst):
        return {"mixer": mixer, "form": form, "dtype": "bfloat16", "gradient_error": whole, "worst_error": worst}

    fused = {"as exact": (0.01, 0.1), "half as exact": (0.02, 0.1), "worst": (0.01, 0.2), "not a number": (nan, 0.1)}
    rows = [row(name, "fused", *errors) for name, errors in fused.items()]
    assert h200.disagreements(rows + [row(name, "chunkwise", 0.009, 0.1) for name in fused]) == list(fused)[1:]


def test_gradient_errors_are_those_of_the_vector_and_of_its_worst_part():
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]]), "unused": torch.zeros(2)}
    found = h200.gradient_errors(exact | {"a": torch.tensor([3.0, 1.5]), "b": torch.tensor([[6.0]])}, exact)
    assert found == {"gradient_error": 0.5, "worst_error": 0.5, "worst": found["worst"]}


@pytest.mark.parametrize("what", ["layers", "hybrid", "decode"])
def test_the_h200_command_runs_at_the_size_of_a_cpu(what, tmp_path, capsys, monkeypatch):
    out, seen, stream = tmp_path / "table.csv", [], registry.tables.stream

    def watched(*arguments):
        for row in stream(*arguments):
            seen.append(len(registry.tables.read(out)[0]))
            yield row

    monkeypatch.setattr(registry.tables, "stream", watched)
    h200.main([what, "--device", "cpu", "--tiny", "--seconds", "0.1", "--workers", "1", "--out", str(out)])
    rows, about = registry.tables.read(out)
    assert seen == list(range(1, len(rows) + 1)) and len(capsys.readouterr().out.splitlines()) == len(rows)
    assert about["command"].startswith(f"python -m linattn_edu.experiments.h200 {what} --device cpu")
    if what == "hybrid":
        assert rows[-1]["validation"] < 6 and float(about["of_it_short_convolutions"]) < float(about["seconds_a_step"])


def test_a_random_cache_has_the_size_that_tokens_leave():
    config = language.reference(48, 3, 4, mixers=h200.DECODERS["kda + softmax"][:4])
    model = LanguageModel(config).bfloat16()
    cache = h200.random_cache(model, 33, device="cpu", dtype=torch.bfloat16)
    assert sum(c.bytes for c in cache) == model.cache_bytes(33)
    _, real = model(torch.zeros(1, 33, dtype=torch.long))
    assert [[x.shape for x in c.tensors] for c in cache] == [[x.shape for x in c.tensors] for c in real]
    _, after = model(torch.zeros(1, 1, dtype=torch.long), cache)
    assert [c.seen.item() for c in after] == [34] * 4


def test_recorded_states_keep_their_size_up_to_a_million_tokens_and_caches_do_not():
    rows, _ = registry.tables.recorded("h200_decode")
    held = {(row["model"], row["T"]): row["cache_bytes"] for row in rows}
    for model in ("gated_deltanet", "kda"):
        assert held[model, 2**10] == held[model, 2**20] < 3e6
    assert held["softmax", 2**20] == 2**10 * held["softmax", 2**10] - (2**10 - 1) * 12 * 8
    assert held["softmax", 2**20] / held["kda + softmax", 2**20] == pytest.approx(4, rel=0.01)


def test_recorded_layers_train_with_kernels_as_exactly_as_without():
    rows, _ = registry.tables.recorded("h200_layers")
    assert {row["mixer"] for row in rows} == set(h200.KERNELS)
    by = {(row["mixer"], row["form"], row["dtype"]): row for row in rows}
    for mixer in h200.KERNELS:
        exact, rounded, fused = (by[(mixer, *form)] for form in (
            ("chunkwise", "float32"), ("chunkwise", "bfloat16"), ("fused", "bfloat16")
        ))  # fmt: skip
        assert 0 < fused["gradient_error"] < 1.1 * rounded["gradient_error"] != fused["gradient_error"]
        assert fused["loss_after"] == pytest.approx(exact["loss_after"], abs=3e-3) and fused["loss_after"] < 4.3
        assert fused["worst_error"] < 1.15 * rounded["worst_error"]
    assert h200.disagreements(rows) == []


def test_recorded_graphs_take_as_long_at_1k_tokens_as_at_1m_without_attention():
    rows, _ = registry.tables.recorded("h200_decode")
    spent = {(row["model"], row["T"]): row["seconds"] for row in rows if row["timing"] == "graph"}
    for model in ("gated_deltanet", "kda"):
        assert spent[model, 2**20] == pytest.approx(spent[model, 2**10], rel=0.01)
    assert spent["softmax", 2**10] < spent["kda", 2**10] < spent["kda + softmax", 2**20] < spent["softmax", 2**20] / 2


def test_recorded_hybrid_has_100m_parameters_and_learns():
    rows, about = registry.tables.recorded("h200_hybrid")
    assert 90e6 < int(about["parameters"]) < 110e6
    judged = [row["validation"] for row in rows if row["validation"] != ""]
    assert min(judged) < 1.5 and rows[0]["loss"] > 5 and all(row["tokens_per_second"] > 0 for row in rows)


def test_recorded_tips_help_or_hurt_as_is_said():
    gain = recorded("training_tips", "gain", "tip")
    for tip in ("rate x 1.5", "rate x 2"):
        assert gain[tip][0] > 0.02
    for tip in ("warm-up 30 %", "softmax first"):
        assert gain[tip][2] < -0.005
    assert 0 < gain["LayerNorm"][0] and gain["LayerNorm"][2] < 0.003
    for tip in ("LayerScale 0.1", "q, k, v twice as wide", "W_q, W_k from N(0, 0.02^2)"):
        assert gain[tip][0] < 0 < gain[tip][2]


def test_recorded_recall_of_the_latest_value_needs_erasing():
    right = recorded("mqar_rebinding", "accuracy", "mixer")
    assert right["deltanet"][0] > 0.95 and right["softmax"][0] > 0.95
    assert right["linear"][2] < 0.35
    for mixer in ("gla", "gated_deltanet"):
        assert always_above(right, "deltanet", mixer)
        assert always_above(right, mixer, "linear")


def test_recorded_recall_is_learnt_faster_with_the_delta_rule():
    right = recorded("mqar", "accuracy", "mixer")
    assert right["softmax"][0] > 0.99
    for high in ("deltanet", "gated_deltanet", "kda"):
        assert always_above(right, high, "linear") and always_above(right, high, "mamba2") and right[high][0] > 0.95


def test_recorded_gates_help_most_after_the_heads():
    rows, _ = experiments.recorded("attention_gate")
    loss = {(row["seed"], row["model"]): row["validation"] for row in rows}
    for seed in (0, 1, 2):
        assert loss[seed, "G1"] == min(x for (s, _), x in loss.items() if s == seed)
        for gate in ("G1", "G2"):
            assert loss[seed, gate] < loss[seed, "none"] - 0.02


def test_recorded_language_models_with_gate_and_convolution_learn_fastest():
    loss = recorded("language", "validation", "model")
    gated = ("mamba2", "gated_deltanet", "kda")
    for other in set(loss) - set(gated):
        assert all(always_above(loss, other, model) for model in gated)
    assert always_above(loss, "gated_deltanet", "mamba2") and always_above(loss, "kda", "mamba2")


def test_recorded_language_models_of_equal_states_learn_last_without_a_decay():
    rows, _ = experiments.recorded("equal_state")
    for seed in (0, 1, 2):
        order = sorted((row for row in rows if row["seed"] == seed), key=lambda row: row["validation"])
        names = [row["model"] for row in order]
        assert names[:2] == ["mamba2", "gated_deltanet"] and set(names[-2:]) == {"linear", "deltanet"}


def test_recorded_digits_are_drawn_by_all_and_best_by_softmax():
    right, loss = (recorded("flow", column, "attention") for column in ("accuracy", "loss"))
    assert min(least for least, _, _ in right.values()) > 0.9
    assert always_above(loss, "linear", "softmax") and right["softmax"][1] > right["linear"][1]
    assert right["linear"][1] - right["mean"][1] < 0.01


def test_recorded_short_convolution_helps_layers_without_a_gate():
    rows, _ = experiments.recorded("short_convolution")
    loss = {(row["seed"], row["model"], row["conv"]): row["validation"] for row in rows}
    for seed in (0, 1, 2):
        for model, helps in (("linear", True), ("deltanet", True), ("gated_deltanet", False)):
            assert (loss[seed, model, 4] < loss[seed, model, 0]) == helps
