"""Packing: every token once, boundaries respected, whatever the documents look like."""

import numpy as np
import pytest

from olmoe_lightning.data.packing import make_batch, pack_concat, pack_documents

EOS, PAD = 256, 257


def stream(seed, longest, closed=True):
    """Documents of random length with tokens below 256, each closed by EOS; the last one may be left open."""
    rng = np.random.default_rng(seed)
    documents = [np.append(rng.integers(0, 256, rng.integers(0, longest)), EOS) for _ in range(rng.integers(1, 40))]
    tokens = np.concatenate(documents)
    return tokens if closed else np.append(tokens, [1, 2, 3])


def table_of(tokens, packing, seq_len):
    if packing == "concat":
        return pack_concat(len(tokens), seq_len)
    return pack_documents(np.flatnonzero(tokens == EOS), len(tokens), seq_len)


def batch_of(tokens, table):
    starts, stops = table.spans(np.arange(len(table)))
    windows = np.full((len(table), table.seq_len + 1), -100)
    for row, start, stop in zip(windows, starts, stops, strict=True):
        row[: len(tokens[start : stop + 1])] = tokens[start : stop + 1]
    return make_batch(windows, stops - starts, EOS, PAD)


CASES = [(seed, longest, closed) for seed in range(12) for longest in (3, 15, 60) for closed in (True, False)]


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_every_token_is_an_input_exactly_once_and_in_order(packing):
    for case in CASES:
        tokens = stream(*case)
        batch = batch_of(tokens, table_of(tokens, packing, 16))
        kept = batch["document_ids"] >= 0
        np.testing.assert_array_equal(batch["input_ids"][kept], tokens)
        assert (batch["input_ids"][~kept] == PAD).all()


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_every_token_but_a_document_s_first_is_a_label_exactly_once(packing):
    for case in CASES:
        tokens = stream(*case)
        batch = batch_of(tokens, table_of(tokens, packing, 16))
        is_first = np.append(True, tokens[:-1] == EOS)
        np.testing.assert_array_equal(batch["labels"][batch["labels"] != -100], tokens[~is_first])


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_labels_are_the_next_token_of_the_same_document(packing):
    for case in CASES:
        tokens = stream(*case)
        table = table_of(tokens, packing, 16)
        batch = batch_of(tokens, table)
        starts, _ = table.spans(np.arange(len(table)))
        for r, t in np.argwhere(batch["document_ids"] >= 0):
            position = starts[r] + t
            ends = tokens[position] == EOS or position + 1 == len(tokens)
            assert batch["labels"][r, t] == (-100 if ends else tokens[position + 1])


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_document_ids_count_the_documents_of_a_row(packing):
    for case in CASES:
        tokens = stream(*case)
        table = table_of(tokens, packing, 16)
        number = np.cumsum(tokens == EOS) - (tokens == EOS)  # of each token's document within the stream
        starts, stops = table.spans(np.arange(len(table)))
        for ids, start, stop in zip(batch_of(tokens, table)["document_ids"], starts, stops, strict=True):
            assert ids.dtype == np.int32
            np.testing.assert_array_equal(ids[: stop - start], number[start:stop] - number[start])
            assert (ids[stop - start :] == -1).all()


def test_documents_are_cut_only_when_longer_than_a_row():
    for case in CASES:
        tokens = stream(*case)
        table = table_of(tokens, "documents", 16)
        starts, stops = table.spans(np.arange(len(table)))
        assert ((stops - starts) > 0).all()
        assert ((stops - starts) <= 16).all()
        bounds = np.concatenate(([0], np.flatnonzero(tokens == EOS) + 1))
        for start in starts:
            document = bounds[bounds <= start][-1]
            assert (start - document) % 16 == 0  # 0: a document's begin; else a whole number of pieces into a long one


def test_rows_take_as_many_documents_as_fit():
    tokens = np.array([1, EOS] * 8 + [2] * 15 + [EOS] + [3, EOS])
    starts, stops = table_of(tokens, "documents", 16).spans(np.arange(3))
    assert starts.tolist() == [0, 16, 32]
    assert stops.tolist() == [16, 32, 34]


def test_concat_rows_are_full_but_the_last():
    starts, stops = pack_concat(50, 16).spans(np.arange(4))
    assert len(pack_concat(50, 16)) == 4
    assert len(pack_concat(48, 16)) == 3
    assert (stops - starts).tolist() == [16, 16, 16, 2]


def test_padding_equal_to_the_end_token_is_not_a_document():
    # Released tokenizers often have no padding token of their own.
    batch = make_batch(np.array([[5, EOS, -100, -100, -100]]), np.array([2]), EOS, EOS)
    assert batch["input_ids"].tolist() == [[5, EOS, EOS, EOS]]
    assert batch["document_ids"].tolist() == [[0, 0, -1, -1]]
    assert batch["labels"].tolist() == [[EOS, -100, -100, -100]]


def test_row_of_padding_counts_for_nothing():
    batch = make_batch(np.full((1, 5), -100), np.array([0]), EOS, PAD)
    assert (batch["input_ids"] == PAD).all()
    assert (batch["labels"] == -100).all()
    assert (batch["document_ids"] == -1).all()
