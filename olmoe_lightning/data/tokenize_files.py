"""Text files to one token file: in parallel, in bounded memory, the same bytes for every number of processes."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from olmoe_lightning.data.common import DataError, publish
from olmoe_lightning.data.read_text import TextBlock, find_text_files, read_blocks
from olmoe_lightning.data.token_files import write_tokens
from olmoe_lightning.data.tokenizer import BPETokenizer, Tokenizer, load_tokenizer, parse_bpe_size
from olmoe_lightning.progress import progress_bar

TRAINING_BYTES = 1 << 28  # text that a new BPE vocabulary is learned from: more changes it little and takes long
BYTES_PER_WORKER = 1 << 24  # a process takes seconds to start; below this it would not earn them


def tokenize_files(
    inputs: list[str], output: str, tokenizer: str = "byte", text_key: str = "text", workers: int = 0
) -> None:
    """Tokenize text into one ``.npy`` token file, with an end-of-document token after each document.

    ``.jsonl`` holds a document per line, ``.txt``, ``.md`` and ``.py`` one per file; each also with ``.gz`` or
    ``.zst``. Empty documents are left out. Beside ``NAME.npy`` come ``NAME.manifest.json`` (counts, and which
    tokenizer) and, for a BPE, ``NAME.tokenizer.json``. The token file appears under its name only when complete.

    Args:
        inputs: files, folders and globs.
        output: the token file to write, ``.npy``; uint16 for vocabularies up to 65,536, else uint32.
        tokenizer: ``byte``, the path of a ``tokenizer.json``, or ``bpe:SIZE`` to train one on the inputs first.
        text_key: the key of the text in a JSON line.
        workers: processes; 0 for one per core. They are spawned, so a script calls this under
            ``if __name__ == "__main__":``. Small inputs are done in this process.

    Raises:
        DataError: input that cannot be used; the message names file, line or byte, and what to do.
    """
    path = Path(output)
    if path.suffix != ".npy":
        raise DataError(f"output {output!r} must be the name of a .npy file, for example {path / 'train.npy'}")
    if workers < 0:
        raise DataError(f"workers ({workers}) must be at least 0; 0 is one per core")
    files = find_text_files(inputs)
    if not files:
        raise DataError("no input: give at least one file, folder or glob")
    total = sum(os.path.getsize(file) for file in files)
    chosen = _choose_tokenizer(tokenizer, files, text_key, path)

    documents = text_bytes = 0
    eos = np.array([chosen.eos_id])
    workers = min(workers or os.cpu_count() or 1, 1 + total // BYTES_PER_WORKER)
    with ExitStack() as stack:
        writer = stack.enter_context(write_tokens(path, chosen.vocab_size))
        bar = stack.enter_context(progress_bar(f"tokenizing {len(files)} files", total, "B"))
        for ids, size, read in _run(files, chosen, text_key, workers):
            for document in ids:
                writer.write(document)
                writer.write(eos)
            documents += len(ids)
            text_bytes += size
            bar.update(read)
        if not documents:
            raise DataError(f"{', '.join(inputs)}: no text in {len(files)} files; nothing written")
    manifest = {
        "documents": documents,
        "tokens": writer.num_tokens,
        "bytes": text_bytes,
        "dtype": writer.dtype.name,
        "tokenizer": path.with_suffix(".tokenizer.json").name if isinstance(chosen, BPETokenizer) else tokenizer,
        "fingerprint": chosen.fingerprint,
        "vocab_size": chosen.vocab_size,
        "eos_id": chosen.eos_id,
        "inputs": inputs,
    }
    with publish(path.with_suffix(".manifest.json")) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    rank_zero_info(
        f"{path}: {writer.num_tokens:,} tokens ({writer.dtype.name}) "
        f"of {documents:,} documents, {text_bytes:,} bytes of text"
    )


def _choose_tokenizer(spec: str, files: Sequence[str], text_key: str, output: Path) -> Tokenizer:
    size = parse_bpe_size(spec)
    tokenizer = load_tokenizer(spec) if size is None else BPETokenizer.train(_sample(files, text_key), size)
    if isinstance(tokenizer, BPETokenizer):
        tokenizer.save(output.with_suffix(".tokenizer.json"))
    return tokenizer


def _sample(files: Sequence[str], text_key: str) -> Iterator[str]:
    """The documents at the begin of every file, TRAINING_BYTES of text in all."""
    per_file = -(-TRAINING_BYTES // len(files))
    with progress_bar("learning the vocabulary", len(files), "file") as bar:
        for file in files:
            left = per_file
            for block, _ in read_blocks(file):
                yield from block.documents(text_key)
                left -= len(block.data)
                if left <= 0:
                    break
            bar.update()


def _run(
    files: Sequence[str], tokenizer: Tokenizer, text_key: str, workers: int
) -> Iterator[tuple[list[np.ndarray], int, int]]:
    """(token ids of each document, bytes of text, bytes read) of every block, in the order of the input."""
    blocks = (pair for file in files for pair in read_blocks(file))
    if workers == 1:
        for block, read in blocks:
            yield *_encode(block, tokenizer, text_key), read
        return
    # This process reads and decompresses, the others parse and encode. At most two blocks per process are under way,
    # and results are taken in the order of submission.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (tokenizer, text_key)) as pool:
        running: deque[tuple[Future[Any], int]] = deque()
        try:
            for block, read in blocks:
                running.append((pool.submit(_work, block), read))
                if len(running) >= 2 * workers:
                    yield _result(running)
            while running:
                yield _result(running)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _result(running: deque[tuple[Future[Any], int]]) -> tuple[list[np.ndarray], int, int]:
    future, read = running.popleft()
    ids, size = future.result()
    return ids, size, read


def _encode(block: TextBlock, tokenizer: Tokenizer, text_key: str) -> tuple[list[np.ndarray], int]:
    texts = block.documents(text_key)
    small = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32  # a quarter of the bytes between processes
    ids = [array.astype(small, copy=False) for array in tokenizer.encode_batch(texts)]
    return ids, sum(len(text.encode("utf-8", errors="replace")) for text in texts)


_worker: tuple[Tokenizer, str] | None = None  # of a worker process, set once when it starts


def _start_worker(tokenizer: Tokenizer, text_key: str) -> None:
    global _worker
    # The library would start a thread per core in each of the processes, which already fill the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = tokenizer, text_key


def _work(block: TextBlock) -> tuple[list[np.ndarray], int]:
    assert _worker is not None
    return _encode(block, *_worker)
