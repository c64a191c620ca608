"""The experiments teach what their docstrings say: one seed of a short setting each, and the recorded tables of three."""

import inspect

import pytest
import torch

from linattn_edu import experiments
from linattn_edu.experiments import memory, registry, state_tracking
from linattn_edu.experiments.__main__ import main


def table(name, value, by, seed=0, **changes):
    """{key: value} of one seed."""
    return {key: mean for key, (_, mean, _) in experiments.spread(experiments.run(name, [seed], **changes), value, by).items()}


# Registry, command, tables.


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_an_experiment_has_a_short_and_a_gpu_setting_and_says_what_its_arguments_are(name):
    short, gpu = (experiments.settings(name, setting) for setting in ("short", "gpu"))
    assert short["device"] == "cpu" and gpu["device"] == "cuda" and short.keys() == gpu.keys() and short != gpu | {"device": "cpu"}
    documented = inspect.getdoc(experiments.find(name)).split("Args:")[1]
    for argument in short:
        assert argument in documented, argument


def test_seeds_repeat_alone_in_order_and_in_processes():
    few = {"dims": (8,), "loads": (0.5, 1.0), "trials": 3}
    rows = experiments.run("capacity", [0, 1], **few)
    assert rows == experiments.run("capacity", [0], **few) + experiments.run("capacity", [1], **few)
    assert rows == experiments.run("capacity", [0, 1], workers=2, **few)
    assert rows[0]["error"] != next(row for row in rows if row["seed"] == 1)["error"]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="`name`: got 'nothing'"):
        experiments.run("nothing")
    with pytest.raises(ValueError, match="`setting`: got 'long'"):
        experiments.settings("capacity", "long")


def test_spread_is_least_mean_and_greatest():
    rows = [{"seed": s, "kind": kind, "x": x} for s, (kind, x) in enumerate([("a", 1.0), ("b", 7.0), ("a", 2.0), ("a", 6.0)])]
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
    rows, about = registry.sweep.read(out)
    assert rows == experiments.run("forgetting", [0, 2])
    assert about["command"] == f"python -m linattn_edu.experiments forgetting --seeds 0 2 --out {out}"
    assert about["trials"] == "40" and {"machine", "torch", "date"} <= about.keys()


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_three_seeds_are_recorded(name):
    rows, about = experiments.recorded(name)
    assert {row["seed"] for row in rows} >= {0, 1, 2} and f"linattn_edu.experiments {name} " in about["command"]


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
        "additive": (1, 1), "softmax": (0.5, 0.5), "delta": (0, 1), "delta, beta 0.5": (0.25, 0.5), "decay 0.9": (0.9**7, 1),
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
    assert rescaled["additive", 16] == pytest.approx(rescaled["additive", 1], rel=1e-3) and rescaled["additive", 16] > 0.2


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
    torch.testing.assert_close(memory.recall("ELU+1", k, v, k), (phi @ phi.mT) @ v / (phi @ phi.mT).sum(-1, keepdim=True))


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
    right = table("parity", "accuracy", ["beta", "T"], seed=1, cases=cases, steps=250, lengths=(32, 128))
    assert min(right["(0, 2)", 32], right["(0, 2)", 128]) > 0.95
    assert 0.4 < min(right["(0, 1)", 32], right["(0, 1)", 128]) and max(right["(0, 1)", 32], right["(0, 1)", 128]) < 0.6
