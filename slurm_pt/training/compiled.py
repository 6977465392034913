"""`train.compile`: one kernel for each norm, non-linearity and rotation, made by torch.compile.

What lies between them stays as it is: matrix products are library calls, and messages between ranks
are what a compiler would have to break its graph at.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn

from slurm_pt.errors import ConfigError, Problem
from slurm_pt.training.layers import Activate, LayerNorm, RMSNorm
from slurm_pt.training.rotary import Turn

COMPILED = (LayerNorm, RMSNorm, Activate, Turn)
COMPILERS = ("g++", "clang++")
"""That torch looks for on a CPU, unless CXX names one."""


def compile_between_products(model: nn.Module, device: torch.device) -> None:
    """Have what lies between the products compiled when it is first used.

    Raises ConfigError where a CPU's node has no compiler.
    """
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else COMPILERS
    if device.type == "cpu" and not any(shutil.which(name) for name in wanted):
        rule = f"torch.compile needs a C++ compiler, and {os.uname().nodename} has none of {wanted}"
        fix = "install one, load its module in slurm.setup, or set train.compile=false"
        raise ConfigError([Problem("train.compile", True, rule, fix)])
    import torch._inductor.config as inductor  # with torch._dynamo: 2 s, for who asks for it

    # In this process: a pool of its own would be more processes for Slurm to signal and to end.
    inductor.compile_threads = 1
    for module in model.modules():
        if isinstance(module, COMPILED):
            module.compile()
