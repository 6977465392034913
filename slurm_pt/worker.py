"""One rank of a submitted run: its program, started with its configuration.

`python -m slurm_pt.worker RUN` is what srun and the local launcher start.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_pt.errors import LaunchError
from slurm_pt.files import read_json
from slurm_pt.launch.preemption import shield
from slurm_pt.program import run_program
from slurm_pt.run_dir import open_run
from slurm_pt.run_inputs import read_run_config


def main() -> None:
    """One rank of a submitted run. Exits with the code of the contract, at once."""
    shield()
    # What torch compiles at run time is locked by a file that a killed process leaves behind, and
    # in the home folder every later job waits for it: an attempt has a folder of its own.
    own = Path(os.environ["SLURM_PT_ATTEMPT_DIR"]) / "torch_extensions"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own))

    def program(path: str) -> Any:
        run = open_run(path)
        return load_entry(read_json(run.spec)["entry"])(read_run_config(run))

    run_program(program, sys.argv[1], exits=True)


def load_entry(entry: dict[str, str] | None) -> Callable[[Any], Any]:
    """The program of a run: a function of a module, or of a file that is imported as one.

    Never run as `__main__`: what it spawns must be able to import it again.
    """
    if entry is None:
        raise LaunchError(
            "this run was started by hand, so it is not known which program it belongs to. Give "
            "the same command again, with hydra/launcher=slurm_pt to submit it"
        )
    if "module" in entry:
        module = importlib.import_module(entry["module"])
    else:
        path = Path(entry["file"])
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.exists():
            raise LaunchError(
                f"{path}: the program of this run is gone. Put it back, or submit again"
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    program: Callable[[Any], Any] = getattr(module, entry["function"])
    return program


if __name__ == "__main__":
    # The canonical module, not this copy of it: programs import slurm_pt.worker again.
    from slurm_pt import worker

    worker.main()
