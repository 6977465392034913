import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from slurm_pt.errors import DataError
from slurm_pt.training import corpus
from slurm_pt.training.corpus import prepare, prepare_stdlib
from slurm_pt.training.token_folder import DOCUMENTS, TOKENS, read_token_info, verify_tokens


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "z.txt").write_text("last\n")
    (folder / "a.txt").write_text("näive\n")
    (folder / "b" / "c.txt").write_text("inner")
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").write_text("hidden")
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    (folder / "zeros.bin").write_bytes(b"ab\0cd")
    return folder


def test_documents_follow_in_sorted_order_each_ended_by_a_zero(texts, tmp_path):
    summary = prepare([texts], tmp_path / "out")
    expected = "näive\n\0inner\0last\n\0".encode()
    assert (tmp_path / "out" / TOKENS).read_bytes() == expected
    assert (summary.documents, summary.skipped, summary.num_tokens) == (3, 2, len(expected))
    assert (summary.vocab_size, summary.tokenizer, summary.created) == (256, "bytes", True)
    info = verify_tokens(tmp_path / "out")
    assert info.sha256 == hashlib.sha256(expected).hexdigest()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "texts"]


def borders(folder):
    return np.fromfile(folder / DOCUMENTS, dtype="<i8").tolist()


def test_the_borders_of_documents_are_written_beside_the_tokens(texts, tmp_path):
    prepare([texts], tmp_path / "out")
    # "näive\n" is 7 bytes, "inner" 5, "last\n" 5; each is ended by a 0.
    assert borders(tmp_path / "out") == [0, 8, 14, 20]
    tokens = (tmp_path / "out" / TOKENS).read_bytes()
    assert all(tokens[end - 1] == 0 for end in borders(tmp_path / "out")[1:])


def test_a_folder_of_the_first_versions_gets_its_borders_by_preparing_it_again(texts, tmp_path):
    prepare([texts], tmp_path / "out")
    (tmp_path / "out" / DOCUMENTS).unlink()
    assert not prepare([texts], tmp_path / "out").created
    assert borders(tmp_path / "out") == [0, 8, 14, 20]


def test_a_file_that_turns_out_late_not_to_be_text_leaves_no_trace(texts, tmp_path):
    good = prepare([texts], tmp_path / "good")
    (texts / "long.txt").write_bytes(b"text\n" * (corpus.PIECE_BYTES // 4) + b"\xff")
    bad = prepare([texts], tmp_path / "bad")
    assert (tmp_path / "bad" / TOKENS).read_bytes() == (tmp_path / "good" / TOKENS).read_bytes()
    assert bad.skipped == good.skipped + 1
    assert borders(tmp_path / "bad") == borders(tmp_path / "good")
    verify_tokens(tmp_path / "bad")


def test_large_files_are_read_in_pieces_that_lose_nothing(tmp_path):
    # Two-byte letters, at an odd offset: a piece's end falls within a letter.
    text = "a" + "ä" * corpus.PIECE_BYTES + "\nend"
    (tmp_path / "large.txt").write_text(text)
    prepare([tmp_path / "large.txt"], tmp_path / "out")
    assert (tmp_path / "out" / TOKENS).read_bytes() == text.encode() + b"\0"


def test_a_tokenizer_file_is_used_with_its_end_of_text_token(texts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "inner": 1, "last": 2, "</s>": 300}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    summary = prepare([texts], tmp_path / "out", tmp_path / "words.json")
    assert (summary.vocab_size, summary.tokenizer) == (301, "words.json")
    ids = np.fromfile(tmp_path / "out" / TOKENS, dtype="<u2")
    assert ids.tolist() == [0, 300, 1, 300, 2, 300]


def test_a_tokenizer_file_without_end_of_text_or_that_is_none_is_refused(texts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "words.json"))
    with pytest.raises(DataError, match="no token that ends a document"):
        prepare([texts], tmp_path / "out", tmp_path / "words.json")
    with pytest.raises(DataError, match="not a tokenizer JSON file"):
        prepare([texts], tmp_path / "out", texts / "a.txt")
    assert not (tmp_path / "out").exists()


def test_the_same_tokens_again_are_fine_and_others_are_refused(texts, tmp_path):
    prepare([texts], tmp_path / "out")
    assert not prepare([texts], tmp_path / "out").created
    (texts / "a.txt").write_text("changed")
    with pytest.raises(DataError, match="already holds other tokens"):
        prepare([texts], tmp_path / "out")
    assert read_token_info(tmp_path / "out").documents == 3
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "texts"]


def test_no_text_at_all_is_an_error_and_leaves_nothing(texts, tmp_path):
    with pytest.raises(DataError, match=r"of 1 files, 1 are not UTF-8"):
        prepare([texts / "zeros.bin"], tmp_path / "out")
    with pytest.raises(DataError, match="does not exist"):
        prepare([tmp_path / "nowhere"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_concurrent_preparers_all_end_well(texts, tmp_path):
    barrier = threading.Barrier(4)

    def prepare_when_all_are_ready(_):
        barrier.wait()
        return prepare([texts], tmp_path / "out")

    with ThreadPoolExecutor(4) as pool:
        summaries = list(pool.map(prepare_when_all_are_ready, range(4)))
    assert sum(summary.created for summary in summaries) == 1
    assert len({summary.num_tokens for summary in summaries}) == 1
    verify_tokens(tmp_path / "out")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "texts"]


def test_the_standard_librarys_source_is_prepared_once(tmp_path):
    summary = prepare_stdlib(tmp_path / "out")
    text = (tmp_path / "out" / TOKENS).read_bytes()
    assert summary.created
    assert summary.documents > 300
    assert Path(dataclass_source()).read_bytes() + b"\0" in text
    assert not prepare_stdlib(tmp_path / "out").created


def dataclass_source():
    import dataclasses

    return dataclasses.__file__
