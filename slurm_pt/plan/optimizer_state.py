"""Which part of a flat buffer each replica owns with ZeRO, and the bytes of its moments.

Integers only: the runtime cuts its buffers with these functions, and the planner counts with them.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1 (stage 1: the optimizer's state).
"""

from __future__ import annotations

from collections.abc import Sequence

MOMENTS = 2
"""AdamW's: the means of the gradient and of its square."""


def padded(numel: int, dp: int) -> int:
    """The numbers of a buffer that `dp` replicas can share evenly.

    >>> padded(10, 4), padded(8, 4)
    (12, 8)
    """
    return -(-numel // dp) * dp


def owned_range(numel: int, *, dp: int, dp_rank: int) -> range:
    """What one replica owns of the `numel` numbers in a padded buffer; the padding is nobody's.

    >>> [owned_range(10, dp=4, dp_rank=rank) for rank in range(4)]
    [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    """
    share = padded(numel, dp) // dp
    return range(min(numel, dp_rank * share), min(numel, (dp_rank + 1) * share))


def moment_bytes(buckets: Sequence[int], *, dp: int = 1, dp_rank: int = 0, number: int = 4) -> int:
    """Bytes of AdamW's moments on one rank.

    Args:
        buckets: how many numbers are in each flat buffer. To estimate, one of all parameters: off
            by less than one number a bucket.
        dp: replicas that share the moments; 1 without ZeRO.
        dp_rank: which of them.
        number: bytes of one moment, those of a weight: 4, or 8 in float64.

    >>> moment_bytes([1000]), moment_bytes([1000], dp=4)
    (8000, 2000)
    """
    owned = sum(len(owned_range(numel, dp=dp, dp_rank=dp_rank)) for numel in buckets)
    return MOMENTS * number * owned
