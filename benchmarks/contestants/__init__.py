"""Who takes part, and what each must give. No torch here.

Each module of this folder has

    build(trial, weights) -> train(batches, done)

`build` is called on each rank, with `torch.distributed` initialised over gloo; it splits the
model of the trial and gives it `weights` (see `benchmarks.reference`). `train` runs one optimizer
step per batch (the global batch; it takes this rank's part of it) and calls `done(loss)` at the
end of each: the mean loss of this rank's part, or None on ranks that do not know it. Whoever has
a loop of its own, as our runtime, so runs it whole; all others use `stepwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.trial import Layout, Model

Done = Callable[[float | None], None]
Train = Callable[[Sequence[Any], Done], None]


def stepwise(step: Callable[[Any], float | None]) -> Train:
    """`train` of a contestant whose `step(batch)` makes one optimizer step and gives the loss."""

    def train(batches: Sequence[Any], done: Done) -> None:
        for batch in batches:
            done(step(batch))

    return train


@dataclass(frozen=True)
class Contestant:
    """Where a contestant is found, and what it can do."""

    name: str
    module: str
    can_run: Callable[[Layout], bool]
    packages: tuple[str, ...] = ()
    """What it needs beside our own dependencies, each with its version."""
    families: tuple[str, ...] = ("gpt2", "llama")

    def runs(self, layout: Layout, model: Model) -> bool:
        """Whether it can train this model in this layout."""
        return model.family in self.families and self.can_run(layout)


OURS = "ours"
ALONE = "torch"
FLOOR = "floor"

# Small pure-Python packages that DeepSpeed imports; named here because it is installed without
# its dependencies, one of which is torch.
DEEPSPEED = ("deepspeed==0.19.8", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "pydantic")

CONTESTANTS = (
    Contestant(OURS, "ours", lambda _: True),
    Contestant("ours-zero1", "ours_zero", lambda layout: layout.dp > 1),
    Contestant("ours-compiled", "ours_compiled", lambda _: True),
    Contestant(ALONE, "torch_alone", lambda layout: layout.world_size == 1),
    # As many ranks as the layout has, each alone with its share of the batch: what the machine
    # can do at best when the ranks never talk.
    Contestant(FLOOR, "torch_alone", lambda layout: layout.world_size > 1),
    Contestant("dtensor", "torch_dtensor", lambda layout: layout.tp == layout.world_size > 1),
    Contestant("torch-1f1b", "torch_pipeline", lambda layout: layout.pp > 1 and layout.dp == 1),
    # The same with stages of equal cost instead of equal numbers of layers.
    Contestant("torch-1f1b-cost", "torch_pipeline", lambda x: x.pp > 1 and x.dp == 1),
    Contestant("ddp", "torch_ddp", lambda layout: layout.dp == layout.world_size > 1),
    Contestant("deepspeed", "deepspeed_pipeline", lambda x: x.tp == 1 < x.world_size, DEEPSPEED),
    Contestant(
        "megatron", "megatron_core", lambda layout: layout.dp == 1, ("megatron-core==0.16.1",)
    ),
)


def contestant(name: str) -> Contestant:
    """The contestant of that name."""
    for candidate in CONTESTANTS:
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in CONTESTANTS)
    raise ValueError(f"contestant {name!r} is not known; known are {known}")
