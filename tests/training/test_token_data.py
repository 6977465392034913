import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pt.errors import DataError
from slurm_pt.training.data import TokenDataset
from slurm_pt.training.sample_order import sample_order
from slurm_pt.training.token_folder import (
    DOCUMENTS,
    INFO,
    TOKENS,
    read_token_info,
    verify_tokens,
)
from tests.training.stored_tokens import write_megatron, write_tokens


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


def dataset(paths, *, seq_len=10, global_batch_size=12, vocab_size=1000, seed=0, **more):
    return TokenDataset(
        paths,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        vocab_size=vocab_size,
        seed=seed,
        **more,
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


def test_a_file_that_is_cut_while_it_is_read_is_an_error_that_names_it(tmp_path):
    folder = write_tokens(tmp_path / "tokens", range(641))
    data = dataset(folder)
    with (folder / TOKENS).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match=r"tokens.bin ends at byte 100, .*cut short while in use"):
        data.batch(0, range(12))


def test_a_path_to_nothing_names_both_forms_that_it_could_have(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.*neither.*nowhere.idx.*slurm-pt data prepare"):
        dataset(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------- documents


def test_each_input_token_knows_its_document(tmp_path):
    # Windows of 5 inputs over documents of 3, 4 and 9 tokens: aaabb bbccc ccccc (c is the last
    # target). Numbers are counted anew in each window.
    folder = write_tokens(tmp_path / "tokens", range(16), borders=[0, 3, 7, 16])
    data = dataset(folder, seq_len=5, mask_documents=True)
    places = data.places(0, range(3))
    found = dict(zip(places.starts.tolist(), data.documents(places).tolist(), strict=True))
    assert found == {0: [0, 0, 0, 1, 1], 5: [0, 0, 1, 1, 1], 10: [0, 0, 0, 0, 0]}
    assert data.documents(places).dtype == np.int32


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3000),
    grouped=st.integers(1, 4),
    seq_len=st.integers(1, 50),
    seed=st.integers(0, 100),
)
def test_both_forms_give_the_documents_that_were_written(
    tmp_path_factory, sizes, grouped, seq_len, seed
):
    # In the indexed dataset, each document is up to `grouped` sequences.
    folder = tmp_path_factory.mktemp("documents")
    firsts = [*range(0, len(sizes), grouped), len(sizes)]
    ends = [0, *np.cumsum(sizes).tolist()]
    borders = [ends[first] for first in firsts]
    number_of = np.repeat(np.arange(len(firsts) - 1), np.diff(borders))
    ids = np.arange(ends[-1]) % 1000
    if ids.size <= seq_len:
        seq_len = ids.size - 1
    if seq_len < 1:
        return
    write_tokens(folder / "own", ids, borders=borders)
    write_megatron(folder / "theirs", np.split(ids, ends[1:-1]), documents=firsts)
    for path in (folder / "own", folder / "theirs"):
        data = dataset(path, seq_len=seq_len, seed=seed, mask_documents=True)
        places = data.places(0, range(12))
        assert (data.tokens(places)[:, 0] == places.starts % 1000).all()
        for start, row in zip(places.starts.tolist(), data.documents(places).tolist(), strict=True):
            expected = number_of[start : start + seq_len]
            assert row == (expected - expected[0]).tolist()


def test_a_folder_without_documents_serves_where_they_are_not_needed(tmp_path):
    folder = write_tokens(tmp_path / "tokens", range(100))
    assert dataset(folder).num_windows == 9
    with pytest.raises(DataError, match=r"documents.bin is missing.*data.mask_documents=false"):
        dataset(folder, mask_documents=True)


@pytest.mark.parametrize(
    ("borders", "documents", "message"),
    [
        ([0, 50, 100], 3, r"24 bytes, where the 3 documents of tokens.json need 32"),
        ([0, 60, 50, 100], 3, r"damaged: number 2 is smaller than the one before"),
        ([0, 50, 90], 2, r"goes from 0 to 90, where tokens.json says 0 to 100"),
        ([10, 50, 100], 2, r"goes from 10 to 100"),
    ],
)
def test_damaged_borders_are_refused(tmp_path, borders, documents, message):
    folder = write_tokens(tmp_path / "tokens", range(100), borders=borders, documents=documents)
    with pytest.raises(DataError, match=message):
        dataset(folder, mask_documents=True)
    assert (folder / DOCUMENTS).exists()
    dataset(folder)


# ----------------------------------------------------------------------------------- mixtures


@pytest.fixture
def mixed(tmp_path):
    """Weights 3 : 1 over sources of 64 and 7 windows; ids tell which source they are of."""
    one = write_tokens(tmp_path / "one", [index % 500 for index in range(641)])
    other = write_megatron(tmp_path / "other", [[500 + index for index in range(71)]])
    return {one: 3.0, other: 1.0}


def test_a_mixture_keeps_its_shares_and_each_sources_epochs_f50(mixed):
    data = dataset(mixed)
    starts = {0: [], 1: []}
    for step in range(32):
        places = data.places(step, range(12))
        assert np.bincount(places.sources).tolist() == [9, 3]  # 12 samples, 3 : 1
        assert ((data.tokens(places)[:, 0] >= 500) == (places.sources == 1)).all()
        for source, start in zip(places.sources.tolist(), places.starts.tolist(), strict=True):
            starts[source].append(start // 10)
    for epoch in range(4):  # 288 samples of the one, 96 of the other
        assert sorted(starts[0][epoch * 64 : (epoch + 1) * 64]) == list(range(64))
    for epoch in range(13):
        assert sorted(starts[1][epoch * 7 : (epoch + 1) * 7]) == list(range(7))


def test_a_mixture_is_the_same_in_any_split_and_after_any_restart_f50_f55(mixed):
    whole = [dataset(mixed).batch(step, range(12)) for step in range(8)]
    for start in range(8):
        again = dataset(mixed)  # a new process, another number of data-parallel ranks
        for dp in (2, 3, 4, 12):
            size = 12 // dp
            parts = [again.batch(start, range(r * size, (r + 1) * size)) for r in range(dp)]
            assert (np.concatenate(parts) == whole[start]).all()


def test_a_mixture_of_one_source_is_that_source(tmp_path):
    folder = write_tokens(tmp_path / "tokens", range(641))
    alone, mixed = dataset(folder, seed=3), dataset({folder: 0.2}, seed=3)
    assert (alone.batch(7, range(12)) == mixed.batch(7, range(12))).all()


def test_a_source_of_a_mixture_that_is_not_there_is_named_by_its_place(mixed, tmp_path):
    with pytest.raises(DataError, match=r"data\.mixture\[2\]\.path=.*nowhere"):
        dataset({**mixed, tmp_path / "nowhere": 1.0})


# --------------------------------------------------------------------------- held-out windows


def test_held_out_windows_are_the_last_ones_and_are_never_trained_on(mixed):
    # 10 % of 64 windows is 6, and of 7 is 1.
    data = dataset(mixed, validation_fraction=0.1)
    assert data.num_windows == 58 + 6
    trained = {0: set(), 1: set()}
    for step in range(40):
        places = data.places(step, range(12))
        for source, start in zip(places.sources.tolist(), places.starts.tolist(), strict=True):
            trained[source].add(start // 10)
    assert trained == {0: set(range(58)), 1: set(range(6))}
    places = data.validation_places(0, range(4))  # 3 : 1
    assert set(zip(places.sources.tolist(), (places.starts // 10).tolist(), strict=True)) <= {
        *((0, window) for window in range(58, 64)),
        (1, 6),
    }


def test_held_out_batches_do_not_depend_on_the_seed_and_repeat_no_window(tmp_path):
    folder = write_tokens(tmp_path / "tokens", range(641))
    one, other = (dataset(folder, seed=s, validation_fraction=0.4) for s in (1, 2))
    batches = [one.validation_batch(number, range(12)) for number in range(2)]
    for number, batch in enumerate(batches):
        assert (other.validation_batch(number, range(12)) == batch).all()
    windows = (np.concatenate(batches)[:, 0] // 10).tolist()  # 24 of the last 26
    assert len(set(windows)) == 24
    assert min(windows) >= 38
    assert windows != sorted(windows)  # a few of them stand for all


def test_more_held_out_batches_than_there_are_windows_are_refused(tmp_path):
    folder = write_tokens(tmp_path / "tokens", range(641))
    data = dataset(folder, validation_fraction=0.4)
    data.check_validation(2)
    match = r"train.eval_batches=3 batches take 36 windows.*validation_fraction=0.4 holds out 26"
    with pytest.raises(DataError, match=match):
        data.check_validation(3)
    with pytest.raises(DataError, match=match):
        data.validation_batch(2, range(12))


def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(tmp_path):
    folder = write_tokens(tmp_path / "tokens", range(21))  # two windows
    assert dataset(folder, validation_fraction=0.01).num_windows == 1
    with pytest.raises(DataError, match=r"holds out 2 of its 2 windows.*none to train on"):
        dataset(folder, validation_fraction=0.9)
