"""Which code a rank runs, as one word that ranks can compare."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest_code(program: Path | None) -> str:
    """Twelve hexadecimal digits of slurm_pt's own sources and of the user's program file.

    Versions alone do not tell two checkouts apart, nor a file edited while the job starts.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    if program is not None and program.is_file():
        digest.update(program.read_bytes())
    return digest.hexdigest()[:12]
