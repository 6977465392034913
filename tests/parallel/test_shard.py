from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_pt.parallel.shard import Fragment, Shard

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_the_boxes_of_fragments_make_up_the_shard_in_its_order(shape, data):
    dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    shard = Shard() if dim is None else Shard(dim, 3, data.draw(st.integers(0, 2)))
    size = math.prod(shape)
    borders = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    whole = torch.full(shard.whole_shape(shape), -1)
    for begin, end in zip([0, *borders], [*borders, size], strict=True):
        fragment = Fragment.of(shard, shape, range(begin, end))
        boxes = fragment.boxes((end - begin,))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for offsets, lengths in boxes:
            count = math.prod(lengths)
            at = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            assert bool((whole[at] == -1).all())
            whole[at] = torch.arange(begin, begin + count).view(lengths)
            begin += count
        assert begin == end
        assert fragment.whole_shape((end - begin,)) == shard.whole_shape(shape)
    corner = shard.offsets(shape)
    held = tuple(slice(o, o + n) for o, n in zip(corner, shape, strict=True))
    assert whole[held].flatten().tolist() == list(range(size))
    assert int((whole == -1).sum()) == whole.numel() - size
