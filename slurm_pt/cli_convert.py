"""`slurm-pt convert`: weights from and to Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_pt.errors import CheckpointError

if TYPE_CHECKING:
    from slurm_pt.run_dir import RunDir

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group()
def convert() -> None:
    """Weights from and to Hugging Face folders (safetensors)."""


@convert.command("from-hf")
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=_FOLDER)
@click.option(
    "--vocab-multiple",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Fill the vocabulary up to a multiple of this, so that parallel.tp divides it.",
)
def from_hf(source: Path, out: Path, vocab_multiple: int) -> None:
    """Make a checkpoint to start from, out of a GPT-2, Llama or Qwen 2 model."""
    from slurm_pt.checkpoint.hugging_face import convert_from

    config = convert_from(source, out, vocab_multiple=vocab_multiple)
    place = out.absolute()
    click.echo(f"{config.num_layers} layers, {config.hidden_size} wide, in {place}")
    click.echo(
        f"Train it: python train.py --config-dir {place} model=converted "
        f"train.init_from={place}/step_00000000"
    )


@convert.command("to-hf")
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("out", type=_FOLDER)
@click.option("--step", type=int, help="Of the run's checkpoints (default: the newest).")
@click.option("--vocab-size", type=int, help="Leave out rows that were added to fill it up.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the stored weights (default: as they are).",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where the base of RUN's adapters is (default: where RUN found it).",
)
def to_hf(
    run_path: Path,
    out: Path,
    step: int | None,
    vocab_size: int | None,
    dtype: str | None,
    base: Path | None,
) -> None:
    """Make a Hugging Face folder out of a checkpoint of RUN; adapters are merged."""
    from slurm_pt.checkpoint.hugging_face import convert_to
    from slurm_pt.checkpoint.whole_model import open_model
    from slurm_pt.config import read_config
    from slurm_pt.run_dir import open_run
    from slurm_pt.run_inputs import read_run_config
    from slurm_pt.training.hugging_face import to_their_config

    run = open_run(run_path)
    config = read_config(read_run_config(run))
    model = open_model(
        _checkpoint_of(run, step),
        share_layers=config.model.share_layers,
        scale=config.lora.scale,
        base=base,
    )
    their_config = to_their_config(config.model, vocab_size=vocab_size)
    written = convert_to(model, out, their_config=their_config, dtype=dtype)
    for path in written:
        click.echo(path)


@convert.command("to-peft")
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("out", type=_FOLDER)
@click.option("--step", type=int, help="Of the run's checkpoints (default: the newest).")
@click.option("--base-model", help="Name or folder of the base, written down for those who load.")
def to_peft(run_path: Path, out: Path, step: int | None, base_model: str | None) -> None:
    """Make a folder for Hugging Face PEFT out of the adapters of RUN, a Llama or Qwen 2."""
    from slurm_pt.checkpoint.peft import export_adapters
    from slurm_pt.config import read_config
    from slurm_pt.run_dir import open_run
    from slurm_pt.run_inputs import read_run_config

    run = open_run(run_path)
    config = read_config(read_run_config(run))
    checkpoint = _checkpoint_of(run, step)
    written = export_adapters(
        checkpoint, out, model=config.model, lora=config.lora, base_model=base_model
    )
    for path in written:
        click.echo(path)


def _checkpoint_of(run: RunDir, step: int | None) -> Path:
    from slurm_pt.checkpoint import store

    stored = [found for found in store.list_checkpoints(run.checkpoints) if found.problem is None]
    for found in stored:
        if step is None or found.step == step:
            return found.path
    have = ", ".join(str(found.step) for found in stored) or "none"
    raise CheckpointError(f"{run.path} has no checkpoint of step {step}; it has: {have}")
