"""The login side starts without torch: a second, not ten, and on machines that have none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "slurm_pt"
TORCH = {"torch", "deepspeed", "transformers"}


def modules_below(*folders: str) -> list[str]:
    paths = [path for folder in folders for path in (PACKAGE / folder).glob("*.py")]
    names = [".".join(["slurm_pt", path.parent.name, path.stem]) for path in sorted(paths)]
    return [name.removesuffix(".__init__") for name in names]


LIGHT = {
    "the command line": ["slurm_pt.cli"],
    "the launcher": ["slurm_pt.launcher", "slurm_pt.compose", "slurm_pt.program"],
    "planning": modules_below("config", "plan"),
    "submission": modules_below("submit"),
    "the launch": modules_below("launch"),
    "monitoring": modules_below("monitor"),
    "the store of checkpoints": ["slurm_pt.checkpoint.store"],
    "the data": [
        f"slurm_pt.training.{name}"
        for name in ("corpus", "data", "megatron_index", "mixture", "prefetch", "token_folder")
    ],
    "the development cluster": modules_below("devcluster"),
    "the package": ["slurm_pt"],
}


def loaded_after(imports: list[str]) -> set[str]:
    """The top-level names in sys.modules of a fresh interpreter that has imported these."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {imports!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize("imports", LIGHT.values(), ids=LIGHT)
def test_the_login_side_does_not_load_torch(imports):
    assert not loaded_after(imports) & TORCH


def test_the_plugin_loads_nothing_that_hydra_has_not_loaded_already():
    # Hydra imports every plugin at each start of every program of the user's.
    heavy = {"submitit", "jinja2", "rich", "numpy", "click", *TORCH}
    assert not loaded_after(["hydra_plugins.slurm_pt_launcher"]) & heavy


def test_the_package_itself_loads_next_to_nothing():
    assert not loaded_after(["slurm_pt"]) & {"hydra", "omegaconf", "submitit", "rich", "click"}


def test_help_is_printed_without_the_parts_that_commands_need():
    code = (
        "import json, sys\n"
        "from slurm_pt.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(json.loads(ran.stdout.splitlines()[-1]))
    assert "Usage:" in ran.stdout
    assert not loaded & {"torch", "hydra", "submitit", "rich", "jinja2"}


A_RANK = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch.distributed as dist
folder = Path(sys.argv[1])
dist.init_process_group(
    "gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1
)
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.loop import train_loop
from tests.checkpoint.toy import checkpointer
from tests.training.cases import MODEL, TRAIN, engine_of, groups_of
from tests.training.language import write_tokens
groups = groups_of(ParallelLayout(1, 1, 1))
config = replace(TRAIN, steps=2)
engine = engine_of(write_tokens(folder), MODEL, config, groups)
tensors, shards, _ = engine.stored()
keeper = checkpointer(folder, groups)
train_loop(engine)
keeper.save(2, tensors, shards=shards, rank_state={}, common={}, wait=True)
assert keeper.resume(tensors, shards=shards).step == 2
print(json.dumps(sorted(sys.modules)))
"""


def test_a_rank_that_trains_saves_and_resumes_loads_nothing_that_takes_seconds(tmp_path):
    # Each of these takes every rank a second or two, at every start after a preemption.
    slow = {
        "sympy",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "torch.fx.experimental.symbolic_shapes",
    }
    ran = subprocess.run(
        [sys.executable, "-c", A_RANK, str(tmp_path)],
        cwd=PACKAGE.parent,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert not slow & set(json.loads(ran.stdout.splitlines()[-1]))
