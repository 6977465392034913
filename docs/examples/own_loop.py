"""A training loop of your own that survives preemption: an ordinary module under DDP.

python own_loop.py                              one process
torchrun --nproc-per-node 2 own_loop.py         two
python own_loop.py -m hydra/launcher=slurm_pt lr=0.1,0.01 slurm.nodes=2 parallel.dp=4
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_pt


@slurm_pt.main(config_path=".", config_name="own_loop")
def main(cfg: Any) -> dict[str, Any]:
    run = slurm_pt.start(cfg)
    torch.manual_seed(cfg.seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    model = DistributedDataParallel(model.to(run.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    loss = torch.zeros(())

    for step in range(run.resume(state), cfg.steps):
        generator = torch.Generator().manual_seed(step * run.world_size + run.rank)
        x = torch.randn(32, 8, generator=generator).to(run.device)
        loss = nn.functional.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(step + 1, steps=cfg.steps, loss=loss.item())
        if run.should_stop():  # preempted, or out of time: save, leave, and be started again
            run.save(step + 1, state)
            return {}
        if run.save_due():
            run.save(step + 1, state)
    return {"loss": loss.item()}


if __name__ == "__main__":
    main()
