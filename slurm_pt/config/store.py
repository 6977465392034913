"""Hydra's view of the schema: registered under `run_schema` and `job_schema`."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from slurm_pt.config.schema import JobConfig, RunConfig, schema_of


def register_schemas() -> None:
    """Makes the typed schemas known to Hydra, so that it refuses misspelt keys and wrong types."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=schema_of(RunConfig), provider="slurm_pt")
    store.store(name="job_schema", node=schema_of(JobConfig), provider="slurm_pt")
