"""The state of a loop of the user's own: nested state dicts as named tensors and plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurm_pt.checkpoint.state import OWN
from slurm_pt.checkpoint.tensor_index import read_index
from slurm_pt.errors import CheckpointError
from slurm_pt.parallel.model_state import ModelState
from slurm_pt.parallel.shard import Shard

if TYPE_CHECKING:
    from slurm_pt.checkpoint.checkpointer import Checkpointer
    from slurm_pt.checkpoint.resuming import Resumed

_SETTINGS = "settings"
"""Part of the stored names of an optimizer's settings that are tensors."""
_PLAIN = (bool, int, float, str, type(None))


def flatten(
    state: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Shard], dict[str, Any]]:
    """The tensors of a state by name, their shards, and the rest as JSON.

    The JSON says where each tensor belongs. A `ModelState` gives this rank's parts; anything else
    is whole. Raises CheckpointError for values that could only be stored as code (arbitrary
    objects).
    """
    tensors: dict[str, Tensor] = {}
    shards: dict[str, Shard] = {}
    tree: dict[str, Any] = {}
    for key, value in state.items():
        if f"{key}/".startswith(OWN):
            raise CheckpointError(f"state[{key!r}]: this name is taken; give it another one")
        if isinstance(value, ModelState):
            parts, part_shards = value.tensors()
            tensors |= {f"{key}/{name}": tensor.detach() for name, tensor in parts.items()}
            shards |= {f"{key}/{name}": shard for name, shard in part_shards.items()}
            tree[key] = {"parts": _flatten(value.settings(), f"{key}/{_SETTINGS}", tensors)}
        else:
            plain = value.state_dict() if hasattr(value, "state_dict") else value
            tree[key] = _flatten(plain, key, tensors)
    return tensors, shards, tree


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if name in tensors:
            raise CheckpointError(
                f"two tensors of the state would be stored as {name!r}: give them keys that differ "
                "when they are joined by /"
            )
        if value.layout is not torch.strided or value.is_meta:
            raise CheckpointError(f"{name} is a sparse or a meta tensor, which cannot be saved")
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, _PLAIN):
        return {"value": value}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise CheckpointError(
                    f"state[{name!r}] has the key {key!r}: only text and whole numbers can be keys"
                )
        return {
            "dict": [[key, _flatten(item, f"{name}/{key}", tensors)] for key, item in value.items()]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        items = [_flatten(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
        return {kind: items}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        return {"value": value.item()}
    raise CheckpointError(
        f"state[{name!r}] is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint "
        "holds tensors, numbers, text, lists, tuples and dicts, so that loading it runs no code. "
        "Give an object with state_dict() and load_state_dict(), or one of these"
    )


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The nested value again."""
    (kind, content), *_ = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in content}
    if kind == "list":
        return [unflatten(item, tensors) for item in content]
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in content)
    return content


def _has_tensors(part: Any) -> bool:
    return hasattr(part, "state_dict") or isinstance(part, Tensor)


def load_user_state(checkpointer: Checkpointer, state: Mapping[str, Any]) -> Resumed | None:
    """Loads the newest usable checkpoint into the objects of `state`. Collective.

    Tensors go into objects through their load_state_dict; a bare tensor is filled in place, and
    other values cannot be handed back, so they belong into an object with a state dict.
    """
    tensors: dict[str, Tensor] = {}
    shards: dict[str, Shard] = {}
    models = {key: value for key, value in state.items() if isinstance(value, ModelState)}
    others = {key: part for key, part in state.items() if key not in models}
    own, _, _ = flatten({key: part for key, part in others.items() if _has_tensors(part)})

    def allocate(path: Path) -> Mapping[str, Tensor]:
        index = read_index(path)
        for name, stored in index.items():
            key, _, rest = name.partition("/")
            if key in models and not rest.startswith(f"{_SETTINGS}/"):
                continue
            # Into the object's own memory where it has it already: a model is not held twice. A
            # new optimizer has no moments yet, and takes those that it is given.
            mine = own.get(name)
            if mine is None or (mine.shape, mine.dtype) != (stored.shape, stored.dtype):
                mine = torch.empty(stored.shape, dtype=stored.dtype)
            tensors[name] = mine
        for key, model in models.items():
            if any(name.startswith(f"{key}/optimizer/") for name in index):
                model.prepare()
            parts, part_shards = model.tensors()
            tensors.update({f"{key}/{name}": tensor for name, tensor in parts.items()})
            shards.update({f"{key}/{name}": shard for name, shard in part_shards.items()})
        return tensors

    resumed = checkpointer.resume_into(allocate, shards=shards)
    if resumed is None:
        return None
    tree = resumed.common["tree"]
    missing, unknown = state.keys() - tree.keys(), tree.keys() - state.keys()
    if missing or unknown:
        raise CheckpointError(
            f"resume was given {sorted(state)}, but the checkpoint of step {resumed.step} holds "
            f"{sorted(tree)}: give the same keys as to save"
        )
    for key, target in state.items():
        if isinstance(target, ModelState):
            target.load_settings(unflatten(tree[key]["parts"], tensors))
            continue
        value = unflatten(tree[key], tensors)
        if hasattr(target, "load_state_dict"):
            target.load_state_dict(value)
        elif isinstance(target, Tensor):
            if target.shape != value.shape:
                raise CheckpointError(
                    f"state[{key!r}] has the shape {tuple(target.shape)}, the stored one "
                    f"{tuple(value.shape)}: give one like that which was saved"
                )
            target.data.copy_(value)
        elif isinstance(target, dict):
            target.clear()
            target.update(value)
        else:
            raise CheckpointError(
                f"state[{key!r}] is a {type(target).__name__}, which cannot be loaded in place: "
                "give a dict, a tensor, or an object with load_state_dict()"
            )
    return resumed
