"""Puts split layers in the place of a user's own, each with its slice of the weights.

A layer on the meta device stays there: nothing is sliced, and the weights come later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slurm_pt.errors import Problem
from slurm_pt.parallel.model_part import SplitLayer
from slurm_pt.parallel.sequence import gather_sequence, scatter_sequence
from slurm_pt.parallel.split_plan import Role, inside
from slurm_pt.parallel.split_units import OnAnotherStage
from slurm_pt.parallel.tensor import ColumnParallelLinear, RowParallelLinear, Rows
from slurm_pt.parallel.vocabulary import VocabParallelEmbedding

if TYPE_CHECKING:
    from slurm_pt.parallel.axis import TensorAxis
    from slurm_pt.plan.layout import ParallelLayout


def role_problems(
    model: nn.Module, roles: Mapping[str, Role], layout: ParallelLayout, *, kv_sharing: int
) -> Iterator[Problem]:
    """Every module that cannot have its role in this layout.

    `kv_sharing` is how many tensor ranks the group has that may hold the same key/value heads.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, role in roles.items():
        if role in ("sequence", "scatter", "gather"):
            continue
        key = f"{name} as {role if isinstance(role, str) else 'column'}"
        module = modules.get(name)
        wanted = nn.Embedding if role == "vocabulary" else nn.Linear
        if type(module) is not wanted:
            rule = f"must be a torch.nn.{wanted.__name__} itself"
            fix = "build it as one, or build it of the layers in slurm_pt.parallel.tensor"
            found = "a parameter" if module is None else type(module).__name__
            yield Problem(key, found, rule, fix)
        elif module._forward_hooks or module._forward_pre_hooks:
            rule = "has forward hooks, which its replacement would not have"
            yield Problem(key, type(module).__name__, rule, "add hooks after the split")
        elif isinstance(module, nn.Embedding):
            yield from _embedding_problems(key, module, layout.tp)
        elif isinstance(module, nn.Linear):
            yield from _linear_problems(key, module, role, layout.tp, kv_sharing)
    yield from _tie_problems(model, roles)


def _tie_problems(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[Problem]:
    """One parameter in several modules must be split in one way."""
    seen: dict[int, tuple[str, object]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        role = roles.get(name.rpartition(".")[0])
        # A vocabulary's rows are split as a column-parallel layer's are.
        way = "column" if role == "vocabulary" else role if role in ("column", "row") else None
        first, other = seen.setdefault(id(parameter), (name, way))
        if other != way:
            rule = f"is the same parameter as {first}, which is split in another way"
            fix = "give both modules roles that split rows: vocabulary and column"
            yield Problem(name, role, rule, fix)


def sequence_problems(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[Problem]:
    """Every parameter of which the plan does not say what part of the sequence it sees."""
    for name, _ in model.named_parameters():
        if not any(inside(name, named) for named in roles):
            rule = "with parallel.sequence=true the plan must say what part of it this sees"
            fix = 'give it, or the module it is in, the role "sequence", "scatter" or "gather"'
            yield Problem(name, "without a role", rule, fix)


def _embedding_problems(key: str, module: nn.Embedding, tp: int) -> Iterator[Problem]:
    rows = module.num_embeddings
    if rows % tp:
        fix = f"make it {-(-rows // tp) * tp} rows, some of them never used"
        yield Problem(key, rows, f"its rows must be divisible by parallel.tp={tp}", fix)
    special = {
        "padding_idx": module.padding_idx,
        "max_norm": module.max_norm,
        "scale_grad_by_freq": module.scale_grad_by_freq or None,
        "sparse": module.sparse or None,
    }
    for option, value in special.items():
        if value is not None:
            rule = "is not known to a split embedding"
            yield Problem(f"{key}: {option}", value, rule, f"build it without {option}")


def _linear_problems(
    key: str, module: nn.Linear, role: Role, tp: int, kv_sharing: int
) -> Iterator[Problem]:
    if role == "row":
        if module.in_features % tp:
            yield _indivisible(f"{key}: in_features", module.in_features, tp)
        return
    outputs = _outputs(role, module)
    total = sum(rows.features for rows in outputs.values())
    if total != module.out_features:
        named = ", ".join(f"{name}: {rows.features}" for name, rows in outputs.items())
        rule = f"the outputs {named} are {total} rows, the layer has {module.out_features}"
        yield Problem(key, total, rule, "name all of its outputs, in the order of the rows")
    for name, rows in outputs.items():
        which = f"{key}: {name or 'out_features'}"
        parts = rows.parts or tp
        if rows.features % parts:
            yield _indivisible(which, rows.features, parts)
        elif parts != tp and parts * kv_sharing != tp:
            rule = f"parts={parts}, while {kv_sharing} of parallel.tp={tp} ranks share a part"
            fix = "leave parts out and set parallel.tp to a divisor of the number of heads"
            yield Problem(which, rows.features, rule, fix)


def _indivisible(key: str, size: int, parts: int) -> Problem:
    rule = f"must be divisible by {parts}, the parts it is split into"
    return Problem(key, size, rule, f"change it to {-(-size // parts) * parts}, or parallel.tp")


def replace_layers(
    model: nn.Module, roles: Mapping[str, Role], axis: TensorAxis, *, sequence_dim: int
) -> None:
    """Split layers in the tree of a model instead of whole ones, and where the sequence changes.

    Weights that were tied stay tied. In a module that runs on the whole sequence, layers do so.
    """
    whole = [name for name, role in roles.items() if role in ("scatter", "gather")]
    modules = dict(model.named_modules(remove_duplicate=False))
    tied: dict[int, nn.Parameter] = {}
    done: dict[int, nn.Module] = {}
    for name, role in roles.items():
        module = modules.get(name)
        if module is None or role == "sequence" or isinstance(module, OnAnotherStage):
            continue
        parent, _, last = name.rpartition(".")
        if id(module) in done:  # one module under two names stays one
            modules[parent].add_module(last, done[id(module)])
            continue
        if role in ("scatter", "gather"):
            done[id(module)] = module
            if axis.splits_sequence:
                _change_sequence(module, role, axis, sequence_dim)
            continue
        inner = axis.on_whole_sequence() if any(inside(name, n) for n in whole) else axis
        layer = _split_layer(module, role, inner)
        layer.train(module.training)
        for kind, parameter in list(module.named_parameters(recurse=False)):
            held: nn.Parameter = getattr(layer, kind)
            held.requires_grad_(parameter.requires_grad)
            if id(parameter) in tied:
                setattr(layer, kind, tied[id(parameter)])
                continue
            _slice_into(held, parameter, layer, kind)
            tied[id(parameter)] = held
        if inner.splits_sequence and sequence_dim != 0:
            _turn(layer)
        done[id(module)] = layer
        modules[parent].add_module(last, layer)


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Memory, with arbitrary values, for all that is on the meta device. Ties stay tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_meta:
                continue
            if tensor not in made:
                memory = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = (
                    nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
                )
            setattr(module, name, made[tensor])


def _split_layer(module: nn.Module, role: Role, axis: TensorAxis) -> Any:
    weight = module.weight
    kind: dict[str, Any] = {"axis": axis, "device": weight.device, "dtype": weight.dtype}
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding(module.num_embeddings, module.embedding_dim, **kind)
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{type(module).__name__} cannot be split")
    kind["bias"] = module.bias is not None
    if role == "row":
        return RowParallelLinear(module.in_features, module.out_features, **kind)
    outputs = module.out_features if isinstance(role, str) else _outputs(role, module)
    return ColumnParallelLinear(module.in_features, outputs, **kind)


def _outputs(role: Role, module: nn.Linear) -> dict[str, Rows]:
    if isinstance(role, str):
        return {"": Rows(module.out_features)}
    return {name: rows if isinstance(rows, Rows) else Rows(rows) for name, rows in role.items()}


@torch.no_grad()
def _slice_into(local: Tensor, whole: Tensor, layer: SplitLayer, kind: str) -> None:
    if local.is_meta:
        return
    begin = 0
    for part in layer.stored_parts(kind):
        mine = local[part.rows]
        rows = part.shard.whole_shape(mine.shape)[0]
        mine.copy_(whole[begin : begin + rows][part.shard.slices(mine.shape)])
        begin += rows


def _change_sequence(module: nn.Module, role: str, axis: TensorAxis, dim: int) -> None:
    if role == "scatter":
        module.register_forward_hook(
            lambda _module, _inputs, output: scatter_sequence(output, axis=axis, dim=dim)
        )
    else:
        module.register_forward_pre_hook(
            lambda _module, inputs: (gather_sequence(inputs[0], axis=axis, dim=dim), *inputs[1:])
        )


def _turn(layer: nn.Module) -> None:
    """Our layers split dim 0, the user's sequence is dim 1: views of what enters and leaves."""
    turn: Callable[[Tensor], Tensor] = lambda x: x.transpose(0, 1)  # noqa: E731
    layer.register_forward_pre_hook(lambda _module, inputs: (turn(inputs[0]), *inputs[1:]))
    layer.register_forward_hook(lambda _module, _inputs, output: turn(output))
