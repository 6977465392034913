"""From step times to what is said about them: ratios per round, medians, spreads, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Times = Mapping[str, Sequence[float]]
"""Seconds per step by contestant; the n-th entries of all are from the same round."""


@dataclass(frozen=True)
class Ratio:
    """A quotient measured in every round."""

    median: float
    smallest: float
    largest: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.smallest:.3f}-{self.largest:.3f}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours over theirs, round by round: what disturbs a whole round cancels.

    >>> str(ratio([1.0, 2.0, 1.1], [2.0, 4.0, 2.0]))
    '0.500 [0.500-0.550]'
    """
    quotients = [our / their for our, their in zip(ours, theirs, strict=True)]
    return Ratio(median(quotients), min(quotients), max(quotients))


def disagreement(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two lists of losses.

    >>> disagreement([2.0, 1.0], [2.0, 1.25])
    0.2
    """
    pairs = zip(losses, expected, strict=True)
    return max(abs(loss - right) / abs(right) for loss, right in pairs)


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first one to the left, the others to the right.

    >>> print(render_table(["", "b"], [["tp2", "1.0"], ["dp2", "10.0"]]))
             b
    tp2    1.0
    dp2   10.0
    """
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rendered = []
    for line in lines:
        first, *others = (
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        rendered.append("   ".join([first, *others]).rstrip())
    return "\n".join(rendered)


def render_ratios(times: Mapping[str, Times], *, ours: str, peers: Sequence[str]) -> str:
    """One row a layout: our step time over each peer's. Below 1: we are faster."""
    rows = []
    for layout, of_layout in times.items():
        if ours in of_layout:
            cells = [
                str(ratio(of_layout[ours], of_layout[peer])) if peer in of_layout else "-"
                for peer in peers
            ]
            rows.append([layout, *cells])
    return render_table(["ours / peer", *peers], rows)


def render_shares(
    times: Mapping[str, Times],
    *,
    one_process: str,
    contestants: Sequence[str],
    ideals: Mapping[str, float],
) -> str:
    """One row a layout: each step time over the one of our runtime in one process."""
    rows = []
    for layout, of_layout in times.items():
        if one_process not in of_layout:
            continue
        baseline = of_layout[one_process]
        cells = [
            str(ratio(of_layout[name], baseline)) if name in of_layout else "-"
            for name in contestants
        ]
        rows.append([layout, f"{1000 * median(baseline):.1f}", f"{ideals[layout]:.3f}", *cells])
    return render_table(["share of one", "one, ms", "ideal", *contestants], rows)


def render_overheads(
    times: Mapping[str, Times], *, ours: str, floor: str, bubbles: Mapping[str, float]
) -> str:
    """One row a layout: how much longer our step takes than the floor, in percent.

    The floor is measured: ranks that never talk, each with its share of the batch. A pipeline's
    floor is longer by its bubble.
    """
    rows = []
    for layout, of_layout in times.items():
        if ours in of_layout and floor in of_layout:
            reachable = [seconds * bubbles[layout] for seconds in of_layout[floor]]
            over = ratio(of_layout[ours], reachable)
            percents = [100 * (part - 1) for part in (over.median, over.smallest, over.largest)]
            rows.append([layout, "{:+.1f} % [{:+.1f} to {:+.1f}]".format(*percents)])
    return render_table(["layout", "our step over the floor"], rows)
