"""An environment for packages that are not ours, beside the one that runs the benchmark."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import venv
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class MissingPeerError(Exception):
    """A package could not be installed."""


def interpreter_with(packages: Sequence[str], cache: Path) -> str:
    """The interpreter of an environment under `cache` with these packages, made if need be.

    It sees torch, numpy and all else through the environment that runs the benchmark, so all
    contestants run the same torch; and packages are installed without their dependencies, so no
    other build of torch, and no CUDA library, can come with them. Name what else they need.
    """
    if not packages:
        return sys.executable
    name = hashlib.sha256("\n".join([sys.executable, *packages]).encode()).hexdigest()[:12]
    folder = cache / f"env-{name}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.exists():
        return str(python)
    venv.create(folder, with_pip=True, clear=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = folder / "lib" / version / "site-packages" / "shared.pth"
    shared.write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    installed = subprocess.run(
        # Built in the environment itself: an isolated build would fetch setuptools for each.
        [*pip, "install", "--no-deps", "--no-build-isolation", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode != 0:
        raise MissingPeerError(installed.stderr.strip().splitlines()[-1])
    ready.touch()
    return str(python)
