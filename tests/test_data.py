"""The texts are the sources' bytes, the splits never mix, and targets are inputs shifted by one."""

import doctest
import hashlib
import lzma
import subprocess
import sys
from collections import Counter
from importlib.resources import files

import pytest
import torch

from linattn_edu import data
from linattn_edu.data import images

SHA256 = {
    "emma": "dd08b340a56ad4a0a00718d5682528a5a5886ae0aef91c9e0fa528074fa64b75",
    "sense_and_sensibility": "0996d90842bbe8093f3b8142c1e77d1b20cff52d1d0615f3ed67733653e74e26",
    "pride_and_prejudice": "2e44edaa4946d64ad541c68e0224f5d672f43bf3ce2a8a0b0637ad5e02fc6eb3",
    "mengzi": "a91e6f18c1a2feced8abb064ce7c73702cc4e8cf212d0b3279577f6cda76a95a",
}


def as_bytes(ids):
    return bytes(ids.tolist())


@pytest.mark.parametrize("name", SHA256)
def test_text_is_byte_exact(name):
    raw = as_bytes(data.load_bytes(name))
    assert hashlib.sha256(raw).hexdigest() == SHA256[name] == data.BOOKS[name].sha256
    assert len(raw) == data.BOOKS[name].size
    assert data.load_text(name).encode("utf-8") == raw


def test_catalogue_is_what_is_shipped():
    shipped = [f for f in files("linattn_edu.data").joinpath("texts").iterdir()]
    assert {f.name for f in shipped} == {f"{name}.txt.xz" for name in SHA256}
    assert data.names() == tuple(data.BOOKS) and set(data.names()) == set(SHA256)
    assert sum(len(f.read_bytes()) for f in shipped) < 800_000


def test_load_bytes_is_a_fresh_copy():
    first = data.load_bytes("mengzi")
    first.zero_()
    assert data.load_bytes("mengzi").any()


def test_encode_and_decode_are_inverse():
    text = data.load_text("mengzi")[:100]
    ids = data.encode(text)
    assert ids.dtype == torch.int64 and len(ids) == len(text.encode("utf-8")) > len(text)
    assert data.decode(ids) == text
    assert data.decode(ids[:1]) == "\ufffd"
    assert data.encode("").shape == (0,) and data.decode(data.encode("")) == ""


def test_splits_share_no_text_and_never_mix():
    train, validation = map(data.members, ("train", "validation"))
    assert set(train) == {"emma", "sense_and_sensibility"}
    assert set(validation) == {"pride_and_prejudice"}
    texts = {split: [data.load_text(n) for n in data.members(split)] for split in data.SPLITS}
    for split in texts:
        x, y = next(data.batches(split, batch=64, length=200, seed=3))
        for row, target in zip(x, y):
            window = data.decode(row) + data.decode(target[-1:])
            # In one text of its own split, whole (no window straddles two novels), and in no other split.
            assert any(window in text for text in texts[split])
            assert not any(window in text for other in texts if other != split for text in texts[other])


def test_batches_are_shifted_by_one_and_depend_on_seed_and_number_alone():
    def take(n, **kwargs):
        stream = data.batches("train", batch=8, length=64, **kwargs)
        return [next(stream) for _ in range(n)]

    whole = take(6, seed=1)
    for x, y in whole:
        assert x.shape == y.shape == (8, 64) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
    resumed = take(2, seed=1, start=4)
    assert all(torch.equal(a, b) for p, r in zip(whole[4:], resumed) for a, b in zip(p, r))
    assert not torch.equal(whole[0][0], whole[1][0])
    assert not torch.equal(whole[0][0], take(1, seed=2)[0][0])


def test_every_training_window_is_equally_likely():
    emma, sense = (data.load_text(n) for n in data.members("train"))
    x, _ = next(data.batches("train", batch=4000, length=40, seed=0))
    rows = [data.decode(row) for row in x]
    share = sum(row in emma for row in rows) / len(rows)
    expected = len(emma) / (len(emma) + len(sense))
    assert abs(share - expected) < 4 * (expected * (1 - expected) / len(rows)) ** 0.5
    places = torch.tensor([emma.find(row) for row in rows if row in emma]) / len(emma)
    assert torch.histc(places, 10, 0, 1).min() > 0.7 * len(places) / 10


def test_windows_of_two_texts_are_all_reached_equally_often_and_none_straddles(monkeypatch):
    tiny = dict(zip(data.members("train"), (b"abcdef", b"uvwxy")))
    tiny_bytes = lambda name: torch.tensor(list(tiny[name]), dtype=torch.uint8)
    monkeypatch.setattr("linattn_edu.data.sampling.load_bytes", tiny_bytes)
    x, y = next(data.batches("train", batch=5000, length=3, seed=0))
    seen = Counter(data.decode(torch.cat([a, b[-1:]])) for a, b in zip(x, y))
    assert set(seen) == {"abcd", "bcde", "cdef", "uvwx", "vwxy"}
    assert all(abs(n - 1000) < 4 * (5000 * 0.2 * 0.8) ** 0.5 for n in seen.values())


def test_a_window_can_begin_and_end_with_the_text():
    size = data.BOOKS["mengzi"].size
    x, y = next(data.batches("mengzi", batch=32, length=size - 1, seed=0))
    raw = data.load_bytes("mengzi").long()
    assert torch.equal(x, raw[:-1].expand(32, -1)) and torch.equal(y, raw[1:].expand(32, -1))
    starts = next(data.batches("mengzi", batch=64, length=size - 2, seed=0))[0][:, 0]
    assert set(starts.tolist()) == {raw[0].item(), raw[1].item()}


def test_windows_cover_a_novel_in_order():
    raw = data.load_bytes("pride_and_prejudice").long()
    x, y = data.windows("validation", length=1000)
    assert x.shape == y.shape == ((len(raw) - 1) // 1000, 1000)
    assert torch.equal(x.flatten(), raw[: x.numel()])
    assert torch.equal(y.flatten(), raw[1 : x.numel() + 1])
    assert len(raw) - 1 - x.numel() == (len(raw) - 1) % 1000


def test_windows_of_a_split_keep_texts_apart_and_counted_windows_are_spread():
    x, y = data.windows("train", length=5000)
    parts = [data.windows(name, length=5000) for name in data.members("train")]
    assert torch.equal(x, torch.cat([p[0] for p in parts]))
    assert torch.equal(y, torch.cat([p[1] for p in parts]))
    few, few_targets = data.windows("train", length=5000, count=7)
    chosen = [i * len(x) // 7 for i in range(7)]
    assert torch.equal(few, x[chosen]) and torch.equal(few_targets, y[chosen])


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: data.load_text("pg19"), "`name`: got 'pg19', expected one of emma, "),
        (lambda: data.load_bytes("x"), "`name`: got 'x'"),
        (lambda: data.provenance("x"), "`name`: got 'x'"),
        (lambda: data.members("test"), "`source`: got 'test', expected one of train, validation, emma"),
        (lambda: data.windows("emma", length=0), "`length`: got 0, expected a whole number from 1 to 883026"),
        (lambda: data.windows("emma", length=883_027), "`length`: got 883027"),
        (lambda: data.windows("emma", length=800_000, count=2), "`count`: got 2, expected a whole number from 1 to 1"),
        (lambda: data.windows("emma", length=10, count=0), "`count`: got 0"),
        (lambda: next(data.batches(batch=0, length=8)), "`batch`: got 0, expected a whole number of at least 1"),
        (lambda: next(data.batches(batch=1, length=8, seed=-1)), "`seed`: got -1, expected a whole number"),
        (lambda: data.decode(torch.zeros(1, 5, dtype=torch.long)), "`ids`: got shape [1, 5], expected [T]"),
        (lambda: data.decode(torch.ones(5)), "`ids`: got dtype torch.float32, expected an integer dtype"),
        (lambda: data.decode(torch.tensor([97, 256])), "`ids`: got ids from 97 to 256, expected bytes, 0 to 255"),
        (lambda: next(data.batches(batch=1, length=673_687)), "`length`: got 673687, expected a whole number from"),
    ],
)
def test_bad_arguments_are_named(call, text):
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: data.encode(b"abc"), "`text`: got bytes b'abc', expected a string"),
        (lambda: data.decode([97, 98]), "`ids`: got list [97, 98], expected a tensor [T]"),
        (lambda: next(data.batches(batch=2.5, length=8)), "`batch`: got float 2.5, expected a whole number"),
        (lambda: next(data.batches(batch=2, length=8.0)), "`length`: got float 8.0, expected a whole number"),
        (lambda: next(data.batches(batch=2, length=8, start=0.5)), "`start`: got float 0.5, expected a whole number"),
        (lambda: data.windows(length=8, count=2.0), "`count`: got float 2.0, expected a whole number"),
    ],
)
def test_arguments_of_another_kind_are_named(call, text):
    with pytest.raises(TypeError) as error:
        call()
    assert text in str(error.value)


def test_provenance_is_printed():
    run = subprocess.run(
        [sys.executable, "-X", "utf8", "-m", "linattn_edu.data"], capture_output=True, check=True, encoding="utf-8"
    )
    assert run.stdout == f"{data.provenance()}\n\n{data.DIGITS}\n"
    for name, digest in SHA256.items():
        assert digest in data.provenance(name) and "public domain" in data.provenance(name)
        assert data.provenance(name) in run.stdout
    assert "r-cran-janeaustenr" in run.stdout and "chinese-poetry" in run.stdout


def test_docstring_examples_run():
    assert doctest.testmod(data).attempted >= 5
    assert doctest.testmod(data).failed == 0


# Images.


def test_digits_are_the_sources_and_are_split_without_overlap():
    raw = lzma.decompress(files("linattn_edu.data").joinpath("tables", "digits.csv.xz").read_bytes())
    assert hashlib.sha256(raw).hexdigest() == images.SHA256
    rows = [[int(float(x)) for x in line.split(",")] for line in raw.decode().splitlines()]
    (x, y), (x_test, y_test) = map(data.digits, ("train", "test"))
    assert x.shape == (1438, 8, 8) and x_test.shape == (359, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert (16 * x_test[1].flatten()).tolist() == rows[9][:64] and y_test[1] == rows[9][64]
    assert (16 * x[4].flatten()).tolist() == rows[5][:64] and y[4] == rows[5][64]
    assert x.min() == 0 and x.max() == 1 and set(y.tolist()) == set(y_test.tolist()) == set(range(10))
    with pytest.raises(ValueError, match="`split`: got 'validation'"):
        data.digits("validation")
