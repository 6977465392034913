"""What one rank holds of the model: one chunk, or with virtual stages several, as if they were one.

Chunk c of pipeline rank r is stage c * pp + r of pp * virtual_stages. A parameter's name carries
its layer's index in the whole model, so the names of all chunks differ, and a checkpoint does not
know of stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_pt.config.schema import ModelConfig, ParallelConfig, Schedule, TrainConfig
from slurm_pt.parallel.weight_gradients import WeightGradients
from slurm_pt.plan.layout import split_layers
from slurm_pt.training.model import GPTStage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from slurm_pt.parallel.groups import ProcessGroups
    from slurm_pt.training.optimizer import NamedAdamW


class RankModel:
    """The chunks of one rank, and how its pipeline runs them.

    Raises ValueError for stages that the layers cannot fill, and for a tied embedding whose two
    ends are different chunks of one rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelConfig,
        train: TrainConfig,
        groups: ProcessGroups,
    ):
        pp, virtual_stages = groups.layout.pp, parallel.virtual_stages
        if pp == 1 and virtual_stages > 1 and config.tie_embeddings:
            raise ValueError("virtual stages on one rank would hold the tied embedding twice")
        self.config = config
        self.schedule = parallel.schedule
        zero_bubble = self.schedule is Schedule.zero_bubble
        self.weight_gradients = WeightGradients() if zero_bubble else None
        stages = pp * virtual_stages
        layers = split_layers(config.num_layers, stages, parallel.stage_layers)
        self.chunks = [
            GPTStage(
                config,
                layers=layers[stage],
                first=stage == 0,
                last=stage == stages - 1,
                groups=groups,
                dtype=train.dtype,
                seed=train.seed,
                weight_gradients=self.weight_gradients,
            )
            for stage in range(groups.place.pp_rank, stages, pp)
        ]
        self.dtype = self.chunks[0].dtype

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for chunk in self.chunks:
            yield from chunk.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def shard_dims(self) -> dict[str, int | None]:
        """The dimension along which each parameter is split over tp; None: whole on each rank."""
        return {name: dim for chunk in self.chunks for name, dim in chunk.shard_dims().items()}

    def checkpoint_names(self) -> dict[str, str]:
        """The name under which each parameter is stored: its own, but for tied copies."""
        return {
            name: stored
            for chunk in self.chunks
            for name, stored in chunk.checkpoint_names().items()
        }

    def tied_copies(self) -> frozenset[str]:
        """The parameters that are copies of one on another rank: load them, but do not save."""
        return frozenset().union(*(chunk.tied_copies() for chunk in self.chunks))

    def tied_parameter(self) -> nn.Parameter | None:
        """This rank's copy of a token embedding that two ranks hold; None if none does."""
        copies = [chunk.tied_parameter() for chunk in self.chunks]
        return next((copy for copy in copies if copy is not None), None)


def stored_tensors(
    model: RankModel, optimizer: NamedAdamW
) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """Everything to be saved by its stored name, and the dimension it is split along over tp.

    The names are the same in every layout and for every schedule.
    """
    stored, dims = model.checkpoint_names(), model.shard_dims()
    tensors: dict[str, Tensor] = {}
    shard_dims: dict[str, int | None] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{stored[name]}"] = parameter.detach()
        shard_dims[f"model/{stored[name]}"] = dims[name]
    for key, moment in optimizer.state_tensors().items():
        kind, _, name = key.partition("/")
        tensors[f"optimizer/{kind}/{stored[name]}"] = moment
        shard_dims[f"optimizer/{kind}/{stored[name]}"] = dims[name]
    return tensors, shard_dims
