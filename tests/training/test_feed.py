"""What ranks are fed, and that the loop's result does not depend on how it comes."""

import pytest

from tests.ranks import RankFailedError, run_ranks
from tests.training.cases import TRAIN
from tests.training.stored_tokens import write_tokens

pytestmark = pytest.mark.ranks

ONE, FOUR = (1, 1, 1), (1, 2, 2)


def test_prefetching_changes_no_loss_and_no_norm_bit_for_bit(tokens):
    for found in run_ranks(4, "tests.training.feed_cases:with_and_without", tokens, FOUR):
        assert len(found[0]) == TRAIN.steps
        assert found[0] == found[1] == found[2]


def test_all_layouts_are_fed_the_same_samples_f55(tokens):
    (alone,) = run_ranks(1, "tests.training.feed_cases:fed", tokens, ONE)
    assert sorted(alone["tokens"]) == [0, 1, 2, 3, 4, 5, 6, 7]
    ranks = run_ranks(4, "tests.training.feed_cases:fed", tokens, FOUR)
    for kind in ("tokens", "documents", "validation"):
        together = {sample: row for rank in ranks for sample, row in rank[kind].items()}
        assert together == alone[kind]


def test_stages_between_get_documents_and_no_tokens(tokens):
    for rank, found in enumerate(run_ranks(3, "tests.training.feed_cases:fed", tokens, (1, 3, 1))):
        assert len(found["documents"]) == 8
        assert len(found["tokens"]) == (0 if rank == 1 else 8)


@pytest.mark.parametrize("layout", [ONE, FOUR], ids=str)
def test_one_rank_without_tokens_that_is_to_stop_stops_all_at_the_same_step_f25(tokens, layout):
    world_size = layout[0] * layout[1] * layout[2]
    for found in run_ranks(world_size, "tests.training.feed_cases:hangs", tokens, layout, 3):
        # Steps 0, 1, 2 are done; the read of step 3 hangs on the last rank.
        assert found["end"] == (3, True)
        assert found["records"] == 3
        # The step that did not count left no trace.
        assert found["unchanged"]


def test_an_error_while_reading_ends_the_loop_with_its_own_message(tmp_path):
    folder = write_tokens(tmp_path / "tokens", [255] * 100 + [300] * 5000, vocab_size=256)
    with pytest.raises(RankFailedError, match=r"DataError: .*holds the id 300"):
        run_ranks(1, "tests.training.feed_cases:with_and_without", folder, ONE)
