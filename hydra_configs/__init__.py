"""Our Hydra configs; a package so that `pkg://slurm_pt.hydra_configs` finds them."""
