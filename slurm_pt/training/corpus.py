"""Turns text files into a token folder (see `token_folder`), in one pass and in little memory.

The folder appears at once and complete: it is written under another name, fsynced and renamed.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import os
import shutil
import socket
import sysconfig
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from slurm_pt.errors import DataError
from slurm_pt.training.token_folder import (
    DOCUMENTS,
    DTYPES,
    INFO,
    TOKENS,
    TokenInfo,
    read_token_info,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

PIECE_BYTES = 8 * 2**20
"""How much of a file is in memory at once."""
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens that separate documents, by the names that tokenizer files give them."""
NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})


@dataclass(frozen=True)
class CorpusSummary:
    """What was prepared."""

    folder: Path
    num_tokens: int
    documents: int
    skipped: int
    """Files that are not UTF-8 text."""
    vocab_size: int
    tokenizer: str
    created: bool
    """False: the folder was there already, with the same tokens."""


def prepare(paths: Iterable[Path], out: Path, tokenizer: Path | None = None) -> CorpusSummary:
    """A token folder at `out` with the text of files, and of all files below folders.

    Folders are walked in sorted order, without hidden names and links to folders. Each
    non-empty file is one document, ended by a 0 byte, or by the end-of-text token of
    `tokenizer`, a Hugging Face `tokenizers` JSON file (None: one token a byte).
    """
    files = [file for path in paths for file in _walk(path, skip=out)]
    encoder = _ByteEncoder() if tokenizer is None else _FileEncoder(tokenizer)
    return _prepare(files, out, encoder, accept_other=False)


def prepare_stdlib(out: Path) -> CorpusSummary:
    """A token folder at `out` with the source of this Python's standard library, as bytes.

    Without tests and installed packages. A folder that is there already is left as it is; one of
    the first versions gets the borders of its documents.
    """
    if (out / INFO).exists() and (out / DOCUMENTS).exists():
        return _summary(out, read_token_info(out), skipped=0, created=False)
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _walk(root, skip=out)
        if file.suffix == ".py" and not NOT_SOURCE & set(file.relative_to(root).parts)
    ]
    if not files:
        raise DataError(f"{root} holds no source. To fix: set data.path to a token folder.")
    return _prepare(files, out, _ByteEncoder(), accept_other=True)


class _ByteEncoder:
    """One token a byte."""

    name = "bytes"
    vocab_size = 256
    end = 0

    def encode(self, text: str) -> NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class _FileEncoder:
    """A Hugging Face tokenizer."""

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DataError(
                f"{path} needs the package `tokenizers`. To fix: pip install slurm-pt[tokenizers]."
            ) from None
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"{path} is not a tokenizer JSON file: {error}.") from None
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        ends = [ids[name] for name in END_OF_TEXT if name in ids]
        if not ends:
            names = ", ".join(END_OF_TEXT)
            raise DataError(f"{path} has no token that ends a document: none of {names}.")
        self.name = path.name
        self.end = ends[0]
        self.vocab_size = max(ids.values()) + 1

    def encode(self, text: str) -> NDArray[Any]:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def _walk(path: Path, *, skip: Path) -> Iterator[Path]:
    """The files at or below a path, in sorted order."""
    if not path.exists():
        raise DataError(f"{path} does not exist. To fix: name files or folders of text.")
    if not path.is_dir():
        yield path
        return
    for entry in sorted(path.iterdir(), key=lambda found: found.name):
        linked_folder = entry.is_symlink() and entry.is_dir()
        if entry.name.startswith(".") or linked_folder or entry.absolute() == skip.absolute():
            continue
        if entry.is_dir():
            yield from _walk(entry, skip=skip)
        elif entry.is_file():
            yield entry


def _prepare(
    files: list[Path], out: Path, encoder: _ByteEncoder | _FileEncoder, *, accept_other: bool
) -> CorpusSummary:
    out.parent.mkdir(parents=True, exist_ok=True)
    # One name for each preparer, on any node: two may be at work on the same folder.
    unique = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    work = out.parent / f".{out.name}.{unique}.tmp"
    work.mkdir()
    try:
        info, skipped = _write(files, work, encoder)
        created = _publish(work, out, info, accept_other=accept_other)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _summary(out, read_token_info(out), skipped=skipped, created=created)


def _write(
    files: list[Path], work: Path, encoder: _ByteEncoder | _FileEncoder
) -> tuple[TokenInfo, int]:
    """Writes the files into `work`; their description, and how many files were skipped."""
    bounds = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32}
    dtype = next(name for name, bound in bounds.items() if encoder.vocab_size <= bound)
    skipped = 0
    borders = [0]
    size = np.dtype(DTYPES[dtype]).itemsize
    with (work / TOKENS).open("wb") as file:
        sink = _Sink(file, DTYPES[dtype])
        for source in files:
            mark = sink.mark()
            try:
                if _write_document(source, encoder, sink):
                    borders.append(file.tell() // size)
            except UnicodeError:  # may come late in a large file
                sink.return_to(mark)
                skipped += 1
        _sync(file)
    if borders[-1] == 0:
        raise DataError(
            f"no text found: of {len(files)} files, {skipped} are not UTF-8 text and the others "
            "are empty. To fix: name files or folders of text."
        )
    info = TokenInfo(
        dtype=dtype,
        num_tokens=borders[-1],
        vocab_size=encoder.vocab_size,
        tokenizer=encoder.name,
        documents=len(borders) - 1,
        sha256=sink.digest.hexdigest(),
    )
    _write_file(work / DOCUMENTS, np.array(borders, dtype="<i8").tobytes())
    _write_file(work / INFO, json.dumps(dataclasses.asdict(info), indent=2).encode() + b"\n")
    _sync_folder(work)
    return info, skipped


class _Sink:
    """A file of ids and its checksum, which can both go back to where they were."""

    def __init__(self, file: BinaryIO, dtype: str):
        self.file = file
        self.dtype = dtype
        self.digest = hashlib.sha256()

    def write(self, ids: NDArray[Any]) -> None:
        data = ids.astype(self.dtype).tobytes()
        self.digest.update(data)
        self.file.write(data)

    def mark(self) -> tuple[int, Any]:
        return self.file.tell(), self.digest.copy()

    def return_to(self, mark: tuple[int, Any]) -> None:
        position, self.digest = mark
        self.file.seek(position)
        self.file.truncate()


def _write_document(path: Path, encoder: _ByteEncoder | _FileEncoder, sink: _Sink) -> bool:
    """Writes a file's ids, piece by piece, then the separator; False if it is empty.

    Raises UnicodeError where the file turns out not to be text.
    """
    found = False
    for text in _pieces(path):
        found = True
        sink.write(encoder.encode(text))
    if found:
        sink.write(np.array([encoder.end]))
    return found


def _pieces(file: Path) -> Iterator[str]:
    """A file's text in large pieces that end with a line where they can."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    with file.open("rb") as source:
        while data := source.read(PIECE_BYTES):
            if b"\0" in data:  # valid UTF-8, but not text, and our separator
                raise UnicodeError(f"{file} holds a 0 byte")
            text = rest + decoder.decode(data)
            cut = text.rfind("\n") + 1 or len(text)
            rest = text[cut:]
            if cut:
                yield text[:cut]
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def _publish(work: Path, out: Path, info: TokenInfo, *, accept_other: bool) -> bool:
    """Rename `work` to `out`; False if another preparer's equal folder is there already."""
    try:
        work.rename(out)
    except OSError as error:
        if not out.exists():
            raise DataError(f"{out} cannot be written: {error}.") from error
        there = read_token_info(out)
        if there.sha256 != info.sha256 and not accept_other:
            raise DataError(
                f"{out} already holds other tokens ({there.num_tokens}, tokenizer "
                f"{there.tokenizer}). To fix: choose another folder, or delete that one."
            ) from None
        if there.sha256 == info.sha256 and not (out / DOCUMENTS).exists():
            # Made by the first versions. The rename is atomic, and all write the same.
            (work / DOCUMENTS).rename(out / DOCUMENTS)
            _sync_folder(out)
        return False
    _sync_folder(out.parent)
    return True


def _summary(folder: Path, info: TokenInfo, *, skipped: int, created: bool) -> CorpusSummary:
    return CorpusSummary(
        folder=folder,
        num_tokens=info.num_tokens,
        documents=info.documents,
        skipped=skipped,
        vocab_size=info.vocab_size,
        tokenizer=info.tokenizer,
        created=created,
    )


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
