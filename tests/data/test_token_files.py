"""Token files: what is good opens lazily, what is bad gets one clear line before anything is trained."""

import os
import pickle

import numpy as np
import pytest

from olmoe_lightning.data import DataError
from olmoe_lightning.data import token_files as module
from olmoe_lightning.data.common import publish
from olmoe_lightning.data.token_files import TokenFile, token_dtype, write_tokens


def save(path, tokens):
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    return path


@pytest.mark.parametrize(
    ("name", "stored", "given"),
    [
        ("a.npy", "uint16", None),
        ("a.npy", "uint32", None),
        ("a.npy", "uint16", "uint16"),
        ("a.u16", "uint16", None),
        ("a.u32", "uint32", None),
        ("a.bin", "uint16", "uint16"),
        ("a.bin", "uint32", "uint32"),
    ],
)
def test_every_format_gives_back_its_tokens(tmp_path, name, stored, given):
    tokens = np.arange(1000, dtype=stored)
    file = TokenFile(save(tmp_path / name, tokens), given)
    assert len(file) == 1000
    np.testing.assert_array_equal(file.tokens, tokens)
    assert not file.tokens.flags.writeable


def test_map_is_not_pickled_and_opens_again(tmp_path):
    file = TokenFile(save(tmp_path / "a.npy", np.arange(100_000, dtype=np.uint32)))
    assert file.tokens[7] == 7
    data = pickle.dumps(file)
    assert len(data) < 2000
    assert pickle.loads(data).tokens[99_999] == 99_999


@pytest.mark.parametrize("num_tokens", [1, 999, 70_000])
@pytest.mark.parametrize("vocab_size", [258, 65_536, 65_537])
def test_written_file_is_an_ordinary_npy(tmp_path, num_tokens, vocab_size):
    tokens = np.arange(num_tokens) % vocab_size
    with write_tokens(tmp_path / "deep" / "a.npy", vocab_size) as writer:
        for piece in np.array_split(tokens, 3):
            writer.write(piece)
    loaded = np.load(tmp_path / "deep" / "a.npy")
    assert loaded.dtype == token_dtype(vocab_size) == (np.uint16 if vocab_size <= 65_536 else np.uint32)
    np.testing.assert_array_equal(loaded, tokens)
    np.testing.assert_array_equal(TokenFile(tmp_path / "deep" / "a.npy").tokens, tokens)


def test_interrupted_writing_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))

    def interrupted():
        with write_tokens(path, 258) as writer:
            writer.write(np.arange(5))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    np.testing.assert_array_equal(np.load(path), np.arange(10))
    assert os.listdir(tmp_path) == ["a.npy"]


def test_published_file_follows_the_umask(tmp_path):
    (tmp_path / "plain").write_bytes(b"x")
    with publish(tmp_path / "published") as file:
        file.write(b"x")
    assert (tmp_path / "published").stat().st_mode == (tmp_path / "plain").stat().st_mode


def bad_files(tmp_path):
    good = np.arange(100, dtype=np.uint16)
    save(tmp_path / "cut.npy", good)
    data = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(data[:-51])
    (tmp_path / "header.npy").write_bytes(data[:40])
    (tmp_path / "magic.npy").write_bytes(b"PK\x03\x04" + data)
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "odd.u32").write_bytes(bytes(4 * 10 + 3))
    (tmp_path / "text.jsonl").write_text("{}")
    (tmp_path / "what.zip").write_bytes(b"x")
    save(tmp_path / "none.npy", good[:0])
    save(tmp_path / "int64.npy", good.astype(np.int64))
    save(tmp_path / "big.npy", good.astype(">u2"))
    save(tmp_path / "matrix.npy", good.reshape(10, 10))
    save(tmp_path / "raw.bin", good)
    save(tmp_path / "good.npy", good)
    save(tmp_path / "good.u16", good)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("missing.npy", None, r"no such token file"),
        ("", None, r"is a folder"),
        ("empty.npy", None, r"is empty \(0 bytes\)"),
        ("none.npy", None, r"holds 0 tokens"),
        ("cut.npy", None, r"truncated at byte 277: the header promises 100 tokens, 74 are there"),
        ("header.npy", None, r"damaged \.npy header"),
        ("magic.npy", None, r"damaged \.npy header"),
        ("odd.u32", None, r"truncated at byte 43: not a multiple of 4 bytes"),
        ("int64.npy", None, r"wrong dtype int64.*astype\(np\.uint16\)"),
        ("big.npy", None, r"wrong dtype >u2"),
        ("matrix.npy", None, r"has shape \(10, 10\)"),
        ("raw.bin", None, r"type of a \.bin file must be given"),
        ("good.npy", "uint32", r"holds uint16 but dtype says uint32"),
        ("good.u16", "uint32", r"dtype uint32 contradicts the suffix"),
        ("text.jsonl", None, r"is text, not tokens; run `olmoe-lightning tokenize"),
        ("what.zip", None, r"unknown suffix '\.zip'"),
    ],
)
def test_bad_file_is_named_with_position_and_remedy(tmp_path, name, dtype, message):
    bad_files(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        TokenFile(tmp_path / name, dtype)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_first_token_outside_the_vocabulary_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SCAN_BLOCK", 64)  # several blocks in a small file
    tokens = np.zeros(1000, dtype=np.uint16)
    tokens[[777, 801]] = 258, 400
    file = TokenFile(save(tmp_path / "a.npy", tokens))
    with pytest.raises(DataError, match=r"token id 258 at position 777 does not fit a vocabulary of 258"):
        file.check_ids(258)
    with pytest.raises(DataError, match=r"token id 400 at position 801"):
        file.check_ids(259)
    file.check_ids(401)


def test_positions_are_found_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SCAN_BLOCK", 64)
    tokens = np.random.default_rng(0).integers(0, 9, 1000).astype(np.uint16)
    file = TokenFile(save(tmp_path / "a.npy", tokens))
    np.testing.assert_array_equal(file.positions_of(3), np.flatnonzero(tokens == 3))


def test_digest_tells_contents_apart_and_ignores_the_place(tmp_path):
    tokens = np.arange(500_000, dtype=np.uint32)
    first = TokenFile(save(tmp_path / "a.npy", tokens)).digest
    assert TokenFile(save(tmp_path / "b.npy", tokens)).digest == first
    tokens[-1] = 0
    assert TokenFile(save(tmp_path / "c.npy", tokens)).digest != first
    assert TokenFile(save(tmp_path / "d.npy", tokens[:-1])).digest != first
