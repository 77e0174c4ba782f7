"""Tokenizers: what goes in comes out, and ids, bytes and fingerprints mean what they say."""

import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers

from olmoe_lightning.data import BPETokenizer, ByteTokenizer, DataError, load_tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve café — 東京 🙂",
    "",
    "  two  spaces\t\n\n",
    "the cat and the hat " * 20,
]


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train(TEXTS, 300)


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "byte" else bpe


@pytest.mark.parametrize("text", [*TEXTS, "unseen: Ωmega \x00\x7f"])
def test_decode_inverts_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batch_encoding_equals_single_encoding(tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == tokenizer.encode(text)


def test_token_bytes_add_up_to_the_utf8_length(tokenizer):
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    for text in TEXTS:
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.token_bytes[[tokenizer.eos_id, tokenizer.pad_id]].tolist() == [0, 0]


def test_decode_never_raises_on_any_ids(tokenizer):
    ids = [*range(tokenizer.vocab_size), 255, 254, tokenizer.vocab_size + 7]
    assert "\ufffd" in tokenizer.decode(ids)


def test_special_tokens_are_left_out_of_decoded_text(tokenizer):
    assert (
        tokenizer.decode([*tokenizer.encode("a"), tokenizer.eos_id, tokenizer.pad_id, *tokenizer.encode("b")]) == "ab"
    )


def test_text_that_spells_a_special_token_does_not_become_one(bpe):
    ids = bpe.encode("end <|endoftext|> not really")
    assert bpe.eos_id not in ids
    assert bpe.eos_id not in bpe.encode_batch(["<|endoftext|>"])[0]
    assert bpe.decode(ids) == "end <|endoftext|> not really"


def test_lone_surrogates_are_replaced_not_fatal(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_bpe_compresses_and_uses_its_vocabulary(bpe):
    assert bpe.vocab_size == 300
    assert len(bpe.encode(TEXTS[-1])) < len(TEXTS[-1]) / 2


def test_saved_bpe_loads_equal(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    for again in (
        load_tokenizer(str(tmp_path / "tokenizer.json")),
        load_tokenizer(str(tmp_path)),
        pickle.loads(pickle.dumps(bpe)),
    ):
        assert again.fingerprint == bpe.fingerprint
        assert (again.vocab_size, again.eos_id, again.pad_id) == (bpe.vocab_size, bpe.eos_id, bpe.pad_id)
        assert again.encode(TEXTS[1]) == bpe.encode(TEXTS[1])
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]  # no temporary file is left


def test_fingerprint_tells_tokenizers_apart(bpe):
    assert BPETokenizer.train(TEXTS, 300).fingerprint == bpe.fingerprint
    assert BPETokenizer.train(TEXTS, 299).fingerprint != bpe.fingerprint
    assert BPETokenizer.train(TEXTS[::-1][:1], 300).fingerprint != bpe.fingerprint


def test_wrong_specs_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.json: no such tokenizer file"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
    with pytest.raises(DataError, match=r"trained on text first"):
        load_tokenizer("bpe:4096")
    with pytest.raises(DataError, match=r"\(257\) must be at least 258"):
        BPETokenizer.train(TEXTS, 257)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: is not a tokenizer file"):
        load_tokenizer(str(tmp_path / "bad.json"))
    words = HFTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(DataError, match=r"WordLevel with decoder None, not a byte-level BPE"):
        load_tokenizer(str(tmp_path / "words.json"))


def test_byte_level_file_without_an_end_token_is_refused(bpe, tmp_path):
    from tokenizers import decoders

    bare = HFTokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    bare.save(str(tmp_path / "bare.json"))
    with pytest.raises(DataError, match=r"has no end-of-document token"):
        load_tokenizer(str(tmp_path / "bare.json"))
