"""The recorded benchmark of the forms on a CPU: the bench measures what it says, and the record keeps its promises."""

import sys

import pytest
import torch

from linattn_edu.bench import cpu, sweep


@pytest.mark.parametrize("name", cpu.OPERATORS)
@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_every_operator_runs_both_passes(name, form):
    f, a = getattr(cpu.OPERATORS[name], form), cpu.arguments(name, 70)
    o = cpu.forward(f, a)
    assert o.shape[:2] == (1, 70) and not o.requires_grad
    assert [x.shape for x in cpu.forward_and_backward(f, a)] == [x.shape for x in a.values()]


def test_transformers_computes_what_it_is_compared_with():
    theirs = cpu.transformers_chunkwise() or pytest.skip("no transformers")
    a = cpu.arguments("gated_deltanet", 130)
    ours = cpu.forward(cpu.OPERATORS["gated_deltanet"].chunkwise, a)
    torch.testing.assert_close(cpu.forward(theirs, a), ours, rtol=1e-4, atol=1e-5)


def test_a_race_takes_turns_after_a_warm_up():
    seen = []
    spent = cpu.race({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, 3)
    assert seen == ["a", "b"] * 4 and [len(times) for times in spent.values()] == [3, 3]
    assert cpu.ratio([2, 30, 4], [1, 10, 4]) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_counts_what_a_form_holds_at_once():
    outputs = 2**14 * cpu.HEADS * cpu.WIDTH * 4
    assert outputs < cpu.rise_in_a_fresh_process("linear", 2**14) < 2**29


def medians():
    rows, _ = sweep.recorded("cpu_forms")
    return {(row["operator"], row["form"], row["pass"], row["T"]): row for row in rows}


def speed_up(name, form, passes):
    rows = medians()
    return rows[name, form, passes, 2048]["seconds"] / rows[name, "chunkwise", passes, 2048]["seconds"]


@pytest.mark.parametrize("passes", list(cpu.PASSES))
def test_recorded_blocks_beat_the_recurrence(passes):
    for name in ("linear", "decay", "deltanet", "gated_deltanet"):
        assert speed_up(name, "recurrent", passes) >= 3
    for name in ("gla", "kda"):
        assert speed_up(name, "recurrent", passes) > 1


@pytest.mark.parametrize("passes, least", [("forward", 1.2), ("forward and backward", 1.5)])
def test_recorded_gated_deltanet_beats_transformers(passes, least):
    rows = medians()
    theirs, ours = (rows["gated_deltanet", f"{side}, in turn", passes, 2048] for side in ("transformers", "ours"))
    assert theirs["seconds"] >= least * ours["seconds"]


@pytest.mark.parametrize("name", cpu.OPERATORS)
def test_recorded_time_and_memory_grow_linearly(name):
    rows = medians()
    longest, shortest = (rows[name, "chunkwise", "forward, growth", T] for T in (2**16, 2**10))
    assert longest["seconds"] <= 80 * shortest["seconds"]
    assert longest["bytes"] < 512 * 2**20
