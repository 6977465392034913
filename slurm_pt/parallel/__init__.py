"""Runs one model split over many ranks: tensor x pipeline x data parallel.

Takes: a `plan.layout.ParallelLayout` and an initialised `torch.distributed`.
Gives: process groups, layers that hold a part of a matrix, the pipeline that carries out a
schedule, gradients summed over the copies, and any module split by a plan.
Never: reads files or the configuration, knows of Slurm, decides which split is best, or keeps
state between steps apart from the gradient buffers.

Groups of one rank cost nothing: every collective here returns at once for them.
Import the modules by name; this one imports no torch.
"""
