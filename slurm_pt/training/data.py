"""Which tokens a step sees.

A batch is a function of (seed, step, index in the global batch). There is no state to save:
neither the number of ranks nor a restart changes what a step sees.

Samples are windows of `seq_len` + 1 tokens of a source, whatever documents they cut or join. The
loss counts every token of a window, also a document's first one, which is then predicted from the
end of the document before: nanoGPT and Megatron-LM count it too, unless asked otherwise.
numpy only, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slurm_pt.errors import DataError
from slurm_pt.training.megatron_index import index_of, open_megatron_index, tokens_of
from slurm_pt.training.mixture import MixtureOrder
from slurm_pt.training.sample_order import SampleOrder, sample_order
from slurm_pt.training.token_folder import open_token_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_pt.training.token_source import TokenSource

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

VALIDATION_SEED = 0
"""Of the order of held-out windows: the same for all runs, so that their losses compare."""


@dataclass(frozen=True)
class Places:
    """Where some samples are: each one's source, and where its window begins there (tokens)."""

    sources: Int64s
    starts: Int64s


@dataclass(frozen=True)
class _Part:
    """One source, cut into windows: first those to train on, then those held out."""

    source: TokenSource
    order: SampleOrder
    num_held_out: int
    held_out_order: SampleOrder | None


class TokenDataset:
    """Batches of windows of `seq_len` + 1 tokens; windows overlap by that one token.

    Each window of a source is seen once in an epoch of that source, in an order that is a
    function of (seed, epoch): sample g of a source is number g modulo the number of its windows
    in epoch g // that number. With several sources, `MixtureOrder` says which one a sample of the
    run comes from, and how many of that source came before.

    Args:
        paths: A token folder, or the prefix of a Megatron-LM dataset; or several, with weights.
        mask_documents: Find the borders of documents, for `documents`.
        validation_fraction: Part of each source's windows, at its end, that is held out: one
            at least, unless 0. The first held-out token is still the last target of the window
            before, so no target of a held-out window was one in training.

    Raises DataError for files that are missing, damaged, too small, or made for another model.
    """

    def __init__(
        self,
        paths: Path | Mapping[Path, float],
        *,
        seq_len: int,
        global_batch_size: int,
        vocab_size: int,
        seed: int,
        mask_documents: bool = False,
        validation_fraction: float = 0.0,
    ):
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.vocab_size = vocab_size
        self.mask_documents = mask_documents
        self.validation_fraction = validation_fraction
        weights = paths if isinstance(paths, Mapping) else {paths: 1.0}
        self._parts: list[_Part] = []
        for place, path in enumerate(weights):
            key = f"data.mixture[{place}].path" if isinstance(paths, Mapping) else "data.path"
            source = open_source(path, key=key, documents=mask_documents)
            self._parts.append(self._part(source, seed + place))
        self._mixture = MixtureOrder(list(weights.values())) if len(weights) > 1 else None

    @property
    def num_windows(self) -> int:
        """Windows to train on, over all sources."""
        return sum(part.order.num_windows for part in self._parts)

    def places(self, step: int, indices: Sequence[int]) -> Places:
        """Where some samples of a step's global batch are.

        Args:
            step: Completed steps.
            indices: Places in the global batch, 0 .. global_batch_size - 1.
        """
        sources, numbers = self._sources(step, indices)
        windows = np.empty_like(numbers)
        for source, rows in self._rows(sources):
            windows[rows] = self._parts[source].order(numbers[rows])
        return Places(sources, windows * self.seq_len)

    def validation_places(self, number: int, indices: Sequence[int]) -> Places:
        """Where some samples of a batch of held-out windows are; no window is given twice.

        Batches have global_batch_size samples, in the shares of the mixture, and are the same
        whatever the seed of the run. Raises DataError beyond the held-out windows.
        """
        sources, numbers = self._sources(number, indices)
        windows = np.empty_like(numbers)
        for source, rows in self._rows(sources):
            part = self._parts[source]
            if part.held_out_order is None or numbers[rows].max() >= part.num_held_out:
                self.check_validation(number + 1)
                raise IndexError(f"index beyond the global batch: {max(indices)}")
            windows[rows] = part.held_out_order(numbers[rows]) + part.order.num_windows
        return Places(sources, windows * self.seq_len)

    def check_validation(self, batches: int) -> None:
        """Raises DataError unless that many batches of held-out windows are there."""
        total = batches * self.global_batch_size
        counts = [total] if self._mixture is None else self._mixture.counts(total)
        for part, count in zip(self._parts, counts, strict=True):
            if count > part.num_held_out:
                raise DataError(
                    f"{part.source.name}: train.eval_batches={batches} batches take {count} "
                    f"windows of it, but data.validation_fraction={self.validation_fraction} holds "
                    f"out {part.num_held_out}. To fix: lower the one, or raise the other."
                )

    def tokens(self, places: Places) -> Int64s:
        """The ids at some places, [len(places), seq_len + 1]."""
        ids: Int64s = np.empty((places.starts.size, self.seq_len + 1), dtype=np.int64)
        for source, rows in self._rows(places.sources):
            found = self._parts[source].source.read(places.starts[rows].tolist(), self.seq_len + 1)
            self._check_ids(self._parts[source].source, int(found.min()), int(found.max()))
            ids[rows] = found
        return ids

    def documents(self, places: Places) -> Int32s:
        """The document that each input token belongs to, [len(places), seq_len].

        Counted from 0 within each sample: where the number grows, a document begins.
        """
        begins = np.zeros((places.starts.size, self.seq_len), dtype=np.int32)
        rows = zip(begins, places.sources.tolist(), places.starts.tolist(), strict=True)
        for row, source, start in rows:
            boundaries = self._parts[source].source.boundaries
            if boundaries is None:
                raise ValueError("the dataset was opened without mask_documents")
            row[boundaries(start, start + self.seq_len) - start] = 1
        return np.cumsum(begins, axis=1, dtype=np.int32)

    def batch(self, step: int, indices: Sequence[int]) -> Int64s:
        """Some samples of a step's global batch: ids, [len(indices), seq_len + 1]."""
        return self.tokens(self.places(step, indices))

    def validation_batch(self, number: int, indices: Sequence[int]) -> Int64s:
        """Some samples of a held-out batch: ids, [len(indices), seq_len + 1]."""
        return self.tokens(self.validation_places(number, indices))

    def _part(self, source: TokenSource, seed: int) -> _Part:
        num_windows = (source.num_tokens - 1) // self.seq_len
        if num_windows < 1:
            raise DataError(
                f"{source.name}: {source.num_tokens} tokens are fewer than the "
                f"{self.seq_len + 1} of one sample. To fix: lower train.seq_len={self.seq_len}, or "
                "prepare more text."
            )
        if source.vocab_size is not None and source.vocab_size > self.vocab_size:
            raise DataError(
                f"{source.name}: its tokenizer ({source.tokenizer}) has {source.vocab_size} ids. "
                f"To fix: set model.vocab_size to at least that; it is {self.vocab_size}."
            )
        fraction = self.validation_fraction
        held_out = max(1, round(num_windows * fraction)) if fraction > 0 else 0
        if held_out >= num_windows:
            raise DataError(
                f"{source.name}: data.validation_fraction={fraction} holds out {held_out} of its "
                f"{num_windows} windows, which leaves none to train on. To fix: lower it, or "
                "prepare more text."
            )
        return _Part(
            source=source,
            order=sample_order(seed, num_windows - held_out),
            num_held_out=held_out,
            held_out_order=sample_order(VALIDATION_SEED, held_out) if held_out else None,
        )

    def _sources(self, batch: int, indices: Sequence[int]) -> tuple[Int64s, Int64s]:
        """The source of each sample of a global batch, and its number among that source's."""
        samples = batch * self.global_batch_size + np.asarray(indices, dtype=np.int64)
        if self._mixture is None:
            return np.zeros_like(samples), samples
        return self._mixture(samples)

    def _rows(self, sources: Int64s) -> list[tuple[int, slice | Int64s]]:
        """Each source that occurs, with the rows it occurs in."""
        if len(self._parts) == 1:
            return [(0, slice(None))]
        return [(s, np.flatnonzero(sources == s)) for s in np.unique(sources).tolist()]

    def _check_ids(self, source: TokenSource, smallest: int, largest: int) -> None:
        if smallest >= 0 and largest < self.vocab_size:
            return
        wrong = smallest if smallest < 0 else largest
        if source.vocab_size is None:
            raise DataError(
                f"{source.name}: holds the id {wrong}, but model.vocab_size={self.vocab_size}. To "
                "fix: set model.vocab_size to that of the tokenizer, or make the files again."
            )
        raise DataError(
            f"{source.name}: holds the id {wrong}, but its description promises ids below "
            f"{source.vocab_size}. To fix: prepare the folder again."
        )


def open_source(path: Path, *, key: str = "data.path", documents: bool = False) -> TokenSource:
    """The tokens that a path names: a folder of `slurm-pt data prepare`, or a Megatron-LM prefix.

    Raises DataError if it is neither.
    """
    if path.is_dir():
        return open_token_folder(path, key=key, documents=documents)
    if index_of(path).exists() or tokens_of(path).exists():
        return open_megatron_index(path, key=key, documents=documents)
    if path.suffix in {".bin", ".idx"} and index_of(path.with_suffix("")).exists():
        raise DataError(
            f"{key}={path}: a Megatron-LM dataset is named without the end of its files' names. "
            f"To fix: set {key}={path.with_suffix('')}."
        )
    raise DataError(
        f"{key}={path}: there is neither such a folder, nor a Megatron-LM dataset "
        f"{index_of(path).name} and {tokens_of(path).name}. To fix: correct the path, or make the "
        "folder with `slurm-pt data prepare`."
    )
