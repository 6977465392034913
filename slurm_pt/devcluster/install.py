"""Slurm and what it needs, from Debian's packages: which are missing, and installing them."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_pt.errors import DevClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Per package what shows that it is there: programs, or the plugin that no program brings.
_PROGRAMS = {
    "slurm-wlm": ("slurmctld", "slurmd", "sbatch", "srun", "scontrol"),
    "slurmdbd": ("slurmdbd",),
    "mariadb-server": ("mariadbd", "mariadb-install-db"),
    "munge": ("munged",),
}
_MYSQL_PLUGIN = "slurm-wlm-mysql-plugin"
_PLUGIN_PLACES = ("usr/lib/*/slurm*", "usr/lib/slurm*", "usr/lib64/slurm", "usr/local/lib/slurm")
_POLICY = Path("/usr/sbin/policy-rc.d")
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def find_program(name: str) -> str | None:
    """The path of a daemon's program; system folders are looked at even if PATH lacks them."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


def missing_packages() -> tuple[str, ...]:
    """The Debian packages that a cluster needs and this machine lacks; nothing is changed."""
    missing = [
        package
        for package, programs in _PROGRAMS.items()
        if not all(find_program(program) for program in programs)
    ]
    if not any(
        next(Path("/").glob(f"{place}/accounting_storage_mysql.so"), None)
        for place in _PLUGIN_PLACES
    ):
        missing.append(_MYSQL_PLUGIN)
    return tuple(missing)


def require_packages() -> None:
    """Raises unless everything that a cluster needs is installed."""
    if missing := missing_packages():
        raise DevClusterError(
            f"the development cluster needs {' '.join(missing)}, missing on this machine. "
            f"To fix: `slurm-pt devcluster install` as root on Debian or Ubuntu; elsewhere, "
            f"install Slurm with its MySQL plugin, MariaDB and munge."
        )


def install_packages() -> tuple[str, ...]:
    """The packages that were missing and now are there; no service of theirs is started."""
    missing = missing_packages()
    if not missing:
        return ()
    command = f"apt-get install --no-install-recommends {' '.join(missing)}"
    if find_program("apt-get") is None:
        raise DevClusterError(
            f"{' '.join(missing)} are missing and this machine has no apt-get: packages can be "
            f"installed for you on Debian and Ubuntu alone. To fix: install Slurm with its MySQL "
            f"plugin, MariaDB and munge in your system's way."
        )
    if os.geteuid() != 0:
        raise DevClusterError(
            f"{' '.join(missing)} are missing, and only root may install packages. "
            f"To fix: `sudo {command}`, or ask who may."
        )
    with _services_kept_from_starting():
        _apt_install(missing)
    if still_missing := missing_packages():
        raise DevClusterError(
            f"`{command}` went through, but {' '.join(still_missing)} are still not found. "
            f"To fix: look at what `dpkg -L {still_missing[0]}` installed."
        )
    return missing


def _apt_install(packages: tuple[str, ...]) -> None:
    install = ["install", "--yes", "--no-install-recommends", *packages]
    failed = _apt_get(install)
    if failed is not None:
        # The lists of a fresh container are empty, and old lists name versions that are gone.
        failed = _apt_get(["update"]) or _apt_get(install)
    if failed is not None:
        raise DevClusterError(
            f"`apt-get {' '.join(install)}` failed: {failed}. "
            f"To fix: what apt-get names, then `slurm-pt devcluster install` again."
        )


def _apt_get(arguments: list[str]) -> str | None:
    """None if apt-get succeeded, else its last lines of complaint."""
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=1200, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end within 20 minutes"
    if done.returncode == 0:
        return None
    return " / ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])


@contextmanager
def _services_kept_from_starting() -> Iterator[None]:
    """While open, packages may not start their services; an admin's own policy is left alone."""
    try:
        descriptor = os.open(_POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    except FileExistsError:
        yield
        return
    try:
        with os.fdopen(descriptor, "w") as policy:
            policy.write("#!/bin/sh\n# written by slurm-pt devcluster install, which removes it\n")
            policy.write("exit 101\n")
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
