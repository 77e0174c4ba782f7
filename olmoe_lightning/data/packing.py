"""Packing: which part of a token stream becomes which row, and a batch from such parts. Pure NumPy.

A row is always one contiguous part of the stream, at most S tokens long; what is missing is padding. So a packing is
nothing but a list of row edges, and one function makes batches for all of them.

Letters used below: B rows of a batch, S sequence length, N tokens of a stream, R rows of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Packing = Literal["concat", "documents"]

IGNORE = -100  # label that does not count; the default ignore_index of torch's cross entropy


@dataclass(frozen=True)
class RowTable:
    """The rows of one token stream.

    Args:
        num_tokens: N.
        seq_len: S.
        edges: int64 [R+1] ascending, row r is ``[edges[r], edges[r+1])``; ``None`` means an edge every S tokens.
    """

    num_tokens: int
    seq_len: int
    edges: np.ndarray | None = None

    def __len__(self) -> int:
        return -(-self.num_tokens // self.seq_len) if self.edges is None else len(self.edges) - 1

    def spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First token and end of each row, both int64 with the shape of ``rows``."""
        if self.edges is not None:
            return self.edges[rows], self.edges[rows + 1]
        starts = rows.astype(np.int64) * self.seq_len
        return starts, np.minimum(starts + self.seq_len, self.num_tokens)


def pack_concat(num_tokens: int, seq_len: int) -> RowTable:
    """Documents end to end, cut every S tokens; only the stream's last row may be short."""
    return RowTable(num_tokens, seq_len)


def pack_documents(eos_positions: np.ndarray, num_tokens: int, seq_len: int) -> RowTable:
    """Whole documents only: each row takes the next documents, in order, as long as they fit.

    A document longer than S is cut into pieces of S; its last piece shares a row with the documents after it.

    Args:
        eos_positions: int64, ascending positions of the end-of-document id.
        num_tokens: N; tokens after the last end belong to one more document.
        seq_len: S.
    """
    ends = eos_positions.astype(np.int64) + 1
    if not ends.size or ends[-1] != num_tokens:
        ends = np.append(ends, num_tokens)
    starts = np.concatenate(([0], ends[:-1]))
    pieces = -(-(ends - starts) // seq_len)
    first_piece = np.cumsum(pieces) - pieces
    piece_starts = np.repeat(starts - first_piece * seq_len, pieces) + np.arange(pieces.sum()) * seq_len
    piece_ends = np.minimum(piece_starts + seq_len, np.repeat(ends, pieces))
    # A piece is at most S long, so the first piece that does not fit is always a later one: the walk below ends.
    next_row = np.searchsorted(piece_ends, piece_starts + seq_len, side="right").tolist()
    rows = []
    piece = 0
    while piece < len(next_row):
        rows.append(piece)
        piece = next_row[piece]
    return RowTable(num_tokens, seq_len, np.append(piece_starts[rows], num_tokens))


def make_batch(windows: np.ndarray, lengths: np.ndarray, eos_id: int, pad_id: int) -> dict[str, np.ndarray]:
    """The fields that a model trains on.

    Args:
        windows: int64 [B,S+1]: the tokens of each row, followed by the one token after it; -100 where there is none.
        lengths: int64 [B]: tokens of each row, without the one after it; 0 makes a row of padding.
        eos_id: the end-of-document id.
        pad_id: what padding holds in ``input_ids``.

    Returns:
        ``input_ids`` int64 [B,S]; ``labels`` int64 [B,S], the token to predict at each position, -100 at padding and at
        the end of a document, which must not predict the next one; ``document_ids`` int32 [B,S], 0, 1, 2, ... within
        a row, -1 at padding.
    """
    seq_len = windows.shape[1] - 1
    padding = np.arange(seq_len) >= lengths[:, None]
    input_ids = windows[:, :-1].copy()
    input_ids[padding] = pad_id
    is_end = (input_ids == eos_id) & ~padding
    labels = windows[:, 1:].copy()
    labels[padding | is_end] = IGNORE
    # the end token belongs to the document that it closes
    document_ids = np.cumsum(is_end, axis=1, dtype=np.int32) - is_end
    document_ids[padding] = -1
    return {"input_ids": input_ids, "labels": labels, "document_ids": document_ids}
