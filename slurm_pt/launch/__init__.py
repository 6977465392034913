"""Inside the allocation: from a process that Slurm started to a rank that knows its world.

Takes: the environment of the process, the run folder, the layout that the user asked for.
Gives: `environment.RankInfo` (who am I), `rendezvous.Meeting` (all ranks, compared and in
    touch), the reason and the way in which an attempt ends.
Never: imports torch, falls back to localhost across machines, or starts a partial world.

The modules are imported by name; nothing is loaded here, since every rank pays for it.
"""
