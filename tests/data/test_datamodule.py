"""TokenDataModule: batches as promised, the same for any number of ranks, and clear errors before training."""

import itertools

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from olmoe_lightning.data import BPETokenizer, DataError, TokenDataModule, TokenSource

EOS = 256
S = 16


def write_source(path, num_rows, first=0, documents=False, short=0):
    """A file whose row r holds the value ``first + r`` everywhere (below 256), or documents of 5 tokens."""
    tokens = np.repeat(first + np.arange(num_rows), S)
    if documents:
        tokens[4::5] = EOS
    np.save(path, tokens[: len(tokens) - short].astype(np.uint16))
    return str(path)


def row_ids(batches):
    return [int(i) for batch in batches for i in batch["input_ids"][:, 0]]


class Ranked(Trainer):
    """A Trainer that believes to be one of several data-parallel ranks."""

    ranks, rank = 1, 0

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.ranks, "rank": self.rank}


def attach(data, ranks=1, rank=0):
    data.trainer = Ranked(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    data.trainer.ranks, data.trainer.rank = ranks, rank
    return data


def test_batch_has_the_promised_fields(tmp_path):
    path = write_source(tmp_path / "a.npy", 20, documents=True, short=3)
    data = TokenDataModule(path, val=path, seq_len=S, batch_size=4)
    data.setup()
    for batch in itertools.chain(data.train_dataloader(), data.val_dataloader()):
        assert {name: (field.dtype, tuple(field.shape)) for name, field in batch.items()} == {
            "input_ids": (torch.int64, (4, S)),
            "labels": (torch.int64, (4, S)),
            "document_ids": (torch.int32, (4, S)),
            "source_ids": (torch.int64, (4,)),
        }
        assert (batch["labels"][batch["input_ids"] == EOS] == -100).all()


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_an_epoch_has_every_token_once_whatever_the_files(tmp_path, packing):
    paths = [write_source(tmp_path / f"{i}.npy", n, documents=True, short=i) for i, n in enumerate((7, 1, 12))]
    paths[1] = write_source(tmp_path / "1.npy", 2, documents=True)
    data = TokenDataModule([TokenSource(paths)], seq_len=S, batch_size=1, packing=packing)
    data.setup()
    loader = data.train_dataloader()
    seen = torch.cat([batch["input_ids"][batch["document_ids"] >= 0] for batch in loader])
    expected = np.concatenate([np.load(path) for path in paths])
    np.testing.assert_array_equal(np.sort(seen.numpy()), np.sort(expected))
    assert len(loader) == len(list(loader))


def test_source_passes_are_complete_and_differently_shuffled(tmp_path):
    data = TokenDataModule(write_source(tmp_path / "a.npy", 40), seq_len=S, batch_size=8)
    data.setup()
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # what Lightning does
        epochs.append(row_ids(loader))
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert list(range(40)) not in epochs


def test_order_depends_on_the_seed_only(tmp_path):
    path = write_source(tmp_path / "a.npy", 40)

    def order(**kwargs):
        data = TokenDataModule(path, seq_len=S, **kwargs)
        data.setup()
        return row_ids(data.train_dataloader())

    assert order(batch_size=8) == order(batch_size=4) == order(batch_size=8, num_workers=2)
    assert order(batch_size=8) != order(batch_size=8, seed=1)


def test_mixture_keeps_its_weights_and_names_its_sources(tmp_path):
    sources = [
        TokenSource(write_source(tmp_path / "a.npy", 100), weight=3.0, name="first"),
        TokenSource(write_source(tmp_path / "b.npy", 100, first=100), weight=1.0),
        TokenSource(write_source(tmp_path / "c.npy", 50, first=200), weight=0.0),
    ]
    data = TokenDataModule(sources, seq_len=S, batch_size=8)
    data.setup()
    assert data.source_names == ["first", "b", "c"]
    loader = data.train_dataloader()
    assert len(loader) == 200 // 8  # a source that is switched off does not lengthen the epoch
    loader.sampler.num_batches = 128  # one block of the mixture
    batches = list(loader)
    ids = torch.cat([batch["source_ids"] for batch in batches])
    assert torch.bincount(ids).tolist() == [768, 256]
    np.testing.assert_array_equal(np.array(row_ids(batches)) // 100, ids)


@pytest.mark.parametrize("ranks", [2, 4])
def test_global_batches_are_the_same_for_any_number_of_ranks(tmp_path, ranks):
    sources = [TokenSource(write_source(tmp_path / f"{i}.npy", 50, first=50 * i), weight=i + 1) for i in range(3)]

    def batches(ranks, rank):
        data = attach(TokenDataModule(sources, seq_len=S, batch_size=8 // ranks), ranks, rank)
        data.setup()
        return [batch["input_ids"] for batch in data.train_dataloader()]

    alone = batches(1, 0)
    together = [torch.cat(parts) for parts in zip(*[batches(ranks, r) for r in range(ranks)], strict=True)]
    assert len(alone) == len(together) == 150 // 8
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_covers_every_row_once_with_equal_batches(tmp_path, ranks, num_workers):
    train = write_source(tmp_path / "t.npy", 8)
    val = [TokenSource(write_source(tmp_path / "a.npy", 9)), TokenSource(write_source(tmp_path / "b.npy", 14, first=9))]
    counts, seen = set(), []
    for rank in range(ranks):
        data = TokenDataModule(train, val=val, seq_len=S, val_batch_size=4, num_workers=num_workers)
        attach(data, ranks, rank).setup()
        batches = list(data.val_dataloader())
        counts.add(len(batches))
        assert all(len(batch["input_ids"]) == 4 for batch in batches)
        for batch in batches:
            padding = (batch["document_ids"] < 0).all(dim=1)
            assert (batch["labels"][padding] == -100).all()
            seen += batch["input_ids"][~padding, 0].tolist()
    assert len(counts) == 1
    assert sorted(seen) == list(range(23))


def test_validation_order_is_fixed_and_spread_over_sources(tmp_path):
    train = write_source(tmp_path / "t.npy", 8)
    val = [TokenSource(write_source(tmp_path / f"{i}.npy", 100, first=100 * i)) for i in range(2)]
    orders = []
    for seed in (0, 1):
        data = TokenDataModule(train, val=val, seq_len=S, seed=seed)
        data.setup()
        loader = data.val_dataloader()
        loader.sampler.set_epoch(seed + 5)
        orders.append(row_ids(loader))
    assert orders[0] == orders[1]
    assert 10 < sum(row >= 100 for row in orders[0][:40]) < 30


def test_no_validation_without_data(tmp_path):
    data = TokenDataModule(write_source(tmp_path / "a.npy", 8), seq_len=S)
    data.setup()
    assert data.val_dataloader() == []


def test_wrong_data_is_refused_before_training(tmp_path):
    good = write_source(tmp_path / "good.npy", 8)
    np.save(tmp_path / "short.npy", np.zeros(S - 1, dtype=np.uint16))
    np.save(tmp_path / "wide.npy", np.full(100, 300, dtype=np.uint16))
    (tmp_path / "t.manifest.json").write_text("{")
    np.save(tmp_path / "t.npy", np.zeros(S, dtype=np.uint16))
    for arguments, message in [
        ({"train": str(tmp_path / "short.npy")}, r"short\.npy: has 15 tokens, fewer than one sequence \(seq_len 16\)"),
        (
            {"train": str(tmp_path / "wide.npy")},
            r"wide\.npy: token id 300 at position 0 does not fit a vocabulary of 258",
        ),
        ({"train": good, "val": str(tmp_path / "wide.npy")}, r"wide\.npy: token id 300"),
        ({"train": str(tmp_path / "*.bin")}, r"no file matches"),
        ({"train": str(tmp_path / "t.npy")}, r"t\.manifest\.json: is damaged"),
        ({"train": [TokenSource(good, weight=-1.0)]}, r"weight -1\.0 of source 0"),
        ({"train": [TokenSource(good, weight=0.0)]}, r"sum to 0"),
        ({"train": []}, r"sum to 0"),
        ({"train": [TokenSource([])]}, r"names no file"),
        ({"train": good, "vocab_size": 257}, r"tokenizer 'byte' has 258 tokens, the model's vocab_size is 257"),
        ({"train": good, "tokenizer": "bpe:300"}, r"trained on text first"),
        ({"train": good, "batch_size": 0}, r"batch_size \(0\) must be at least 1"),
        ({"train": good, "seed": -1}, r"seed \(-1\)"),
        ({"train": good, "packing": "tight"}, r"packing \('tight'\)"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            TokenDataModule(**{"seq_len": S, **arguments}).prepare_data()
        assert "\n" not in str(caught.value)
    TokenDataModule(str(tmp_path / "wide.npy"), seq_len=S, check_tokens=False).setup()


def test_vocabulary_is_checked_against_the_model_in_the_trainer(tmp_path):
    class Small(BoringModel):
        class config:
            vocab_size = 100

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    with pytest.raises(DataError, match=r"has 258 tokens, the model's vocab_size is 100"):
        trainer.fit(Small(), TokenDataModule(write_source(tmp_path / "a.npy", 8), seq_len=S))


def test_fewer_rows_than_a_batch_only_warns(tmp_path):
    data = TokenDataModule(write_source(tmp_path / "a.npy", 3), seq_len=S, batch_size=8)
    data.setup()
    with pytest.warns(UserWarning, match=r"3 sequences .* fewer than one global batch \(8\)"):
        loader = data.train_dataloader()
    assert [len(batch["input_ids"]) for batch in loader] == [8]


def test_use_before_setup_says_so():
    with pytest.raises(RuntimeError, match="call prepare_data"):
        TokenDataModule().train_dataloader()


def test_command_line_builds_it_from_yaml(tmp_path):
    path = write_source(tmp_path / "a.npy", 8)
    BPETokenizer.train(["some text"], 258).save(tmp_path / "tokenizer.json")
    (tmp_path / "config.yaml").write_text(
        f"""
data:
  train:
    - path: {path}
      weight: 0.7
    - path: [{path}, "{tmp_path}/a*.npy"]
      name: both
  val: {path}
  tokenizer: {tmp_path}/tokenizer.json
  packing: documents
  seq_len: {S}
"""
    )
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(TokenDataModule, "data")
    data = parser.instantiate_classes(parser.parse_args([f"--config={tmp_path}/config.yaml"])).data
    assert data.train[0] == TokenSource(path, weight=0.7)
    data.setup()
    assert data.source_names == ["a", "both"]


def test_fingerprint_is_plain_and_names_what_matters(tmp_path):
    data = TokenDataModule(write_source(tmp_path / "a.npy", 8), seq_len=S, seed=4)
    data.setup()
    fingerprint = data.fingerprint()
    torch.save(fingerprint, tmp_path / "f.pt")
    assert torch.load(tmp_path / "f.pt", weights_only=True) == fingerprint
    (source,) = fingerprint["sources"]
    assert source["files"][0]["tokens"] == 8 * S
    assert source["files"][0]["path"] == str(tmp_path / "a.npy")
    assert (fingerprint["tokenizer"], fingerprint["seed"], fingerprint["seq_len"]) == ("byte", 4, S)
