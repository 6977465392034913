"""Planning: takes a checked configuration, gives the split and the shape of the job.

Pure: integers and formulas; no disk, no clock, no environment, no torch.
"""

from slurm_pt.plan.layout import ParallelLayout, Place, split_layers
from slurm_pt.plan.make_plan import Plan, make_plan

__all__ = ["ParallelLayout", "Place", "Plan", "make_plan", "split_layers"]
