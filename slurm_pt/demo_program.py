"""The demonstration's program: the same lines as train.py, inside the package."""

from typing import Any

import slurm_pt


@slurm_pt.main()
def main(cfg: Any) -> Any:
    """One run."""
    return slurm_pt.train(cfg)


if __name__ == "__main__":
    main()
