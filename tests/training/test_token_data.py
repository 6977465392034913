import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pt.errors import DataError
from slurm_pt.training.data import TokenDataset
from slurm_pt.training.sample_order import sample_order
from slurm_pt.training.token_folder import (
    INFO,
    TOKENS,
    read_token_info,
    verify_tokens,
)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**63),
    num_windows=st.integers(1, 3000),
    epoch=st.integers(0, 50),
)
def test_each_epoch_is_a_permutation_of_all_windows(seed, num_windows, epoch):
    samples = np.arange(epoch * num_windows, (epoch + 1) * num_windows)
    windows = sample_order(seed, num_windows)(samples)
    assert sorted(windows.tolist()) == list(range(num_windows))


@settings(deadline=None)
@given(num_windows=st.integers(2**40, 2**60), start=st.integers(0, 2**40))
def test_huge_corpora_need_no_memory_and_have_no_repeats(num_windows, start):
    windows = sample_order(1, num_windows)(np.arange(start, start + 100))
    assert len(set(windows.tolist())) == 100
    assert 0 <= windows.min() <= windows.max() < num_windows


def test_epochs_and_seeds_have_different_orders_that_look_random():
    number = 1000
    orders = [sample_order(3, number)(np.arange(e * number, (e + 1) * number)) for e in (0, 1)]
    orders.append(sample_order(4, number)(np.arange(number)))
    for index, order in enumerate(orders):
        # Of a random permutation, one element on average keeps its place, and one in a
        # thousand is followed by its successor.
        assert np.count_nonzero(order == np.arange(number)) < 10
        assert np.count_nonzero(np.diff(order) == 1) < 10
        for other in orders[:index]:
            assert np.count_nonzero(order == other) < 10


def write_tokens(folder, ids, *, dtype="uint16", **changes):
    folder.mkdir(exist_ok=True)
    np.asarray(ids, dtype=dtype).tofile(folder / TOKENS)
    info = {
        "dtype": dtype,
        "num_tokens": len(ids),
        "vocab_size": 1000,
        "tokenizer": "bytes",
        "documents": 1,
        "sha256": "",
        **changes,
    }
    (folder / INFO).write_text(json.dumps(info))
    return folder


def dataset(folder, *, seq_len=10, global_batch_size=12, vocab_size=1000, seed=0):
    return TokenDataset(
        folder,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        vocab_size=vocab_size,
        seed=seed,
    )


def test_a_batch_holds_windows_with_their_next_token(tmp_path):
    data = dataset(write_tokens(tmp_path / "tokens", range(641)))
    ids = data.batch(0, range(12))
    assert ids.shape == (12, 11)
    assert ids.dtype == np.int64
    assert (np.diff(ids, axis=1) == 1).all()
    assert (ids[:, 0] % 10 == 0).all()


def test_each_sample_is_seen_once_an_epoch_in_any_split_and_across_any_restart(tmp_path):
    # F50: 64 samples in batches of 12, so epochs end within a batch.
    folder = write_tokens(tmp_path / "tokens", range(641))
    whole = [dataset(folder).batch(step, range(12))[:, 0] // 10 for step in range(16)]
    seen = np.concatenate(whole)
    for epoch in range(3):
        assert sorted(seen[epoch * 64 : (epoch + 1) * 64].tolist()) == list(range(64))
    for killed_after in range(16):
        rest = dataset(folder)  # a new process
        for step in range(killed_after, 16):
            parts = [rest.batch(step, range(start, start + 3)) for start in range(0, 12, 3)]
            assert (np.concatenate(parts)[:, 0] // 10 == whole[step]).all()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_all_number_formats_are_read(tmp_path, dtype):
    folder = write_tokens(tmp_path / "tokens", range(200), dtype=dtype)
    assert dataset(folder, seq_len=199).batch(0, [0]).tolist() == [list(range(200))]


def test_fewer_tokens_than_one_sample_are_refused(tmp_path):
    folder = write_tokens(tmp_path / "tokens", range(10))
    with pytest.raises(DataError, match=r"10 tokens are fewer than the 11 .*train.seq_len=10"):
        dataset(folder)
    assert dataset(folder, seq_len=9).num_windows == 1


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    folder = write_tokens(tmp_path / "tokens", range(100))
    with pytest.raises(DataError, match=r"1000 ids.*model.vocab_size.*is 999"):
        dataset(folder, vocab_size=999)


def test_an_id_that_the_description_does_not_promise_is_refused(tmp_path):
    folder = write_tokens(tmp_path / "tokens", [5000] * 100)
    with pytest.raises(DataError, match="holds the id 5000"):
        dataset(folder).batch(0, [0])


def test_missing_damaged_and_cut_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"tokens.json is missing.*slurm-pt data prepare"):
        read_token_info(tmp_path / "nowhere")
    folder = write_tokens(tmp_path / "tokens", range(100))
    (folder / TOKENS).write_bytes(b"\0" * 150)
    with pytest.raises(DataError, match=r"150 bytes where tokens.json says 200"):
        read_token_info(folder)
    (folder / INFO).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_token_info(folder)
    write_tokens(folder, range(100), dtype="uint16", num_tokens="many")
    with pytest.raises(DataError, match="cannot be read"):
        read_token_info(folder)


def test_changed_tokens_fail_their_checksum(tmp_path):
    with pytest.raises(DataError, match="the file is damaged"):
        verify_tokens(write_tokens(tmp_path / "tokens", range(100), sha256="0" * 64))
