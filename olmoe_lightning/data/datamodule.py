"""TokenDataModule: token files in, batches out, and a position that survives everything.

The only state is the number of samples consumed by all ranks together. The order of samples is a pure function of
(seed, sample number), so resuming with other workers, another batch size or other ranks continues the same stream.

Letters used below: B sequences per rank and batch, S sequence length, R rows (sequences) of all sources.
"""

from __future__ import annotations

import glob
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from olmoe_lightning._lightning import batches_processed
from olmoe_lightning.data.common import DataError
from olmoe_lightning.data.corpus import default_cache_dir, prepare_stdlib_corpus, stdlib_bpe
from olmoe_lightning.data.dataset import EvalRows, SourceRows, TrainRows, keep
from olmoe_lightning.data.order import MixtureOrder
from olmoe_lightning.data.packing import Packing
from olmoe_lightning.data.sampler import ResumableLoader, SampleRange
from olmoe_lightning.data.token_files import TokenDtype, TokenFile
from olmoe_lightning.data.tokenizer import Tokenizer, load_tokenizer, parse_bpe_size

STDLIB = "stdlib"


@dataclass(frozen=True)
class TokenSource:
    """One component of a mixture.

    Args:
        path: a token file, a glob such as ``books/*.npy``, or a list of these.
        weight: relative share of the samples; 0 switches the source off.
        name: what logs call it; the first file's name by default.
        dtype: type of a token, needed for raw ``.bin`` files only.
    """

    path: str | list[str]
    weight: float = 1.0
    name: str | None = None
    dtype: TokenDtype | None = None

    def files(self) -> list[TokenFile]:
        """The source's files; globs are sorted by name.

        Raises:
            DataError: a glob matches nothing, or a file is not a good token file.
        """
        paths = []
        for pattern in [self.path] if isinstance(self.path, str) else self.path:
            is_glob = glob.has_magic(pattern) and not Path(pattern).exists()  # brackets occur in names, too
            found = sorted(glob.glob(pattern, recursive=True)) if is_glob else [pattern]
            if not found:
                raise DataError(f"{pattern}: no file matches (relative to {Path.cwd()}); check the path")
            paths += found
        if not paths:
            raise DataError(f"source {self.name!r} names no file; give path a file, a glob or a list of these")
        return [TokenFile(path, self.dtype) for path in paths]


class TokenDataModule(LightningDataModule):
    """Batches of packed token sequences for training and validation.

    A batch is a dict of ``input_ids`` int64 [B,S], ``labels`` int64 [B,S] (already shifted, -100 where ignored),
    ``document_ids`` int32 [B,S] (-1 at padding) and ``source_ids`` int64 [B].

    An epoch is R div (ranks x B) batches. Rows that do not fill a batch come first in the next epoch; none is
    dropped.

    Args:
        train: the training mixture: a list of sources, the path or glob of a single one, or ``stdlib``, the Python
            standard library as code and prose.
        val: the validation sources, likewise; ``None`` means held-out files of ``stdlib`` if that is trained on, else
            no validation. Weights do not matter, every row is used once.
        tokenizer: ``byte``, the path of a ``tokenizer.json``, or (with ``stdlib``) ``bpe:SIZE`` to train one.
        vocab_size: rows of the model's embedding, to check against. ``None`` looks for ``config.vocab_size`` of the
            LightningModule.
        seq_len: S, tokens per sequence.
        batch_size: B, sequences per device and microbatch.
        val_batch_size: the same for validation; ``batch_size`` by default.
        packing: ``concat`` cuts the stream every S tokens; ``documents`` cuts only documents longer than S, and pads.
        num_workers: processes per device that read ahead; 0 reads in the training process.
        seed: of the order of samples.
        cache_dir: where the default corpus is kept; ``olmoe-lightning`` in the user's cache folder by default.
        check_tokens: read all token files once before training to make sure that their ids fit the vocabulary.
        strict_resume: refuse a checkpoint of other data, another seed or packing; ``False`` only warns.

    Raises:
        DataError: an argument or a file cannot be used; see ``docs/data.md`` for the list.
    """

    def __init__(
        self,
        train: str | list[TokenSource] = STDLIB,
        val: str | list[TokenSource] | None = None,
        tokenizer: str = "byte",
        vocab_size: int | None = None,
        seq_len: int = 256,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        packing: Packing = "concat",
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
        check_tokens: bool = True,
        strict_resume: bool = True,
    ) -> None:
        super().__init__()
        val_batch_size = batch_size if val_batch_size is None else val_batch_size
        for name, value, least in (
            ("seq_len", seq_len, 1),
            ("batch_size", batch_size, 1),
            ("val_batch_size", val_batch_size, 1),
            ("num_workers", num_workers, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise DataError(f"{name} ({value}) must be at least {least}")
        if packing not in ("concat", "documents"):
            raise DataError(f"packing ({packing!r}) must be 'concat' or 'documents'")
        if not isinstance(train, str):
            MixtureOrder([source.weight for source in train], seed)  # weights are checked before any file is read
        self.train, self.val = train, val
        self.vocab_size, self.seq_len, self.packing, self.seed = vocab_size, seq_len, packing, seed
        self.batch_size, self.val_batch_size, self.num_workers = batch_size, val_batch_size, num_workers
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.check_tokens, self.strict_resume = check_tokens, strict_resume
        self._tokenizer_spec = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._train_rows: TrainRows | None = None
        self._val_rows: EvalRows | None = None
        # Where the run stands: samples consumed when the trainer had processed so many batches, and how many each
        # further batch adds. Moved on at the begin of each epoch, so that the batch size may change between epochs.
        self._samples_before, self._batches_before, self._samples_per_batch = 0, 0, 0

    # ---- what others may ask ----------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ``bpe:SIZE`` is trained (or read from the cache) on first use."""
        if self._tokenizer is None:
            size = parse_bpe_size(self._tokenizer_spec)
            if size is not None and self.train == STDLIB:
                self._tokenizer = stdlib_bpe(self.cache_dir, size)
            else:
                self._tokenizer = load_tokenizer(self._tokenizer_spec)
        return self._tokenizer

    @property
    def rows_per_batch(self) -> int:
        """Rows of each training batch of a process; none is smaller."""
        return self.batch_size

    @property
    def source_names(self) -> list[str]:
        """Names of the mixture's components; ``source_ids`` of a training batch are indices into it."""
        return [source.name for source in self._rows().sources]

    @property
    def val_source_names(self) -> list[str]:
        """Names of the validation sources; ``source_ids`` of a validation batch are indices into it."""
        self._rows()
        return [source.name for source in self._val_rows.sources] if self._val_rows is not None else []

    @property
    def consumed_samples(self) -> int:
        """Sequences that all ranks together have trained on so far, in this run and those it resumes."""
        return self._samples_before + max(0, self._batches_done() - self._batches_before) * self._samples_per_batch

    def fingerprint(self) -> dict[str, Any]:
        """Everything the order of samples depends on, as plain values, and where the data lies."""
        rows = self._rows()
        return {
            "sources": [
                {
                    "name": source.name,
                    "weight": weight,
                    "files": [
                        {"path": str(f.path), "tokens": len(f), "dtype": f.dtype.name, "digest": f.digest}
                        for f in source.files
                    ],
                }
                for source, weight in zip(rows.sources, rows.mixture.weights, strict=True)
            ],
            "tokenizer": self.tokenizer.fingerprint,
            "packing": self.packing,
            "seq_len": self.seq_len,
            "seed": self.seed,
        }

    # ---- Lightning's hooks ------------------------------------------------------------------------------------------

    @override
    def prepare_data(self) -> None:
        """Make the default corpus if needed and check all data; one process per node does this, before training."""
        self._build(check_tokens=self.check_tokens)

    @override
    def setup(self, stage: str | None = None) -> None:
        """Open the data; every process does this. Without a Trainer it also checks the token ids."""
        if self._train_rows is None:
            self._build(check_tokens=self.check_tokens and self.trainer is None)
        if self._batches_done() == 0:  # a fresh Trainer; a checkpoint, if any, is loaded after this
            self._samples_before, self._batches_before = 0, 0

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Training batches of this rank, from the first sample that no rank has trained on."""
        rows, (replicas, rank) = self._rows(), self._data_parallel()
        per_batch = replicas * self.batch_size
        num_batches = max(1, len(rows) // per_batch)
        if len(rows) < per_batch:
            rank_zero_warn(
                f"the training data has {len(rows)} sequences of {self.seq_len} tokens, fewer than one global batch "
                f"({per_batch}): every batch repeats some; use a smaller batch_size or more data"
            )

        def first_sample(epoch: int) -> int:
            if self.trainer is None:  # no batches are counted; epochs follow each other as `set_epoch` says
                return self._samples_before + epoch * num_batches * per_batch
            return self._begin_epoch(per_batch)

        sampler = SampleRange(rows, replicas, rank, self.batch_size, num_batches, first_sample)
        return self._loader(rows, sampler, self.batch_size)

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation batches of this rank: every row once, in a fixed order, filled up with rows of padding.

        All ranks get the same number of full batches, so collectives of the model stay in step.
        """
        self._rows()
        if self._val_rows is None:
            return []
        replicas, rank = self._data_parallel()
        num_batches = -(-len(self._val_rows) // (replicas * self.val_batch_size))
        sampler = SampleRange(self._val_rows, replicas, rank, self.val_batch_size, num_batches, lambda epoch: 0)
        return self._loader(self._val_rows, sampler, self.val_batch_size)

    @override
    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The same as validation."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The same as validation."""
        return self.val_dataloader()

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, the same on every rank, and what the stream is."""
        return {
            "consumed_samples": self.consumed_samples,
            "batches": self._batches_done(),
            "fingerprint": self.fingerprint(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of a checkpoint.

        Raises:
            DataError: the checkpoint was made with other data, another order or packing; the message says which.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # validating a checkpoint on other data is nothing unusual
        differences = _differences(_order_of(state_dict["fingerprint"]), _order_of(self.fingerprint()))
        if differences:
            text = f"the checkpoint was trained on another stream of samples: {'; '.join(differences)}"
            if self.strict_resume:
                # Sample numbers would silently mean other rows: some seen twice, others never.
                raise DataError(f"{text}. Restore these, or set data.strict_resume=false to go on with the new stream")
            rank_zero_warn(f"{text}. Going on at sample {state_dict['consumed_samples']} of the new stream")
        self._samples_before, self._batches_before = state_dict["consumed_samples"], state_dict["batches"]

    # ---- how it works -----------------------------------------------------------------------------------------------

    def _begin_epoch(self, samples_per_batch: int) -> int:
        """First sample of an epoch; called at its first batch, when the trainer's progress is restored for certain."""
        self._samples_before, self._batches_before = self.consumed_samples, self._batches_done()
        self._samples_per_batch = samples_per_batch
        return self._samples_before

    def _batches_done(self) -> int:
        """Training batches that the trainer has finished, over all epochs and resumed runs.

        ``processed`` goes up after the optimizer's step and before ``on_train_batch_end``, where checkpoints are
        written; ``ready`` would count a batch that an exception has interrupted, ``completed`` would miss the last one.
        """
        return 0 if self.trainer is None else batches_processed(self.trainer)

    def _data_parallel(self) -> tuple[int, int]:
        """Number of data-parallel ranks and which this is; one pipeline's ranks share theirs."""
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (kwargs["num_replicas"], kwargs["rank"]) if kwargs else (1, 0)

    def _loader(self, rows: TrainRows | EvalRows, sampler: SampleRange, batch_size: int) -> DataLoader[Any]:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return ResumableLoader(
            rows,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=keep,
            pin_memory=on_gpu,
            persistent_workers=False,
            # Making an iterator takes a number. It must not be one of those that the model takes: a resumed run makes
            # other iterators than one that was not interrupted.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _rows(self) -> TrainRows:
        if self._train_rows is None:
            raise RuntimeError("TokenDataModule is not set up: call prepare_data() and setup(), as a Trainer does")
        return self._train_rows

    def _build(self, check_tokens: bool) -> None:
        tokenizer = self.tokenizer
        self._check_vocabulary(tokenizer)
        train, val = self._sources(self.train, "train"), self._sources(self.val, "val")
        rows = {id(source): self._open(source, tokenizer, check_tokens) for source in (*train, *val)}
        special = {"seq_len": self.seq_len, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
        self._train_rows = TrainRows([rows[id(s)] for s in train], [s.weight for s in train], self.seed, **special)
        self._val_rows = EvalRows([rows[id(s)] for s in val], **special) if val else None
        rank_zero_info(f"Training data: {_summary(self._train_rows)}")
        rank_zero_info(f"Validation data: {_summary(self._val_rows) if self._val_rows else 'none'}")

    def _check_vocabulary(self, tokenizer: Tokenizer) -> None:
        limit = self.vocab_size
        if limit is None and self.trainer is not None and self.trainer.lightning_module is not None:
            limit = getattr(getattr(self.trainer.lightning_module, "config", None), "vocab_size", None)
        if limit is not None and tokenizer.vocab_size > limit:
            raise DataError(
                f"tokenizer {self._tokenizer_spec!r} has {tokenizer.vocab_size} tokens, the model's vocab_size is "
                f"{limit}; "
                f"set the model's vocab_size to at least {tokenizer.vocab_size}"
            )

    def _sources(self, given: str | list[TokenSource] | None, split: str) -> list[TokenSource]:
        if given is None:
            if split == "val" and self.train != STDLIB:
                return []
            given = STDLIB
        if given == STDLIB:
            corpus = prepare_stdlib_corpus(self.cache_dir, self.tokenizer)
            # weighted by size: an epoch then has every sequence about once
            files = corpus["val" if split == "val" else "train"]
            return [TokenSource(str(f.path), weight=float(f.num_tokens), name=f.domain) for f in files]
        if isinstance(given, str):
            return [TokenSource(given)]
        if not given and split == "train":
            raise DataError("train names no source; give at least one, or `stdlib` for the Python standard library")
        return given

    def _open(self, source: TokenSource, tokenizer: Tokenizer, check_tokens: bool) -> SourceRows:
        files = source.files()
        for file in files:
            if len(file) < self.seq_len:
                raise DataError(
                    f"{file.path}: has {len(file)} tokens, fewer than one sequence (seq_len {self.seq_len}); "
                    "use a smaller seq_len, or join it with other files"
                )
            _check_manifest(file, tokenizer)
            if check_tokens:
                file.check_ids(tokenizer.vocab_size)
        return SourceRows(source.name or files[0].path.stem, files, self.seq_len, self.packing, tokenizer.eos_id)


def _check_manifest(file: TokenFile, tokenizer: Tokenizer) -> None:
    """A file that says which tokenizer made it must not be read with another one."""
    manifest = file.path.with_suffix(".manifest.json")
    if not manifest.is_file():
        return
    try:
        made_with = json.loads(manifest.read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{manifest}: is damaged ({error}); tokenize again, or delete it to skip this check") from error
    if made_with != tokenizer.fingerprint:
        raise DataError(
            f"{file.path}: was made with tokenizer {made_with}, not {tokenizer.fingerprint}; "
            "set data.tokenizer to the tokenizer.json that belongs to it"
        )


def _summary(rows: TrainRows | EvalRows) -> str:
    parts = [f"{source.name} {source.num_tokens:,} tokens" for source in rows.sources]
    return f"{len(rows):,} sequences of {rows.seq_len} ({', '.join(parts)})"


def _order_of(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """What the order depends on, flat. Files may have moved and sources may have been renamed."""
    flat = {key: value for key, value in fingerprint.items() if key != "sources"}
    for i, source in enumerate(fingerprint["sources"]):
        flat[f"weight of source {i}"] = source["weight"]
        for j, file in enumerate(source["files"]):
            flat[f"file {j} of source {i}"] = f"{file['tokens']} tokens, digest {file['digest']}"
    return flat


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    keys = list(dict.fromkeys([*old, *new]))
    return [f"{k}: {old.get(k, 'none')} → {new.get(k, 'none')}" for k in keys if old.get(k) != new.get(k)]
