"""A model of your own, split over tensor x pipeline x data parallel ranks by a plan.

python own_model.py                                              one process
torchrun --nproc-per-node 2 own_model.py parallel.tp=2           each layer split in two
torchrun --nproc-per-node 4 own_model.py parallel.tp=2 parallel.pp=2 parallel.sequence=true
python own_model.py -m hydra/launcher=slurm_pt parallel.tp=2 parallel.pp=2 parallel.dp=2
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import slurm_pt

VOCAB, WIDTH, HEADS, DEPTH, SEQ_LEN = 64, 32, 4, 4, 16


# A plain PyTorch decoder: nothing of slurm_pt in it.


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(SEQ_LEN, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, seq] -> [batch, seq, width]
        return self.tokens(ids) + self.places.weight[: ids.shape[1]]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # Not HEADS but -1: a rank of a tensor group sees its own heads alone.
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_a(x))
        return x + self.narrow(functional.silu(self.wide(self.norm_b(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = slurm_pt.SplitPlan(
    modules={
        "embed": "scatter",  # the positions are added to the whole sequence
        "embed.tokens": "vocabulary",
        "blocks.*.norm_?": "sequence",
        "blocks.*.attention.qkv": {"q": WIDTH, "k": WIDTH, "v": WIDTH},
        "blocks.*.attention.out": "row",
        "blocks.*.wide": "column",
        "blocks.*.narrow": "row",
        "norm": "sequence",
        "head": "column",
    },
    units=["embed", "blocks.*", "norm", "head"],
)


def micro_batches(cfg: Any, step: int, groups: Any) -> list[Tensor]:
    """This rank's tokens of a step, [micro_batch_size, SEQ_LEN + 1] each: x -> 5 x + 3 for ever."""
    generator = torch.Generator().manual_seed(cfg.seed * 1_000_003 + step)
    tokens = torch.randint(VOCAB, (cfg.global_batch_size, 1), generator=generator)
    while tokens.shape[1] <= SEQ_LEN:
        tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 3) % VOCAB], dim=1)
    mine = tokens.chunk(groups.layout.dp)[groups.place.dp_rank]
    return list(mine.to(groups.device).split(cfg.micro_batch_size))


@slurm_pt.main(config_path=".", config_name="own_model")
def main(cfg: Any) -> dict[str, Any]:
    run = slurm_pt.start(cfg)
    torch.manual_seed(cfg.seed)
    part = slurm_pt.split(
        Decoder(),
        PLAN,
        run.groups,
        inputs=lambda tokens: tokens[:, :-1],
        loss=lambda logits, tokens: slurm_pt.cross_entropy(logits, tokens[:, 1:], run.groups),
        message_shape=(cfg.micro_batch_size, SEQ_LEN, WIDTH),
        parallel=run.config.parallel,
    )
    optimizer = torch.optim.AdamW(part.parameters(), lr=cfg.lr)
    state = {"training": part.state(optimizer)}
    loss = None

    for step in range(run.resume(state), cfg.steps):
        loss = part.forward_backward(micro_batches(cfg, step, run.groups))
        norm = part.clip_gradients(1.0)
        optimizer.step()
        run.log(step + 1, steps=cfg.steps, loss=loss, grad_norm=norm)
        if run.should_stop():  # preempted, or out of time: save, leave, and be started again
            run.save(step + 1, state)
            return {}
        if run.save_due():
            run.save(step + 1, state)
    return {"loss": loss}


if __name__ == "__main__":
    main()
