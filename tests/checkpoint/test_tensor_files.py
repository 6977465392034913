"""What ranks write of tensors, put together and read again; no process group needed."""

import pytest
import torch

from slurm_pt.checkpoint.tensor_files import join_indices, read_part, write_part
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.shard import Fragment, Shard


def written(folder, rank, tensor, shard):
    part = write_part(folder, rank, {"weight": tensor}, {"weight": shard})
    assert part is not None
    return part.index


def test_parts_that_two_ranks_wrote_are_read_in_other_parts(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    columns = [
        written(tmp_path, rank, whole[:, 3 * rank : 3 * rank + 3], Shard(1, 2, rank))
        for rank in (0, 1)
    ]
    index = join_indices(columns)
    for rank in (0, 1):
        rows = torch.zeros(2, 6)
        read_part(tmp_path, index, {"weight": rows}, {"weight": Shard(0, 2, rank)})
        assert torch.equal(rows, whole[2 * rank : 2 * rank + 2])
    numbers = Fragment.of(Shard(), (4, 6), range(5, 20))
    flat = torch.zeros(15)
    read_part(tmp_path, index, {"weight": flat}, {"weight": numbers})
    assert torch.equal(flat, torch.arange(5.0, 20.0))


def test_what_two_stages_wrote_alike_is_taken_once(tmp_path):
    both = [written(tmp_path, rank, torch.full((3,), 1.0 + rank), Shard()) for rank in (0, 1)]
    index = join_indices(both)
    found = torch.zeros(3)
    read_part(tmp_path, index, {"weight": found}, {})
    assert torch.equal(found, torch.ones(3))
    assert len(index["weight"].chunks) == 1


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ([], "shape \\(4, 3\\) has 12 elements, its chunks 6"),
        ([(torch.zeros(3, 3), Shard(0, 2, 1))], "shape \\(4, 3\\).*shape \\(6, 3\\)"),
        ([(torch.zeros(2, 3).double(), Shard(0, 2, 1))], "float32.*float64"),
    ],
    ids=["missing", "another shape", "another format"],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(tmp_path, others, reason):
    parts = [(torch.zeros(2, 3), Shard(0, 2, 0)), *others]
    indices = [written(tmp_path, rank, *part) for rank, part in enumerate(parts)]
    with pytest.raises(CheckpointError, match=f"weight.*{reason}"):
        join_indices(indices)


def test_a_rank_that_has_nothing_to_write_leaves_no_file(tmp_path):
    assert write_part(tmp_path, 0, {}, {}) is None
    assert list(tmp_path.iterdir()) == []
