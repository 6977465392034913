"""Hydra's view of the schema: `schema` in each of our groups, and `run_schema` for a whole run."""

from __future__ import annotations

import dataclasses
import typing

from hydra.core.config_store import ConfigStore

from slurm_pt.config.schema import RunConfig, schema_of


def register_schemas() -> None:
    """Makes the typed schemas known to Hydra, so that it refuses misspelt keys and wrong types."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=schema_of(RunConfig), provider="slurm_pt")
    for group, hint in typing.get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(hint):
            node = schema_of(typing.cast("type", hint))
            store.store(group=group, name="schema", node=node, provider="slurm_pt")
