"""The computed tables of the book: what they say of each variant is so."""

import re
import sys
from collections import Counter
from pathlib import Path
from statistics import geometric_mean

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from book.tables import data_files, feature_maps, kernel_versions, memory, variants
from linattn_edu.bench import record
from linattn_edu.check.cases import REGIMES_OF
from linattn_edu.kernels import verify


@pytest.fixture(scope="module")
def quick():
    header, *rows = variants.table()
    return {name: dict(zip(header[1:], row)) for name, *row in rows}


def test_only_the_delta_rule_can_have_negative_eigenvalues_and_does_not_commute(quick):
    delta = {"DeltaNet", "Gated DeltaNet", "KDA"}
    assert {name for name, row in quick.items() if row["Below 0"] == "yes"} == delta
    assert {name for name, row in quick.items() if row["Commute"] == "no"} == delta


def test_only_the_sum_and_retnet_do_not_look_at_the_token(quick):
    assert {name for name, row in quick.items() if row["Data"] == "no"} == {"Linear attention", "RetNet"}


def test_one_product_more_for_the_decay_and_one_for_what_is_recalled(quick):
    products = {name: row["Products"] for name, row in quick.items()}
    assert products["Linear attention"] == "2 $KV$"
    assert {products[name] for name in ("RetNet", "Mamba-2", "GLA", "DeltaNet")} == {"3 $KV$"}
    assert {products[name] for name in ("Gated DeltaNet", "KDA")} == {"4 $KV$"}


def test_sizes_are_those_of_the_map_on_the_landing_page():
    _, softmax, normalised, state, mamba = variants.sizes()
    assert [row[2] for row in (softmax, normalised, state, mamba)] == ["256,000", "16,512", "16,384", "2,048"]


def test_softmax_is_at_no_distance_from_itself_and_no_map_is_near():
    _, *maps, exact = feature_maps.table()
    assert exact[5] == "0" and min(float(row[5]) for row in maps if row[5] != "–") > 0.5


def test_maps_of_random_and_taylor_features_approach_the_exponential():
    """On short vectors, where both promise it."""
    import torch

    x = 0.15 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = (x @ x.T).exp()
    for phi, tolerance in ((feature_maps.taylor, 0.1), (lambda x: feature_maps.favor(x, 4096), 0.1)):
        assert ((phi(x) @ phi(x).T) / kernel - 1).abs().max() < tolerance


def test_naive_forms_hold_maps_and_blockwise_forms_do_not():
    _, *rows = memory.table()
    maps, naive, blocks, parallel, chunkwise = (float(x.replace(",", "")) for x in rows[-1][1:])
    assert naive > maps and parallel > maps and blocks < maps / 10 and chunkwise < maps / 10


def test_every_version_of_a_kernel_has_a_prediction_a_time_and_a_reason():
    for table in (kernel_versions.host, kernel_versions.walk, kernel_versions.scores, kernel_versions.step, kernel_versions.scan):
        _, *rows = table()
        assert rows and all(change and predicted and why and (forward, backward) != ("–", "–") for change, predicted, forward, backward, why in rows)


def test_every_recorded_file_says_where_and_when_it_was_made():
    files = sorted(data_files.DATA.rglob("*.csv"))
    tables = data_files.benchmarks()[1:] + data_files.of_experiments()[1:]
    assert sorted(row[0].strip("`") for row in tables) == sorted(path.stem for path in files)
    for name, shows, made, command in tables:
        assert shows and re.fullmatch(r"\w.+, torch [\d.]+\S*, .*\d{4}-\d\d-\d\d", made), name
        assert command == "–" or command.startswith("`python -m linattn_edu."), name


def test_every_notebook_ran_on_a_gpu_within_three_minutes():
    rows, about = record.read(data_files.DATA / "notebooks_h200.csv")
    assert "H200" in about["machine"]
    assert sorted(row["notebook"] for row in rows) == sorted(x.stem for x in (data_files.ROOT / "notebooks").glob("*.ipynb"))
    assert all(0 < row["seconds"] <= 180 for row in rows)


def test_on_the_gpu_every_kernel_is_right_and_every_first_call_short():
    """Every variant, dtype, gate regime and size, the gradients too, within three times the error of PyTorch's chunks."""
    rows, about = record.read(data_files.DATA / "kernels_h200.csv")
    assert "H200" in about["machine"] and all(row["ok"] == "True" for row in rows)
    count = Counter(row["check"] for row in rows)
    assert count.keys() == {
        "whole", "packed", "long", "step", "scan", "over 2^31", "CUDA graph", "torch.compile", "no wait", "second device", "first call",
    }  # fmt: skip
    ops = {"linear-plain", "decay", "gla", "deltanet", "gated_deltanet", "kda"}
    for check in ("CUDA graph", "torch.compile", "no wait", "second device", "first call"):
        assert {row["variant"] for row in rows if row["check"] == check} == ops
    assert all(row["seconds"] <= 10 for row in rows if row["check"] == "first call")
    whole = [row for row in rows if row["check"] in ("whole", "packed", "long")]
    assert all(row["error"] <= max(3 * row["reference"], 1e-6) for row in whole)
    sizes = {(row["variant"], row["regime"], row["dtype"], row["K"], row["V"]) for row in whole if row["T"] == 300}
    for name, regime in REGIMES_OF:
        for dtype in ("float32", "float16", "bfloat16"):
            assert {(name, regime, dtype, K, V) for K, V in verify.SIZES} <= sizes
        assert {1, 2, 40, 4096, 65536} <= {row["T"] for row in whole if (row["variant"], row["regime"]) == (name, regime)}
    luck = [row for row in whole if row["note"].startswith(f"{verify.DRAWS} draws")]
    assert {(row["variant"], row["regime"], row["T"], row["HV"]) for row in luck} == {(*x, 1, 2) for x in REGIMES_OF}
    counts = [(int(more), int(less)) for row in luck for more, less in re.findall(r"in (\d+) and its reference in (\d+)", row["note"])]
    more, less = map(sum, zip(*counts))
    assert max(x for x, _ in counts) <= verify.DRAWS / 5 and more < 1.5 * less


def test_mambas_scan_is_beside_its_chunks_in_pytorch():
    header, *rows = kernel_versions.scan_beside_pytorch()
    assert [row[:2] for row in rows] == [[x, y] for x in ("8 × 2,048", "1 × 8,192") for y in ("forward", "forward+backward")]
    for _, _, *figures in rows:
        mine, theirs, held, held_by_theirs = (float(x.replace(",", "")) for x in figures)
        assert 10 * mine < theirs and 8 * held < held_by_theirs


def test_no_kernel_reads_or_writes_outside_of_its_memory():
    rows, about = record.read(data_files.DATA / "sanitizer_h200.csv")
    assert "H200" in about["machine"] and {row["dtype"] for row in rows} == {"bfloat16", "float32"}
    assert all((row["tool"], row["done"], row["errors"]) == ("memcheck", "all", 0) for row in rows)


def test_the_kernels_are_timed_whole_beside_flash_linear_attention():
    """Time of FLA over ours: wall time, device time at the long shapes, peak memory; and the step's bandwidth over a copy's."""
    cells, steps = {}, {}
    for row in record.read(data_files.DATA / "bench_h200.csv")[0]:
        cells.setdefault((row["op"], row["pass"], row["B"], row["T"], row["K"]), {})[row["form"]] = row
    cells = {cell: forms for cell, forms in cells.items() if cell[0] != "softmax"}
    assert len(cells) == 6 * 2 * 6 and all(forms.keys() == {"fused", "FLA"} for forms in cells.values())
    ratios = {x: {cell: f["FLA"][x] / f["fused"][x] for cell, f in cells.items()} for x in ("wall_ms", "device_ms", "peak_MiB")}
    assert min(ratios["peak_MiB"].values()) >= 1
    long = [cell for cell in cells if cell[2] * cell[3] >= 2**14]
    for clock in ("wall_ms", "device_ms"):
        assert geometric_mean(ratios[clock][cell] for cell in long) >= 1 and min(ratios[clock][cell] for cell in long) >= 0.7
    assert geometric_mean(ratios["wall_ms"][cell] for cell in cells if cell not in long) >= 2
    for row in record.read(data_files.DATA / "decode_kernels_h200.csv")[0]:
        steps.setdefault((row["op"], row["B"]), {})[row["form"]] = row
    full = {key: forms for key, forms in steps.items() if key[1] >= 64 and key[0] not in ("softmax", "mamba")}
    assert len(full) == 6 * 2 and all(forms["copy"]["device_ms"] / forms["step"]["device_ms"] >= 0.8 for forms in full.values())


def test_a_head_is_read_in_both_forms(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("# NVIDIA T4, torch 2.9.0+cu126, triton 3.5.0, 2026-01-31; errors against float64\na,b\n1,2\n")
    prose = data_files.head(table)
    table.write_text("# machine: NVIDIA T4\n# torch: 2.9.0+cu126\n# triton: 3.5.0\n# date: 2026-01-31\na,b\n1,2\n")
    assert prose == data_files.head(table) == {"machine": "NVIDIA T4", "torch": "2.9.0+cu126", "triton": "3.5.0", "date": "2026-01-31"}


def test_tested_versions_are_those_that_are_pinned():
    tested = {name: version for name, version, *_ in data_files.packages()[1:]}
    pins = (data_files.ROOT / "requirements.txt").read_text()
    assert {"Python", "torch", "triton", "numpy", "transformers"} <= tested.keys()
    assert all(f"{name}=={version}" in pins for name, version in tested.items() if name != "Python")
