"""What one rank holds of the model: one chunk, or with virtual stages several, as if they were one.

Chunk c of pipeline rank r is stage c * pp + r of pp * virtual_stages. A parameter's name carries
its layer's index in the whole model, so the names of all chunks differ, and a checkpoint does not
know of stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_pt.config.choices import Engine, Schedule
from slurm_pt.config.schema import LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from slurm_pt.parallel.axis import TensorAxis
from slurm_pt.parallel.model_part import Piece
from slurm_pt.parallel.weight_gradients import WeightGradients
from slurm_pt.parallel.zero import ShardedParameters
from slurm_pt.plan.layout import split_layers
from slurm_pt.training.compiled import compile_between_products
from slurm_pt.training.layers import NO_LORA
from slurm_pt.training.model import GPTStage, StageSpan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from slurm_pt.parallel.groups import ProcessGroups


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
        lora: LoraConfig = NO_LORA,
    ):
        pp, virtual_stages = groups.layout.pp, parallel.virtual_stages
        if pp == 1 and virtual_stages > 1 and config.tie_embeddings:
            raise ValueError("virtual stages on one rank would hold the tied embedding twice")
        self.config, self.parallel, self.groups = config, parallel, groups
        self.schedule = parallel.schedule
        zero_bubble = self.schedule is Schedule.zero_bubble
        self.weight_gradients = WeightGradients() if zero_bubble else None
        # DeepSpeed listens to autograd, and sets initial weights where it has split them.
        own = train.engine is Engine.native
        stages = pp * virtual_stages
        layers = split_layers(
            config.num_layers, stages, parallel.stage_layers, share=config.share_layers
        )
        recompute = train.recompute_stages or [train.recompute] * stages
        axis = TensorAxis.of(
            groups,
            sequence=parallel.sequence,
            weight_gradients=self.weight_gradients,
            adds_gradients=own,
        )
        self.chunks = [
            GPTStage(
                config,
                StageSpan(layers[stage], first=stage == 0, last=stage == stages - 1),
                axis=axis,
                device=groups.device,
                dtype=train.dtype,
                seed=train.seed,
                recompute=recompute[stage],
                lora=lora,
                initialise=own,
                offload_embedding=train.offload_embedding,
            )
            for stage in range(groups.place.pp_rank, stages, pp)
        ]
        if train.compile:
            for chunk in self.chunks:
                compile_between_products(chunk, groups.device)
        self.dtype = self.chunks[0].dtype
        self.sharding = (
            ShardedParameters(
                self.trained_parameters().values(), group=groups.dp, apart=self.tied_parameter()
            )
            if own and parallel.zero == 1
            else None
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for chunk in self.chunks:
            yield from chunk.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Those that are not frozen: with adapters the adapters, else all."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def owned(self, tensor: Tensor) -> Tensor:
        """What this replica updates of a parameter, of rows of one, or of their gradient.

        All of it; with ZeRO a part of it, flat, which may be empty.
        """
        return tensor if self.sharding is None else self.sharding.owned(tensor)

    def train(self, training: bool) -> None:
        """Switches dropout on, or off for an evaluation."""
        for chunk in self.chunks:
            chunk.train(training)

    def pieces(self) -> list[Piece]:
        """How all chunks are cut into what is stored."""
        return [piece for chunk in self.chunks for piece in chunk.pieces()]

    def trained_pieces(self) -> list[Piece]:
        """Those of what is not frozen."""
        trained = self.trained_parameters()
        return [piece for piece in self.pieces() if piece.parameter in trained]

    def partial_gradients(self) -> list[nn.Parameter]:
        """To be summed over the tensor group, once a step; see `GPTStage.partial_gradients`."""
        return [parameter for chunk in self.chunks for parameter in chunk.partial_gradients()]

    def shared_gradients(self) -> list[Tensor]:
        """To be summed over the ranks of a key/value head; see `GPTStage.shared_gradients`."""
        return [gradient for chunk in self.chunks for gradient in chunk.shared_gradients()]

    def message_shape(self, *, micro_batch_size: int, seq_len: int) -> tuple[int, int, int]:
        """What crosses stages for one micro-batch."""
        return self.chunks[0].message_shape(micro_batch_size=micro_batch_size, seq_len=seq_len)

    def tied_copies(self) -> frozenset[str]:
        """The parameters that are copies of one on another rank: load them, but do not save."""
        return frozenset().union(*(chunk.tied_copies() for chunk in self.chunks))

    def tied_parameter(self) -> nn.Parameter | None:
        """This rank's copy of a token embedding that two ranks hold; None if none does."""
        copies = [chunk.tied_parameter() for chunk in self.chunks]
        return next((copy for copy in copies if copy is not None), None)
