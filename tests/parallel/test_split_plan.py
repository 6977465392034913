"""What a plan may not ask for is refused with the names of the user's own model."""

import pytest
import torch
from torch import nn

from slurm_pt.config.choices import GradientCompression
from slurm_pt.config.schema import ParallelConfig
from slurm_pt.parallel.pipeline import Message
from slurm_pt.parallel.split_layers import role_problems, sequence_problems
from slurm_pt.parallel.split_model import trainer_only_problems
from slurm_pt.parallel.split_plan import SplitPlan
from slurm_pt.parallel.split_units import Ties, UnitChunk, stage_units
from slurm_pt.parallel.tensor import Rows
from slurm_pt.plan.layout import ParallelLayout, split_by_cost

TP4 = ParallelLayout(tp=4, pp=1, dp=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU()) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.ones(1))


def names_of(model):
    return [name for name, _ in model.named_modules() if name]


def refused(modules, layout=TP4, model=None, kv_sharing=1):
    """Each problem of a plan as the user reads it."""
    model, problems = model or Net(), []
    roles = SplitPlan(modules=modules).assign([*names_of(model), "scale"], problems)
    problems += role_problems(model, roles, layout, kv_sharing=kv_sharing)
    return [str(problem) for problem in problems]


def test_a_plan_that_fits_has_no_problems():
    assert refused({"blocks.*.0": "column", "norm": "sequence", "scale": "sequence"}) == []


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({"bloks.*.0": "column"}, "'bloks.*.0' fits the name of no module; did you mean blocks.*"),
        ({"blocks.*.0": 5}, "neither a role nor numbers of output features"),
        ({"head": {"a": -4, "b": 12}}, "neither a role nor numbers of output features"),
        ({"head": {"a": "x"}}, "neither a role nor numbers of output features"),
        ({"blocks.*": "colum"}, "no such role; did you mean column? To fix: use one of column"),
        ({"blocks.*.1": "column"}, "blocks.0.1 as column=GELU: must be a torch.nn.Linear itself"),
        ({"scale": "row"}, "scale as row=a parameter: must be a torch.nn.Linear itself"),
        ({"norm": "vocabulary"}, "norm as vocabulary=LayerNorm: must be a torch.nn.Embedding"),
        ({"head": "row"}, "head as row: in_features=6: must be divisible by 4"),
        ({"embed": "vocabulary"}, "embed as vocabulary=10: its rows must be divisible by paralle"),
        ({"embed": "vocabulary"}, "make it 12 rows, some of them never used"),
        ({"embed": "vocabulary"}, "padding_idx=0: is not known to a split embedding"),
        ({"head": {"a": 4, "b": 2}}, "the outputs a: 4, b: 2 are 6 rows, the layer has 8"),
        ({"head": {"a": 6, "b": 2}}, "head as column: a=6: must be divisible by 4"),
        ({"head": {"a": 4, "b": Rows(4, 2)}}, "parts=2, while 1 of parallel.tp=4 ranks share"),
        ({"blocks.*.0": "column", "blocks.1.*": "row"}, "blocks.1.0 is named by the pattern"),
    ],
)
def test_what_cannot_be_is_said(modules, said):
    found = refused(modules)
    assert any(said in text for text in found), found
    assert all("To fix: " in text for text in found)


def test_layers_with_hooks_are_refused():
    model = Net()
    model.head.register_forward_hook(lambda *_: None)
    (found,) = refused({"head": "column"}, model=model)
    assert "has forward hooks, which its replacement would not have" in found


def test_tied_weights_are_split_in_one_way():
    model = nn.Module()
    model.embed, model.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    model.head.weight = model.embed.weight
    assert refused({"embed": "vocabulary", "head": "column"}, model=model) == []
    (found,) = refused({"embed": "vocabulary"}, model=model)
    assert "head.weight" in found
    assert "is the same parameter as embed.weight, which is split in another way" in found


def test_with_a_split_sequence_every_parameter_needs_a_role():
    roles = {"embed": "scatter", "blocks.0": "gather", "blocks.1.0": "row", "norm": "sequence"}
    found = [problem.key for problem in sequence_problems(Net(), roles)]
    assert found == ["scale", "head.weight", "head.bias"]


def stages_of(units, pp, parallel=None, model=None):
    model, problems = model or Net(), []
    names = SplitPlan(units=units).expand_units(names_of(model), problems)
    stages = stage_units(model, names, pp, parallel or ParallelConfig(), problems)
    return stages, [str(problem) for problem in problems]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 8)


def test_units_become_stages_by_the_parameters_of_each():
    # 20 parameters a block, 40 the head; rows of an embedding are looked up: 60 and 60.
    stages, problems = stages_of(["embed", "blocks.*", "head"], 2, model=Chain())
    assert stages == [["embed", "blocks.0", "blocks.1", "blocks.2"], ["blocks.3", "head"]]
    assert problems == []
    given = ParallelConfig(stage_layers=[2, 4])
    stages, _ = stages_of(["embed", "blocks.*", "head"], 2, given, model=Chain())
    assert stages[0] == ["embed", "blocks.0"]


@pytest.mark.parametrize(
    ("units", "pp", "parallel", "said"),
    [
        (["embed", "blocks.*"], 2, None, "head.weight is in none of them"),
        (["embed", "blocks.*", "head", "head"], 2, None, "head is a part of head, or named twice"),
        (["embed", "blocks", "blocks.*", "head"], 2, None, "blocks.0 is a part of blocks"),
        (["embed", "block.*", "head"], 1, None, "did you mean blocks.*"),
        ([], 2, None, "units=1: 2 stages (parallel.pp=2 * parallel.virtual_stages) need a unit"),
        (["embed", "blocks.*", "head"], 2, ParallelConfig(stage_layers=[1, 4]), "6 layers into 2"),
    ],
)
def test_units_that_make_no_stages_are_refused(units, pp, parallel, said):
    _, problems = stages_of(units, pp, parallel, model=Chain())
    assert any(said in text for text in problems), problems


def test_a_tie_between_other_stages_than_the_ends_is_refused():
    model, problems = Chain(), []
    model.blocks[1].weight = model.blocks[0].weight
    Ties.between(model, [["embed", "blocks.0"], ["blocks.1"], ["head"]], 3, problems)
    (problem,) = problems
    assert "blocks.0.weight = blocks.1.weight=tied: one parameter can be shared" in str(problem)


def test_an_output_that_the_next_stage_does_not_wait_for_is_refused():
    chunk = UnitChunk(
        [("wide", nn.Linear(4, 6))],
        inputs=lambda batch: batch,
        loss=None,
        call=lambda unit, x, _: unit(x),
        message=Message((2, 4), torch.float32),
    )
    with pytest.raises(ValueError, match=r"unit 'wide' gave torch.float32 \(2, 6\), but the next"):
        chunk(None, torch.ones(2, 4))


def test_stages_of_equal_cost_are_found():
    # By hand: the best cut of 3 1 1 1 4 2 into three is 3 1 1 | 1 4 | 2, the dearest 5... or
    # 3 1 1 1 | 4 | 2 with 6: so 5 is the least possible.
    spans = split_by_cost([3, 1, 1, 1, 4, 2], 3)
    assert max(sum([3, 1, 1, 1, 4, 2][i] for i in span) for span in spans) == 5
    assert [i for span in spans for i in span] == list(range(6))
    with pytest.raises(ValueError, match="2 items cannot fill 3 stages"):
        split_by_cost([1, 1], 3)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (ParallelConfig(zero=1), "parallel.zero=1"),
        (
            ParallelConfig(gradient_compression=GradientCompression.bf16),
            "parallel.gradient_compression=bf16",
        ),
    ],
)
def test_what_our_trainer_alone_does_is_refused_and_not_ignored(parallel, said):
    (problem,) = trainer_only_problems(parallel)
    assert said in str(problem)


def test_a_unit_may_be_named_again_if_it_has_no_weights():
    act, shared = nn.ReLU(), nn.Linear(4, 4)
    units, problems = [nn.Linear(4, 4), act, shared, act], []
    names = [str(number) for number in range(4)]
    assert stage_units(nn.Sequential(*units), names, 1, ParallelConfig(), problems) == [names]
    assert problems == []
    stage_units(nn.Sequential(*units, shared), [*names, "4"], 1, ParallelConfig(), problems)
    (said,) = map(str, problems)
    assert "units=4: is the same module as 2, with its weights" in said


def test_a_unit_that_cannot_be_called_is_refused():
    problems = []
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)]))
    stage_units(model, ["0"], 1, ParallelConfig(), problems)
    (said,) = map(str, problems)
    assert "a ModuleList cannot be called" in said
    assert "'0.*'" in said
