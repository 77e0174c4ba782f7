"""Tokenizing files: same tokens for any number of processes, and errors that name the place."""

import gzip
import json

import numpy as np
import pytest
import zstandard

from olmoe_lightning.data import ByteTokenizer, DataError, TokenDataModule, load_tokenizer, read_text, tokenize_files

TEXTS = [f"Document {i}: naïve café\n" * (i % 7) for i in range(60)]  # every seventh is empty


def jsonl(texts):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def decoded(path):
    tokens = np.load(path)
    assert tokens[-1] == 256
    return [ByteTokenizer().decode(piece) for piece in np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(read_text, "BLOCK_BYTES", 700)  # many blocks, with lines across their borders


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_become_documents(tmp_path, suffix):
    data = jsonl(TEXTS)
    data = {"": data, ".gz": gzip.compress(data), ".zst": zstandard.compress(data)}[suffix]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(data)
    tokenize_files([str(tmp_path / f"a.jsonl{suffix}")], str(tmp_path / "out.npy"))
    assert decoded(tmp_path / "out.npy") == [text for text in TEXTS if text]
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["documents"] == sum(map(bool, TEXTS))
    assert manifest["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert manifest["tokens"] == manifest["documents"] + manifest["bytes"] == len(np.load(tmp_path / "out.npy"))
    assert (manifest["fingerprint"], manifest["dtype"]) == ("byte", "uint16")


def test_plain_text_is_one_document_per_file_in_the_order_of_names(tmp_path):
    for name, text in {"b.txt": "B\n", "sub/c.md": "C\r\n", "a.py": "\ufeffA", "skip.png": "no", "z.txt": ""}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text.encode())
    (tmp_path / "in" / "d.txt.gz").write_bytes(gzip.compress(b"D"))
    (tmp_path / "in" / "e.txt.zst").write_bytes(zstandard.compress(b"E1") + zstandard.compress(b"E2"))
    tokenize_files([str(tmp_path / "in")], str(tmp_path / "out.npy"))
    assert decoded(tmp_path / "out.npy") == ["A", "B\n", "D", "E1E2", "C\r\n"]
    tokenize_files([str(tmp_path / "in" / "*.txt"), str(tmp_path / "in" / "a.py")], str(tmp_path / "glob.npy"))
    assert decoded(tmp_path / "glob.npy") == ["B\n", "A"]


def test_output_does_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["olmoe_lightning.data.tokenize_files"], "BYTES_PER_WORKER", 1)
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "b.txt").write_text("one more")
    inputs = [str(tmp_path / "b.txt"), str(tmp_path / "a.jsonl")]
    for workers in (1, 2):
        tokenize_files(inputs, str(tmp_path / f"{workers}.npy"), tokenizer="bpe:280", workers=workers)
    for name in ("npy", "tokenizer.json"):
        assert (tmp_path / f"1.{name}").read_bytes() == (tmp_path / f"2.{name}").read_bytes()


def test_trained_vocabulary_lies_beside_and_fits_the_data_module(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    tokenize_files([str(tmp_path / "a.jsonl")], str(tmp_path / "out.npy"), tokenizer="bpe:300")
    tokenizer = load_tokenizer(str(tmp_path / "out.tokenizer.json"))
    tokens = np.load(tmp_path / "out.npy")
    assert tokenizer.decode(tokens) == "".join(TEXTS)
    assert (tokens == tokenizer.eos_id).sum() == sum(map(bool, TEXTS))
    TokenDataModule(str(tmp_path / "out.npy"), tokenizer=str(tmp_path / "out.tokenizer.json"), seq_len=16).setup()
    with pytest.raises(DataError, match=r"was made with tokenizer bpe:\w+, not byte"):
        TokenDataModule(str(tmp_path / "out.npy"), seq_len=16).setup()


def test_text_key_and_carriage_returns(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\r\n{"body": "one"}\r\n\n{"body": "two"}')
    tokenize_files([str(tmp_path / "a.jsonl")], str(tmp_path / "out.npy"), text_key="body")
    assert decoded(tmp_path / "out.npy") == ["one", "two"]


GOOD = jsonl(TEXTS)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", GOOD + b'{"text": \n', r"a\.jsonl: line 61 is not valid JSON \(Expecting value at column 10\)"),
        ("a.jsonl", GOOD + b'{"body": "x"}\n', r"line 61 has no key 'text' \(its keys: 'body'\); set --text-key"),
        ("a.jsonl", GOOD + b"[1]\n", r"line 61 is not a JSON object"),
        ("a.jsonl", GOOD + b'{"text": 5}\n', r"line 61: 'text' is int, not str"),
        ("a.jsonl", GOOD + b'{"text": "\xe9"}\n', rf"byte {len(GOOD) + 10} \(0xe9\) is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(GOOD + b'{"text": "\xe9"}\n'), rf"byte {len(GOOD) + 10} of the decompressed text"),
        ("a.txt", b"abc\xff", r"a\.txt: byte 3 \(0xff\) is not UTF-8; .*iconv"),
        ("a.jsonl.gz", gzip.compress(GOOD)[:-20], r"ends in the middle of the compressed data"),
        ("a.jsonl.zst", zstandard.compress(GOOD)[:-20], r"ends in the middle of the compressed data"),
        ("a.jsonl.gz", GOOD, r"is not good compressed data"),
        ("a.jsonl.zst", GOOD, r"is not good compressed data"),
        ("a.csv", b"x", r"a\.csv: unknown suffix '\.csv'; known are \.jsonl"),
        ("a.csv.gz", b"x", r"unknown suffix '\.csv\.gz'"),
        ("a.txt", b"", r"no text in 1 files; nothing written"),
    ],
)
def test_bad_input_names_file_place_and_remedy_and_leaves_nothing(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        tokenize_files([str(tmp_path / name)], str(tmp_path / "out.npy"))
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_wrong_arguments_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for inputs, output, message in [
        ([str(tmp_path / "none.txt")], "out.npy", "no such file"),
        ([str(tmp_path / "empty")], "out.npy", "in this folder"),
        ([], "out.npy", "no input"),
        ([str(tmp_path)], "out", r"must be the name of a \.npy file"),
    ]:
        with pytest.raises(DataError, match=message):
            tokenize_files(inputs, str(tmp_path / output))
