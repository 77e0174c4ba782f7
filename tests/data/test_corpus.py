"""The default corpus: real text from the running Python, split by file, cached safely."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from olmoe_lightning.data import ByteTokenizer, DataError, TokenDataModule
from olmoe_lightning.data import corpus as module
from olmoe_lightning.data.corpus import prepare_stdlib_corpus, split_of, stdlib_bpe, stdlib_documents


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    prepare_stdlib_corpus(directory, ByteTokenizer())
    return directory


@pytest.fixture
def library(tmp_path) -> Path:
    """A small stand-in for the library's folder, with what may go wrong in it."""
    root = tmp_path / "lib"
    for name, data in {
        "good.py": b'"""Module text."""\ndef f():\n    """\n    Function\n      text.\n    """\n',
        "nested/late.py": b'try:\n    pass\nexcept OSError:\n    def f():\n        "In a handler."\n',
        "latin.py": b"# -*- coding: latin-1 -*-\nname = '\xe9'\n",
        "undecodable.py": b"name = '\xe9'\n",
        "broken.py": b"def (:\n",
        "empty.py": b"",
        "test/test_it.py": b"x = 1\n",
        "site-packages/other.py": b"x = 1\n",
        "note.txt": b"x",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def test_documents_are_sources_and_their_docstrings(library):
    found = {}
    for name, domain, text in stdlib_documents(library):
        found.setdefault(domain, {})[name] = text
    assert sorted(found["code"]) == ["broken.py", "good.py", "latin.py", "nested/late.py"]
    assert found["code"]["latin.py"].endswith("'é'\n")
    prose = {name: text for name, text in found["prose"].items() if "#" not in name}
    assert prose == {"good.py": "Module text.\n\nFunction\n  text.\n", "nested/late.py": "In a handler.\n"}


def test_topics_are_prose_of_their_own(library):
    topics = [name for name, domain, _ in stdlib_documents(library) if "#" in name and domain == "prose"]
    assert len(topics) > 50
    assert {split_of(name) for name in topics} == {"train", "val"}


def test_folder_without_sources_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"has no sources here; set data\.train"):
        list(stdlib_documents(tmp_path))


def test_split_does_not_move():
    # Fixed for ever: a change would put text that old checkpoints were trained on into validation.
    names = [f"module_{i}.py" for i in range(2000)]
    held_out = [name for name in names if split_of(name) == "val"]
    assert held_out[:3] == ["module_5.py", "module_30.py", "module_60.py"]
    assert 60 <= len(held_out) <= 140  # 5 % of 2000, four standard deviations


def test_held_out_text_is_not_in_training(cache):
    files = prepare_stdlib_corpus(cache, ByteTokenizer())
    training = b"".join(np.load(f.path).astype(np.uint8).tobytes() for f in files["train"])
    pieces = []
    for f in files["val"]:
        tokens = np.load(f.path)
        for text in np.split(tokens, np.flatnonzero(tokens == 256)):
            if len(text) > 2000:  # 200 bytes from the middle: by chance they seldom occur twice, unlike licences
                pieces.append(text[len(text) // 2 :][:200].astype(np.uint8).tobytes())
    leaked = [piece for piece in pieces if piece in training]
    assert len(pieces) > 20
    assert len(leaked) <= len(pieces) // 10


def test_both_domains_have_both_splits(cache):
    files = prepare_stdlib_corpus(cache, ByteTokenizer())
    for split, least in (("train", 1_000_000), ("val", 20_000)):
        assert [f.domain for f in files[split]] == ["code", "prose"]
        for f in files[split]:
            assert f.num_tokens == len(np.load(f.path, mmap_mode="r")) >= least


def test_second_call_reuses_the_files(cache, monkeypatch):
    before = prepare_stdlib_corpus(cache, ByteTokenizer())
    monkeypatch.setattr(module, "stdlib_documents", lambda: pytest.fail("read the library again"))
    assert prepare_stdlib_corpus(cache, ByteTokenizer()) == before


def prepare_small(directory, library, barrier):
    module.stdlib_documents = lambda original=module.stdlib_documents: original(library)
    barrier.wait()
    prepare_stdlib_corpus(directory, ByteTokenizer())


def test_two_processes_at_once_leave_one_good_folder(tmp_path, library):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    processes = [context.Process(target=prepare_small, args=(tmp_path / "cache", library, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    (folder,) = (tmp_path / "cache").iterdir()
    assert json.loads((folder / "corpus.json").read_text())["code.train"] > 0


def test_interrupted_preparation_leaves_nothing(tmp_path, library, monkeypatch):
    def interrupted():
        yield from stdlib_documents(library)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "stdlib_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_stdlib_corpus(tmp_path / "cache", ByteTokenizer())
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_cannot_be_written_is_an_error_that_helps(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written .*; set data\.cache_dir"):
        prepare_stdlib_corpus(tmp_path / "file", ByteTokenizer())


def test_bpe_is_trained_on_the_training_split_only_and_cached(tmp_path, library, monkeypatch):
    def documents(name):
        return lambda: [*stdlib_documents(library), (name, "code", "zqzqzqzq " * 50_000)]

    assert (split_of("module_5.py"), split_of("module_0.py")) == ("val", "train")
    monkeypatch.setattr(module, "stdlib_documents", documents("module_0.py"))
    assert len(stdlib_bpe(tmp_path / "control", 400).encode("zqzqzqzq")) == 1  # the most frequent word of all
    monkeypatch.setattr(module, "stdlib_documents", documents("module_5.py"))
    tokenizer = stdlib_bpe(tmp_path / "cache", 400)
    assert tokenizer.vocab_size == 400
    assert len(tokenizer.encode("zqzqzqzq")) == 8  # never seen, so never merged
    monkeypatch.setattr(module, "stdlib_documents", lambda: pytest.fail("read the library again"))
    assert stdlib_bpe(tmp_path / "cache", 400).fingerprint == tokenizer.fingerprint


def test_data_module_uses_the_corpus_by_default(cache):
    data = TokenDataModule(cache_dir=str(cache), seq_len=64, batch_size=4)
    data.prepare_data()
    data.setup()
    assert data.source_names == ["code", "prose"]
    batch = next(iter(data.train_dataloader()))
    assert "\n" in data.tokenizer.decode(batch["input_ids"].flatten().tolist())
    assert len(data.val_dataloader()) > 100
