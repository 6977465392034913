"""What reading tokens costs: `python benchmarks/data.py` (needs no GPU, two minutes).

1. Tokens per second of each form of data, beside plain numpy slices of a memory map of the same
   file. The files are in the page cache: it is our own work that is measured, not the disk. Forms
   take turns in every round; the ratio is taken within a round.
2. How long the training loop waits for tokens, without and with prefetching, when a read takes
   half as long as a step, and twice as long.
"""

from __future__ import annotations

import json
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slurm_pt.training.data import TokenDataset

if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_pt.training.data import Int64s, Places

SEQ_LEN, BATCH, NUM_TOKENS = 1024, 64, 40_000_000
DOCUMENT = 500
"""Mean length of a document, in tokens."""
ROUNDS, BATCHES = 31, 20
STEPS, LOOP_ROUNDS = 25, 5


def main() -> None:
    """Runs both parts and prints them."""
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as name:
        folder = Path(name)
        write_files(folder)
        compare_forms(folder)
        compare_waits(folder)


def write_files(folder: Path) -> None:
    """The same tokens as a folder of ours and as an indexed dataset, and two smaller folders."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 50_000, NUM_TOKENS, dtype=np.uint16)
    inner = draw.integers(1, NUM_TOKENS, NUM_TOKENS // DOCUMENT)
    borders = np.concatenate([[0], np.unique(inner), [NUM_TOKENS]]).astype("<i8")
    write_folder(folder / "all", ids, borders)
    for part, end in (("half", NUM_TOKENS // 2), ("tenth", NUM_TOKENS // 10)):
        write_folder(folder / part, ids[:end], np.array([0, end], dtype="<i8"))
    write_folder(folder / "bytes", ids[:100_000] % 256, np.array([0, 100_000], dtype="<i8"), 256)
    ids.tofile(folder / "indexed.bin")
    sizes = np.diff(borders).astype("<i4")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sizes.size, borders.size)
    lists = sizes.tobytes() + (borders[:-1] * 2).tobytes()
    documents = np.arange(borders.size, dtype="<i8").tobytes()
    (folder / "indexed.idx").write_bytes(head + lists + documents)


def write_folder(
    path: Path, ids: np.ndarray[Any, Any], borders: Int64s, vocab_size: int = 50_000
) -> None:
    """A token folder."""
    path.mkdir()
    ids.tofile(path / "tokens.bin")
    borders.tofile(path / "documents.bin")
    info = {"dtype": "uint16", "num_tokens": int(ids.size), "vocab_size": vocab_size}
    info |= {"tokenizer": "none", "documents": int(borders.size) - 1, "sha256": ""}
    (path / "tokens.json").write_text(json.dumps(info))


def dataset(paths: Path | dict[Path, float], **more: Any) -> TokenDataset:
    """The dataset of the comparison."""
    shape = {"seq_len": SEQ_LEN, "global_batch_size": BATCH, "vocab_size": 50_304}
    return TokenDataset(paths, seed=1, **shape, **more)


# ------------------------------------------------------------------------------------- the forms


def compare_forms(folder: Path) -> None:
    """Prints tokens per second of each form, and its ratio to numpy's."""
    forms = {"numpy slices": numpy_slices(folder / "all" / "tokens.bin")}
    plain = dataset(folder / "all")
    packed = dataset(folder / "all", mask_documents=True)
    mixed = dataset({folder / "all": 0.6, folder / "half": 0.3, folder / "tenth": 0.1})
    indexed = dataset(folder / "indexed")
    indexed_packed = dataset(folder / "indexed", mask_documents=True)
    forms |= {
        "plain": lambda step: plain.batch(step, range(BATCH)),
        "packed": lambda step: with_documents(packed, step),
        "mixture of three": lambda step: mixed.batch(step, range(BATCH)),
        "Megatron": lambda step: indexed.batch(step, range(BATCH)),
        "Megatron, packed": lambda step: with_documents(indexed_packed, step),
    }
    rates: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(ROUNDS + 1):
        for name, read in forms.items():
            begin = time.perf_counter()
            for step in range(turn * BATCHES, (turn + 1) * BATCHES):
                read(step)
            seconds = time.perf_counter() - begin
            if turn > 0:  # the first one warms up
                rates[name].append(BATCHES * BATCH * SEQ_LEN / seconds / 1e6)
    print(f"batches of {BATCH} x {SEQ_LEN} tokens, {ROUNDS} rounds; median (quartiles)")
    for name, mine in rates.items():
        ratios = [a / b for a, b in zip(mine, rates["numpy slices"], strict=True)]
        print(f"  {name:18}{spread(mine)} million tokens/s   {spread(ratios)} of numpy's")


def numpy_slices(path: Path) -> Callable[[int], Any]:
    """What a loader without any of our checks would do."""
    tokens = np.asarray(np.memmap(path, dtype="<u2", mode="r"))

    def read(step: int) -> Any:
        starts = np.random.default_rng(step).integers(0, NUM_TOKENS - SEQ_LEN, BATCH)
        rows = [tokens[start : start + SEQ_LEN + 1] for start in starts.tolist()]
        return np.stack(rows).astype(np.int64)

    return read


def with_documents(data: TokenDataset, step: int) -> tuple[Any, Any]:
    """What a step reads when documents are masked."""
    places = data.places(step, range(BATCH))
    return data.tokens(places), data.documents(places)


# ------------------------------------------------------------------------------------- the waits


class SlowDataset(TokenDataset):
    """Reads as slow as a file system far away."""

    delay_s = 0.0

    def tokens(self, places: Places) -> Int64s:
        """The ids, late."""
        time.sleep(self.delay_s)
        return super().tokens(places)


def compare_waits(folder: Path) -> None:
    """Prints the loop's wait for tokens in each step."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cases = [(share, prefetch) for share in (0.5, 2.0) for prefetch in (0, 2)]
    waits: dict[tuple[float, int], list[float]] = {case: [] for case in cases}
    lengths: dict[tuple[float, int], list[float]] = {case: [] for case in cases}
    quick: list[float] = []
    run_loop(folder, delay_s=0.0, prefetch=0)  # warms up
    for _ in range(LOOP_ROUNDS):
        step_s = statistics.median(run_loop(folder, delay_s=0.0, prefetch=0)[0])
        quick.append(1e3 * step_s)
        for case in cases:
            share, prefetch = case
            steps, waited = run_loop(folder, delay_s=share * step_s, prefetch=prefetch)
            waits[case] += [wait / step_s for wait in waited]
            lengths[case] += [length / step_s for length in steps]
    print(f"training loop, {LOOP_ROUNDS} rounds of {STEPS} steps; a step is {spread(quick)} ms")
    for (share, prefetch), mine in waits.items():
        print(
            f"  read {share:g} x a step, prefetch {prefetch}: waits {spread(mine)} x a step; "
            f"takes {spread(lengths[share, prefetch])} x a step"
        )
    dist.destroy_process_group()


def run_loop(folder: Path, *, delay_s: float, prefetch: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of its wait for tokens."""
    import torch

    from slurm_pt.config.schema import ModelConfig, ParallelConfig, TrainConfig
    from slurm_pt.parallel.groups import create_groups
    from slurm_pt.plan.layout import ParallelLayout
    from slurm_pt.training.loop import StepRecord, train_loop
    from slurm_pt.training.rank_model import RankModel
    from slurm_pt.training.step import TrainStep

    model = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=256, max_seq_len=64)
    train = TrainConfig(steps=STEPS, global_batch_size=4, micro_batch_size=2, seq_len=64)
    layout = ParallelLayout(tp=1, pp=1, dp=1)
    groups = create_groups(layout, rank=0, device=torch.device("cpu"), timeout_s=60.0)
    held = RankModel(model, parallel=ParallelConfig(), train=train, groups=groups)
    data = SlowDataset(folder / "bytes", seq_len=64, global_batch_size=4, vocab_size=256, seed=0)
    data.delay_s = delay_s
    records: list[StepRecord] = []
    train_loop(TrainStep(held, train, data), record=records.append, prefetch=prefetch)
    groups.close()
    settled = records[5:]
    return [record.step_s for record in settled], [record.data_s for record in settled]


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    digits = 2 if middle < 10 else 1
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


if __name__ == "__main__":
    main()
