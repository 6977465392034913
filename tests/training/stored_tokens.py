"""Writers of token files for tests: our folders, and Megatron-LM's indexed datasets."""

import json
import struct

import numpy as np

from slurm_pt.training.token_folder import DOCUMENTS, INFO, TOKENS

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_tokens(folder, ids, *, dtype="uint16", borders=None, **changes):
    """A token folder; `borders`: where its documents begin and the last one ends."""
    folder.mkdir(exist_ok=True)
    np.asarray(ids, dtype=dtype).tofile(folder / TOKENS)
    if borders is not None:
        np.asarray(borders, dtype="<i8").tofile(folder / DOCUMENTS)
    info = {
        "dtype": dtype,
        "num_tokens": len(ids),
        "vocab_size": 1000,
        "tokenizer": "bytes",
        "documents": 1 if borders is None else len(borders) - 1,
        "sha256": "",
        **changes,
    }
    (folder / INFO).write_text(json.dumps(info))
    return folder


def write_megatron(
    prefix, sequences, *, documents=None, dtype="uint16", code=None, magic=b"MMIDIDX\0\0", version=1
):
    """An indexed dataset; `documents`: the first sequence of each, and the end."""
    sizes = [len(sequence) for sequence in sequences]
    width = np.dtype(dtype).itemsize
    pointers = [width * sum(sizes[:place]) for place in range(len(sizes))]
    documents = range(len(sizes) + 1) if documents is None else documents
    ids = [token for sequence in sequences for token in sequence]
    np.array(ids, dtype=dtype).tofile(f"{prefix}.bin")
    header = magic + struct.pack("<QBQQ", version, code or CODES[dtype], len(sizes), len(documents))
    lists = [np.array(sizes, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8")]
    prefix.with_name(f"{prefix.name}.idx").write_bytes(
        header + b"".join(numbers.tobytes() for numbers in lists)
    )
    return prefix
