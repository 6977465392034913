"""A Hydra program's two doors: composing its configuration, and ending its process.

`@slurm_pt.main()` is `@hydra.main` with messages that a user can act on and the exit codes of the
contract: 0 finished, 75 stopped and wants to run again, 2 the user's mistake, else a failure.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_pt.errors import SlurmPtError, nearest
from slurm_pt.session import current_run

OUR_CONFIGS = "pkg://slurm_pt.hydra_configs"


def main(
    config_path: str = OUR_CONFIGS, config_name: str = "config"
) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Decorates a program `f(cfg)`: Hydra's command line in front of it, a clean end behind it.

    A relative `config_path` is relative to the program's file. A config of your own begins with
    `defaults: [job, _self_]` and has the groups slurm, parallel, cluster, checkpoint and monitor.
    """

    def decorate(program: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(program)
        def entry(cfg: Any = None) -> Any:
            if cfg is not None:  # called by a rank with its composed config
                return program(cfg)
            return _run_hydra(program, _absolute(config_path, program), config_name)

        return entry

    return decorate


def _absolute(config_path: str, program: Callable[[Any], Any]) -> str:
    if "://" in config_path:
        return config_path
    return str((Path(inspect.getfile(program)).parent / config_path).resolve())


def _run_hydra(program: Callable[[Any], Any], config_path: str, config_name: str) -> None:
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from slurm_pt.launch.preemption import INTERRUPTED, shield

    @functools.wraps(program)
    def task(cfg: Any) -> Any:
        shield()  # here, not before: a launcher that only waits must still end on SIGTERM
        code = run_program(program, cfg, exits=False)
        if code != 0:
            _leave(code)
        return None

    # Hydra prints its own exceptions and ends with 1; with this it raises them.
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)(task)()
    except KeyboardInterrupt:
        _complain("interrupted", INTERRUPTED)
    except SlurmPtError as error:
        _complain(str(error), error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        if full_error == "1":
            raise
        _complain(explain_hydra(error), SlurmPtError.exit_code)
    _leave(0)


def run_program(program: Callable[[Any], Any], cfg: Any, *, exits: bool) -> int:
    """Runs a program on its config and settles what it started; the exit code of the contract.

    With `exits` the process ends here, hard: gloo's threads can abort an interpreter that shuts
    down in the ordinary way, and a finished run would count as failed.
    """
    from slurm_pt.launch.after_attempt import WANTS_REQUEUE
    from slurm_pt.launch.preemption import INTERRUPTED
    from slurm_pt.launch.rendezvous import MeetingStoppedError

    token = current_run.set(None)
    try:
        try:
            result = program(cfg)
            run = current_run.get()
            code = run.succeed(result) if run is not None else 0
        except MeetingStoppedError as error:
            print(f"slurm_pt: {error}", file=sys.stderr, flush=True)  # noqa: T201
            _record_early_end(error, WANTS_REQUEUE)
            code = WANTS_REQUEUE
        except SlurmPtError as error:
            print(f"slurm_pt: {error}", file=sys.stderr, flush=True)  # noqa: T201
            code = _failed(error)
        except SystemExit as error:
            code = _failed(ProgramLeftError(error.code))
        except KeyboardInterrupt as error:  # before the run was started: later Ctrl-C is a wish
            _failed(error)
            code = INTERRUPTED
        except Exception as error:
            traceback.print_exc()
            code = _failed(error)
    finally:
        current_run.reset(token)
    if exits:
        _leave(code)
    return code


class ProgramLeftError(Exception):
    """The program called sys.exit, where only a return means that it has finished."""

    def __init__(self, code: object):
        super().__init__(f"the program called sys.exit({'' if code is None else code})")
        self.exit_code = code if isinstance(code, int) and code else 1


def _failed(error: BaseException) -> int:
    run = current_run.get()
    if run is not None:
        return run.fail(error)
    code = getattr(error, "exit_code", 1)
    _record_early_end(error, code)
    return code


def _record_early_end(error: BaseException, code: int) -> None:
    """The exit record of a rank that failed before its run was started."""
    attempt_path = os.environ.get("SLURM_PT_ATTEMPT_DIR")
    if attempt_path is None:
        return
    import dataclasses
    import time

    from slurm_pt.files import write_json
    from slurm_pt.launch.after_attempt import ExitRecord
    from slurm_pt.launch.environment import read_rank
    from slurm_pt.run_dir import AttemptDir

    try:
        rank = read_rank(os.environ).rank
    except SlurmPtError:
        rank = int(os.environ.get("SLURM_PROCID", "0"))
    name = "" if isinstance(error, SlurmPtError) else f"{type(error).__name__}: "
    record = ExitRecord(rank, os.uname().nodename, code, f"{name}{error}"[:2000], time.time())
    path = AttemptDir(Path(attempt_path)).exit_record(rank)
    write_json(path, dataclasses.asdict(record))


def _complain(message: str, code: int) -> None:
    print(f"slurm_pt: {message}", file=sys.stderr)  # noqa: T201
    _leave(code)


def _leave(code: int) -> None:
    """Ends the process now, with what was printed on its way."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)


def explain_hydra(error: BaseException) -> str:
    """Hydra's and OmegaConf's message in one piece, with the nearest key for a misspelt one."""
    lines = [str(error).strip()]
    cause = error.__cause__
    while cause is not None:
        lines.append(str(cause).strip())
        cause = cause.__cause__
    text = "\n".join(
        dict.fromkeys(line for part in lines for line in part.splitlines() if line.strip())
    )
    match = re.search(r"full_key: (\S+)", text)
    if match is None or "Key" not in text:
        noise = ("full_key:", "reference_type=", "object_type=")
        kept = [line for line in text.splitlines() if not line.strip().startswith(noise)]
        return "\n".join(kept).split("\nConfig search path:")[0]
    key = match[1]
    hint = nearest_key(key)
    return f"{key}: there is no such key{hint}\nTo fix: correct the name, or remove the override."


def nearest_key(key: str) -> str:
    """'; did you mean train.lr?' for a misspelt key of our schema."""
    import dataclasses

    from slurm_pt.config.schema import RunConfig, schema_of

    schema = schema_of(RunConfig)
    names: list[str] = []
    for section in dataclasses.fields(schema):
        names.append(section.name)
        if isinstance(section.type, type) and dataclasses.is_dataclass(section.type):
            names += [f"{section.name}.{f.name}" for f in dataclasses.fields(section.type)]
    parent = key.rpartition(".")[0]
    siblings = [name for name in names if name.rpartition(".")[0] == parent]
    return nearest(key, siblings) or nearest(key, names)
