"""Submission: takes a run folder and a plan, gives a Slurm job (or local processes).

`slurm` is the only caller of Slurm's commands; `script` renders the batch script; `executor` is
submitit's executor with our script; `sweep` turns a list of runs into as few jobs as possible.
Never imports torch.
"""
