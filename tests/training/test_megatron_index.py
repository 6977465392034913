import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pt.errors import DataError
from slurm_pt.training.data import open_source
from slurm_pt.training.megatron_index import HEADER
from tests.training.stored_tokens import CODES, write_megatron

SEQUENCES = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@settings(deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 120), max_size=9), min_size=1, max_size=40),
    dtype=st.sampled_from(sorted(CODES)),
    data=st.data(),
)
def test_what_was_written_is_read(tmp_path_factory, sequences, dtype, data):
    firsts = data.draw(st.sets(st.integers(1, len(sequences)))) | {0, len(sequences)}
    prefix = tmp_path_factory.mktemp("indexed") / "corpus_text_document"
    write_megatron(prefix, sequences, documents=sorted(firsts), dtype=dtype)
    source = open_source(prefix, documents=True)
    ids = [token for sequence in sequences for token in sequence]
    assert source.num_tokens == len(ids)
    assert source.read([0], len(ids)).tolist() == [ids]
    starts = [sum(map(len, sequences[:first])) for first in sorted(firsts)]
    expected = {start for start in starts if 0 < start < len(ids)}
    assert set(source.boundaries(0, len(ids)).tolist()) == expected


def test_the_header_is_laid_out_as_megatron_writes_it(tmp_path):
    prefix = write_megatron(tmp_path / "x.y", SEQUENCES)  # a dot is part of the name
    raw = (tmp_path / "x.y.idx").read_bytes()
    # 9 magic, 8 version, 1 format, 8 + 8 counts; 3 int32, 3 int64, 4 int64.
    assert HEADER.size == 34
    assert len(raw) == 34 + 3 * 4 + 3 * 8 + 4 * 8
    assert raw[:18] == b"MMIDIDX\0\0" + bytes([1, 0, 0, 0, 0, 0, 0, 0]) + bytes([8])
    assert open_source(prefix).read([1], 3).tolist() == [[2, 3, 4]]


def refused(prefix, message):
    with pytest.raises(DataError, match=message) as caught:
        open_source(prefix, documents=True)
    text = str(caught.value)
    assert f"data.path={prefix}" in text
    assert "To fix: " in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, r"x.idx begins with b'TNTIDX.*not with b'MMIDIDX"),
        ({"version": 2}, r"x.idx has version 2, and only 1"),
        ({"code": 7}, r"x.idx says that ids have the format 7 \(float32\), none of 1 \(uint8\)"),
        ({"code": 99}, r"format 99 \(unknown\)"),
        ({"documents": [0, 2]}, r"documents of .*x.idx do not go from sequence 0 to 3"),
        ({"documents": [1, 3]}, r"do not go from sequence 0 to 3"),
        ({"documents": []}, r"do not go from sequence 0 to 3"),
        ({"documents": [0, 2, 1, 3]}, r"documents of .*x.idx: number 2 is smaller"),
    ],
)
def test_an_index_of_another_kind_is_refused(tmp_path, changes, message):
    refused(write_megatron(tmp_path / "x", SEQUENCES, **changes), message)


@pytest.mark.parametrize("kept", [0, 33, 34, 60, 101])
def test_an_index_that_was_cut_is_refused_wherever_it_was_f47(tmp_path, kept):
    prefix = write_megatron(tmp_path / "x", SEQUENCES)
    raw = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(raw[:kept])
    refused(prefix, rf"x.idx has {kept} bytes, .*cut short")


def test_ids_that_were_cut_or_are_of_another_dataset_are_refused_f47(tmp_path):
    prefix = write_megatron(tmp_path / "x", SEQUENCES)
    raw = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(raw[:-1])
    refused(prefix, r"sequence 2 has 4 tokens from byte 10 on, .*outside of .*x.bin \(17 bytes\)")
    (tmp_path / "x.bin").write_bytes(raw + b"\0\0")
    refused(prefix, r"sequences of .*x.idx end at byte 18, but .*x.bin has 20 bytes")


@pytest.mark.parametrize("pointer", [-2, 2**40, 16])
def test_a_pointer_outside_of_the_file_is_refused(tmp_path, pointer):
    prefix = write_megatron(tmp_path / "x", SEQUENCES)
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    at = 34 + 3 * 4 + 8  # of sequence 1, which has 2 tokens: bytes 16 .. 20 of 18
    raw[at : at + 8] = np.int64(pointer).tobytes()
    (tmp_path / "x.idx").write_bytes(raw)
    refused(prefix, rf"sequence 1 has 2 tokens from byte {pointer} on, which is outside of .*x.bin")


def test_a_gap_between_sequences_is_refused(tmp_path):
    prefix = write_megatron(tmp_path / "x", SEQUENCES)
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    at = 34 + 3 * 4 + 8
    raw[at : at + 8] = np.int64(8).tobytes()  # where 6 is expected
    (tmp_path / "x.idx").write_bytes(raw)
    refused(prefix, r"in .*x.idx, sequence 1 does not follow the one before")


@pytest.mark.parametrize("missing", ["x.bin", "x.idx"])
def test_a_missing_half_is_named(tmp_path, missing):
    prefix = write_megatron(tmp_path / "x", SEQUENCES)
    (tmp_path / missing).unlink()
    refused(prefix, f"{missing} is missing")


def test_the_name_of_a_file_instead_of_the_prefix_is_corrected(tmp_path):
    prefix = write_megatron(tmp_path / "x", SEQUENCES)
    with pytest.raises(DataError, match=rf"To fix: set data.path={prefix}\."):
        open_source(tmp_path / "x.bin")
