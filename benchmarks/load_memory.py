"""How much memory loading takes beside what is loaded: `python -m benchmarks.load_memory`.

1. A checkpoint saved at tp2 pp2 dp2 is loaded in other layouts; then a run is started from its
   weights (`train.init_from`), and a loop of one's own resumes. Of every rank: the high-water mark
   of its resident memory during the load, over what was there before the model was built, divided
   by its shard: what it holds of the model and of the optimizer's moments. With DeepSpeed's ZeRO 3
   the engine's gradients and buckets are there before the load, and are left out.
2. The same weights are converted to a Hugging Face folder and back, at two sizes of the model. Of
   the process: its high-water mark over that of one that converts next to nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.comparison import render_table
from slurm_pt.checkpoint.checkpointer import Checkpointer
from slurm_pt.checkpoint.user_state import flatten, load_user_state
from slurm_pt.config.choices import Engine, Schedule
from slurm_pt.config.schema import CheckpointConfig, ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.parallel.groups import ProcessGroups, create_groups
from slurm_pt.parallel.stored import stored_tensors
from slurm_pt.plan.layout import ParallelLayout
from slurm_pt.training.hugging_face import to_their_config
from slurm_pt.training.optimizer import NamedAdamW
from slurm_pt.training.rank_model import RankModel
from tests.ranks import REPOSITORY, run_ranks

if TYPE_CHECKING:
    from slurm_pt.parallel.shard import Shard

MIB = 2**20
TRAIN = TrainConfig(steps=1, global_batch_size=8, micro_batch_size=1, seq_len=64, lr=1e-3)
NEXT_TO_NOTHING = ModelConfig(1, 32, 4, vocab_size=64, max_seq_len=64)
SAVED_AT = "tp2 pp2 dp2"
LAYOUTS = {
    SAVED_AT: ((2, 2, 2), ParallelConfig()),
    "tp1": ((1, 1, 1), ParallelConfig()),
    "tp4": ((4, 1, 1), ParallelConfig()),
    "pp4": ((1, 4, 1), ParallelConfig()),
    "dp8": ((1, 1, 8), ParallelConfig()),
    "pp2 interleaved": (
        (1, 2, 1),
        ParallelConfig(schedule=Schedule.interleaved, virtual_stages=2),
    ),
}


@dataclass(frozen=True)
class Load:
    """What one rank saw."""

    held_bytes: int
    """Of the model's tensors and of the optimizer's moments, whether loaded or not."""
    peak_bytes: int
    """Resident memory at its highest during the load, over what was there before building."""

    @property
    def ratio(self) -> float:
        return self.peak_bytes / self.held_bytes


def main() -> int:
    """Prints the tables; 1 if a rank took twice its shard or more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    model = replace(NEXT_TO_NOTHING, num_layers=arguments.layers, hidden_size=arguments.hidden)
    model = replace(model, num_heads=8, vocab_size=16 * arguments.hidden, tie_embeddings=False)
    with tempfile.TemporaryDirectory(prefix="load-memory-") as name:
        folder = Path(name)
        worst = measure_loads(folder, model)
        measure_conversions(folder, model)
    return 0 if worst < 2.0 else 1


# loading ------------------------------------------------------------------------------------------


def measure_loads(folder: Path, model: ModelConfig) -> float:
    """The largest ratio of any rank."""
    run_ranks(8, f"{__name__}:save", folder / "run", model)
    run_ranks(2, f"{__name__}:save_own_loop", folder / "own", model)
    found: dict[str, list[Load]] = {}
    for name, ((tp, pp, dp), _) in LAYOUTS.items():
        what = f"{__name__}:load"
        found[name] = run_ranks(tp * pp * dp, what, folder / "run", model, name)
    start = f"{__name__}:load_weights"
    found["tp2, train.init_from"] = run_ranks(2, start, folder / "run", model)
    own = f"{__name__}:load_own_loop"
    found["own loop, dp2"] = run_ranks(2, own, folder / "own", model)
    deepspeed = f"{__name__}:load_zero_3"
    found["dp4, ZeRO 3"] = run_ranks(4, deepspeed, folder / "run", model, imports=["deepspeed"])
    rows = []
    for name, loads in found.items():
        worst = max(loads, key=lambda load: load.ratio)
        over = (worst.peak_bytes - worst.held_bytes) / MIB
        held = f"{worst.held_bytes / MIB:.0f}"
        rows.append([name, held, f"{over:+.0f}", f"{worst.ratio:.2f}"])
    print(render_table(["loaded at", "shard MiB", "beside it MiB", "peak / shard"], rows))
    return max(load.ratio for loads in found.values() for load in loads)


def save(folder: Path, model: ModelConfig) -> None:
    """The model as it is initialised, with moments that are not zero."""
    groups, tensors, shards = _build(model, SAVED_AT)
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            tensor.fill_(0.5)
    checkpointer = _checkpointer(folder, groups)
    checkpointer.save(1, tensors, shards=shards, rank_state={}, common={}, wait=True)


def load(folder: Path, model: ModelConfig, name: str) -> Load:
    """A resume of all that was saved."""
    before = _resident_bytes()
    groups, tensors, shards = _build(model, name)
    checkpointer = _checkpointer(folder, groups)
    peak = _peak_bytes(lambda: checkpointer.resume(tensors, shards=shards))
    assert all(float(t.flatten()[0]) == 0.5 for n, t in tensors.items() if n.startswith("opt"))
    return Load(_bytes_of(tensors), peak - before)


def load_weights(folder: Path, model: ModelConfig) -> Load:
    """The weights alone, as for a new run."""
    before = _resident_bytes()
    groups, tensors, shards = _build(model, "tp2", ((2, 1, 1), ParallelConfig()))
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
    path = next(folder.glob("step_*"))
    checkpointer = _checkpointer(folder, groups)
    peak = _peak_bytes(lambda: checkpointer.load_weights(path, weights, shards=shards))
    return Load(_bytes_of(tensors), peak - before)


def load_zero_3(folder: Path, model: ModelConfig) -> Load:
    """What each of four ranks has with DeepSpeed's weights, gradients and moments all split."""
    from slurm_pt.training.engine_deepspeed import DeepSpeedEngine

    groups = _groups((1, 1, 4))
    dataset: Any = None  # nothing is trained
    engine = DeepSpeedEngine(
        model,
        parallel=ParallelConfig(dp=4, zero=3),
        train=replace(TRAIN, engine=Engine.deepspeed),
        dataset=dataset,
        groups=groups,
        phase=lambda _: None,
    )
    tensors, shards, _ = engine.stored()
    held = _bytes_of(tensors)
    checkpointer = _checkpointer(folder, groups)
    before = _resident_bytes()
    peak = _peak_bytes(lambda: checkpointer.resume(tensors, shards=shards))
    return Load(held, held + peak - before)


def save_own_loop(folder: Path, model: ModelConfig) -> None:
    """What `Run.save` does for a model that every rank holds whole."""
    state = _own_loop(model)
    for parameter in state["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    state["optimizer"].step()
    tensors, _, tree = flatten(state)
    checkpointer = _checkpointer(folder, _groups((1, 1, 2)))
    checkpointer.save(1, tensors, shards={}, rank_state={}, common={"tree": tree}, wait=True)


def load_own_loop(folder: Path, model: ModelConfig) -> Load:
    """What `Run.resume` does."""
    before = _resident_bytes()
    state = _own_loop(model)
    checkpointer = _checkpointer(folder, _groups((1, 1, 2)))
    peak = _peak_bytes(lambda: load_user_state(checkpointer, state))
    return Load(_bytes_of(flatten(state)[0]), peak - before)


def _own_loop(model: ModelConfig) -> dict[str, Any]:
    wide = model.hidden_size
    layers = [nn.Linear(wide, 4 * wide) for _ in range(3 * model.num_layers)]
    module = nn.ModuleList(layers)
    return {"model": module, "optimizer": torch.optim.AdamW(module.parameters())}


def _build(
    model: ModelConfig, name: str, layout: tuple[tuple[int, int, int], ParallelConfig] | None = None
) -> tuple[ProcessGroups, dict[str, Tensor], dict[str, Shard]]:
    degrees, parallel = layout or LAYOUTS[name]
    groups = _groups(degrees)
    built = RankModel(model, parallel=parallel, train=TRAIN, groups=groups)
    optimizer = NamedAdamW(dict(built.named_parameters()), TRAIN)
    tensors, shards = stored_tensors(built, optimizer.state(), sharding=built.sharding)
    return groups, tensors, shards


def _groups(degrees: tuple[int, int, int]) -> ProcessGroups:
    layout, rank = ParallelLayout(*degrees), dist.get_rank()
    return create_groups(layout, rank=rank, device=torch.device("cpu"), timeout_s=300.0)


def _checkpointer(folder: Path, groups: ProcessGroups) -> Checkpointer:
    config = CheckpointConfig()
    return Checkpointer(
        folder,
        groups=groups,
        config=config,
        may_commit=lambda: None,
        report=lambda _event, _figures: None,
    )


def _bytes_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _resident_bytes() -> int:
    gc.collect()
    return _status("VmRSS")


def _peak_bytes(action: Callable[[], object]) -> int:
    """Resident memory at its highest while the action runs."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew: proc(5)
    action()
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


# converting ---------------------------------------------------------------------------------------


def measure_conversions(folder: Path, model: ModelConfig) -> None:
    """From our checkpoints to Hugging Face's form and back, each in a process of its own."""
    half = replace(model, num_layers=max(1, model.num_layers // 2))
    rows = []
    base: dict[str, int] = {}
    for number, size in enumerate((NEXT_TO_NOTHING, half, model)):
        place = folder / f"convert-{number}"
        run_ranks(1, f"{__name__}:save_weights", place / "ours", size)
        (step,) = (place / "ours").glob("step_*")
        weights = sum(file.stat().st_size for file in step.glob("*.safetensors"))
        for way in ("to_hf", "from_hf"):
            peak = _peak_of_process(way, place, size)
            base.setdefault(way, peak)
            more = f"{(peak - base[way]) / MIB:+.0f}"
            rows.append([way, f"{weights / MIB:.0f}", f"{peak / MIB:.0f}", more])
    print(render_table(["convert", "weights MiB", "peak MiB", "more than for nothing"], rows))


def save_weights(folder: Path, model: ModelConfig) -> None:
    """The weights of one process."""
    groups, tensors, shards = _build(model, "tp1")
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
    saver = _checkpointer(folder, groups)
    saver.save(0, weights, shards=shards, rank_state={}, common={}, wait=True)


def convert(way: str, place: Path) -> None:
    """One conversion, and the high-water mark of this process."""
    from slurm_pt.checkpoint.hugging_face import convert_from, convert_to
    from slurm_pt.checkpoint.whole_model import open_model

    if way == "to_hf":
        theirs = json.loads((place / "config.json").read_text())
        (step,) = (place / "ours").glob("step_*")
        convert_to(open_model(step), place / "theirs", their_config=theirs, dtype=None)
    else:
        convert_from(place / "theirs", place / "back")
    print(_status("VmHWM"))


def _peak_of_process(way: str, place: Path, model: ModelConfig) -> int:
    (place / "config.json").write_text(json.dumps(to_their_config(model)))
    code = "import sys, pathlib; from benchmarks.load_memory import convert; "
    code += "convert(sys.argv[1], pathlib.Path(sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", code, way, str(place)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


if __name__ == "__main__":
    from benchmarks.load_memory import main as run  # what ranks import, not this copy of it

    sys.exit(run())
