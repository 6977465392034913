"""Adapters as a user trains them, by hand: from a base, resumed, and on a base that changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slurm_pt.monitor.status import find_runs
from tests.end_to_end.on_slurm import SMALL, User

pytestmark = pytest.mark.ranks


def test_adapters_are_saved_alone_go_on_and_keep_to_their_base(tmp_path: Path) -> None:
    user = User(tmp_path, None)
    assert user.types(*user.train(*SMALL, "train.steps=1", f"run_root={tmp_path}/base")).code == 0
    (base,) = find_runs([tmp_path / "base"])
    start = base.checkpoints / "step_00000001"
    command = user.train(
        *(*SMALL, "train.steps=3", f"run_root={user.root}", f"train.init_from={start}"),
        *("lora.rank=4", "checkpoint.interval_s=0", "checkpoint.keep_last=3"),
    )
    assert user.types(*command).code == 0
    (run,) = find_runs([user.root])
    losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
    stored = json.loads((run.checkpoints / "step_00000003" / "tensors.json").read_text())["tensors"]
    assert {name.rpartition(".")[2] for name in stored} == {"lora_a", "lora_b"}

    # As if the job had been preempted after its second step.
    shutil.rmtree(run.checkpoints / "step_00000003")
    run.done.unlink()
    assert user.types(*command).code == 0
    (resumed,) = run.read_events("resumed")
    assert resumed["step"] == 2
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    assert (last["step"], last["loss"]) == (3, losses[2])

    manifest = start / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"world_size": 1', '"world_size":  1'))
    run.done.unlink()
    refused = user.types(*command)
    assert refused.code == 2
    assert "these adapters were trained on" in refused.text
    assert "Traceback" not in refused.text
