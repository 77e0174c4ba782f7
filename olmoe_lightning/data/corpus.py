"""The default corpus: the standard library of the running Python. Real text, on every machine, without a download.

Two domains, so that experts have something to specialise in: ``code``, the sources, and ``prose``, their docstrings and
the language reference of ``pydoc_data.topics``.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from olmoe_lightning.data.common import DataError
from olmoe_lightning.data.token_files import write_tokens
from olmoe_lightning.data.tokenizer import BPETokenizer, Tokenizer
from olmoe_lightning.progress import progress_bar

Split = Literal["train", "val"]

DOMAINS = ("code", "prose")
HELD_OUT = 0.05  # share of files
FORMAT = 1  # counts up when the same library would give other token files
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test",
    "encodings",  # generated tables, near copies of each other: half of a pair in training would give the other away
}  # fmt: skip
TOPICS = "pydoc_data/topics.py"  # one big literal: prose, not code
_BATCH = 256  # documents per call of the tokenizer
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class CorpusFile:
    """One token file of the corpus: its domain, where it is, and how many tokens it has."""

    domain: str
    path: Path
    num_tokens: int


def default_cache_dir() -> Path:
    """``olmoe-lightning`` in the user's cache folder (``XDG_CACHE_HOME`` or ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "olmoe-lightning"


def split_of(name: str) -> Split:
    """The split of a file or topic: a stable hash of its name, the same on every machine and for both domains."""
    value = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "val" if value < HELD_OUT * 2**64 else "train"


def stdlib_documents(root: Path | None = None) -> Iterator[tuple[str, str, str]]:
    """The corpus as text, in a fixed order.

    Args:
        root: the library's folder; the running interpreter's by default.

    Yields:
        (name that decides the split, domain, text). Files that cannot be read or parsed are left out.

    Raises:
        DataError: there are no sources, as in some frozen or minimal installations.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = sorted(_source_files(root))
    if not names:
        raise DataError(f"{root}: the standard library has no sources here; set data.train to your own token files")
    with progress_bar("reading the standard library", len(names), "file") as bar:
        for name in names:
            try:
                with tokenize.open(str(root / name)) as file:  # honours the coding line
                    text = file.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                text = ""
            if name != TOPICS and text.strip():
                yield name, "code", text
                docstrings = _docstrings(text)
                if docstrings:
                    yield name, "prose", docstrings
            bar.update()
    for topic, text in sorted(_topics().items()):
        yield f"{TOPICS}#{topic}", "prose", text.strip() + "\n"


def prepare_stdlib_corpus(directory: Path, tokenizer: Tokenizer) -> dict[Split, list[CorpusFile]]:
    """Token files of the corpus, made on the first call and reused afterwards.

    The folder's name holds everything the files depend on. It is made under a temporary name and renamed when complete,
    so an interrupted run leaves nothing broken, and of two processes at once either one's files are used.

    Args:
        directory: the cache folder.
        tokenizer: makes the tokens.

    Returns:
        For ``train`` and ``val`` one file per domain, in the order of :data:`DOMAINS`.

    Raises:
        DataError: the folder cannot be written to, or there are no sources.
    """
    folder = directory / f"stdlib-v{FORMAT}-{_interpreter()}-{tokenizer.fingerprint.replace(':', '-')}"
    if not (folder / "corpus.json").is_file():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=directory))
        except OSError as error:
            raise DataError(
                f"{directory}: the cache cannot be written ({error.strerror}); set data.cache_dir to another folder"
            ) from error
        try:
            _write_corpus(temporary, tokenizer)
            temporary.chmod(0o755)  # mkdtemp's folders are private
            try:
                temporary.rename(folder)
            except OSError:  # another process was first, and its folder is as good as ours
                if not (folder / "corpus.json").is_file():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    counts = json.loads((folder / "corpus.json").read_text())
    return {
        split: [CorpusFile(domain, folder / f"{domain}.{split}.npy", counts[f"{domain}.{split}"]) for domain in DOMAINS]
        for split in ("train", "val")
    }


def stdlib_bpe(directory: Path, vocab_size: int) -> BPETokenizer:
    """A BPE tokenizer trained on the corpus' training split, made on the first call and reused afterwards.

    Args:
        directory: the cache folder.
        vocab_size: at least 258.
    """
    path = directory / f"stdlib-v{FORMAT}-{_interpreter()}-bpe-{vocab_size}.json"
    if not path.is_file():
        texts = (text for name, _, text in stdlib_documents() if split_of(name) == "train")
        BPETokenizer.train(texts, vocab_size).save(path)
    # read back in either case: whoever trained, everybody has the tokenizer that is in the file
    return BPETokenizer.load(path)


def _write_corpus(folder: Path, tokenizer: Tokenizer) -> None:
    texts: dict[str, list[str]] = {f"{domain}.{split}": [] for domain in DOMAINS for split in ("train", "val")}
    for name, domain, text in stdlib_documents():
        texts[f"{domain}.{split_of(name)}"].append(text)
    eos = np.array([tokenizer.eos_id])
    counts = {}
    with progress_bar("tokenizing the standard library", sum(map(len, texts.values())), "document") as bar:
        for key, documents in texts.items():
            with write_tokens(folder / f"{key}.npy", tokenizer.vocab_size) as writer:
                for start in range(0, len(documents), _BATCH):
                    batch = documents[start : start + _BATCH]
                    for ids in tokenizer.encode_batch(batch):
                        writer.write(ids)
                        writer.write(eos)
                    bar.update(len(batch))
                counts[key] = writer.num_tokens
    (folder / "corpus.json").write_text(json.dumps(counts, indent=1))


def _source_files(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        for file in files:
            if file.endswith(".py") and not file.startswith(
                "_sysconfigdata"
            ):  # the latter is this machine's, not Python's
                yield (Path(folder) / file).relative_to(root).as_posix()


def _docstrings(text: str) -> str:
    """All docstrings of a source, in their order, unindented; empty if it does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in other people's strings
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return ""
    found: list[str] = []
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                found.append(docstring.strip() + "\n")
        # definitions are statements: expressions hold none, and skipping them makes this several times faster
        todo.extend(reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS)]))
    return "\n".join(found)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a minimal installation; the docstrings remain
        return {}
    return dict(topics)


def _interpreter() -> str:
    return f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
