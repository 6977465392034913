"""Every configuration value: its type, unit and default.

The classes are frozen: what passed the door does not change. Hydra needs schemas that it can
write into (a frozen one makes every override fail), so `schema_of` derives those.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from slurm_pt.config.choices import (
    Activation,
    Bias,
    DType,
    Engine,
    GradientCompression,
    Norm,
    Outer,
    Positions,
    Recompute,
    RopeScaling,
    Schedule,
)

MISSING: Any = "???"
"""OmegaConf's mark for a value that has no default."""


@dataclass(frozen=True)
class ModelConfig:
    """A causal pre-norm transformer. The defaults are GPT-2's; presets show Llama's and Qwen's."""

    num_layers: int = MISSING
    """Transformer layers. At least parallel.pp."""
    hidden_size: int = MISSING
    """Width of the residual stream. Divisible by num_heads and parallel.tp."""
    num_heads: int = MISSING
    """Attention heads. Divisible by parallel.tp."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each for num_heads / num_kv_heads of queries; null: num_heads."""
    head_size: int | None = None
    """Width of one head; null: hidden_size / num_heads."""
    vocab_size: int = MISSING
    """Number of token ids. Divisible by parallel.tp."""
    max_seq_len: int = MISSING
    """Longest sequence, in tokens."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward block; null: 4 * hidden_size."""
    positions: Positions = Positions.learned
    """learned or rotary."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = RopeScaling.none
    """none, linear or llama3."""
    rope_factor: float = 1.0
    """By how much rotary frequencies are stretched."""
    rope_low_freq_factor: float = 1.0
    """llama3: frequencies with fewer turns than this in the original length are stretched whole."""
    rope_high_freq_factor: float = 4.0
    """llama3: frequencies with more turns than this in the original length are left alone."""
    rope_original_seq_len: int | None = None
    """llama3: longest sequence of the pre-training, in tokens."""
    norm: Norm = Norm.layer
    """layer or rms."""
    norm_eps: float = 1e-5
    """Added to the variance before its root."""
    activation: Activation = Activation.gelu
    """gelu or swiglu."""
    bias: Bias = Bias.all
    """all, qkv or none."""
    tie_embeddings: bool = True
    """Use the token embedding as the output head."""
    dropout: float = 0.0
    """Probability that a residual or embedding element is dropped, 0 to 1."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; residual outputs get it / sqrt(2 * num_layers)."""
    share_layers: int = 1
    """So many layers, one after another, use one set of weights; 1: each has its own."""

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are split over the ranks."""

    tp: int = 1
    """Tensor-parallel degree: ranks that share each layer."""
    pp: int = 1
    """Pipeline-parallel degree: ranks that hold the layers one after another."""
    dp: int | None = None
    """Data-parallel degree: copies of the model; null: what slurm.nodes leaves, or 1."""
    sequence: bool = False
    """Sequence parallelism: tensor ranks also split norms, dropout and residuals, by position."""
    allow_tp_across_nodes: bool = False
    """Let a tensor group span nodes (slow links; for the adventurous)."""
    schedule: Schedule = Schedule.one_f_one_b
    """Order of the micro-batches: one_f_one_b, gpipe, interleaved or zero_bubble (ZB-H1)."""
    virtual_stages: int = 1
    """Pieces of the model on each pipeline rank, 2 or more with schedule=interleaved, else 1."""
    stage_layers: list[int] | None = None
    """Layers of each of the pp * virtual_stages stages, in order; null: as even as can be."""
    zero: int = 0
    """ZeRO stage: 0 none; 1 shards the optimizer's state over dp; 2 also gradients and 3 also
    weights (both with train.engine=deepspeed)."""
    gradient_compression: GradientCompression = GradientCompression.none
    """How gradients are sent between replicas: none, fp16, bf16 or powersgd."""
    powersgd_rank: int = 4
    """powersgd: columns of the factors that stand for a matrix."""
    powersgd_start_step: int = 100
    """powersgd: steps at the start whose gradients are sent uncompressed."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    steps: int = MISSING
    """Optimizer steps of the whole run."""
    global_batch_size: int = MISSING
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = 1
    """Sequences per forward pass of one rank."""
    seq_len: int = MISSING
    """Tokens per sequence."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up; then a cosine to min_lr."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices; vectors (biases, norms) do not decay."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    grad_clip: float | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory, and update there; on a CPU it changes nothing."""
    offload_embedding: bool = False
    """Keep the token embedding, its gradient and moments in host memory, and look tokens up there;
    on a CPU it changes nothing."""
    offload_parameters: bool = False
    """deepspeed, parallel.zero=3: keep each rank's part of the weights in host memory, too."""
    init_from: str | None = None
    """A committed checkpoint (a folder step_N) whose weights to start from; null: random ones."""
    dtype: DType = DType.float32
    """Of activations: float32, float64, bfloat16 or float16 (weights and moments stay float32)."""
    loss_scale: float = 65536.0
    """float16: what the loss is multiplied with at first; halved when a gradient overflows."""
    loss_scale_window: int = 1000
    """float16: steps without an overflow after which the factor is doubled."""
    engine: Engine = Engine.native
    """native, or deepspeed (parallel.zero 1 to 3; needs the extra slurm_pt[deepspeed])."""
    recompute: Recompute = Recompute.none
    """What the backward pass computes again instead of keeping it: none, selective or full."""
    recompute_stages: list[Recompute] | None = None
    """The same for each of the pp * virtual_stages stages, in order; null: as train.recompute."""
    compile: bool = False
    """Have torch.compile make the kernels between the matrix products."""
    seed: int = 0
    """Fixes the initial weights, the order of the data and the dropout masks, in any layout."""
    eval_interval: int | None = None
    """Steps between two evaluations on the held-out tokens; null: never."""
    eval_batches: int = 8
    """Global batches of one evaluation; always the same ones."""
    local_steps: int = 1
    """Updates that each replica makes on its own between two synchronisations; 1: none."""
    local_after: int = 0
    """Completed steps from which on updates are local; before, gradients are summed every step."""
    outer: Outer = Outer.average
    """How replicas synchronise: average (post-local SGD) or nesterov (DiLoCo)."""
    outer_lr: float = 0.7
    """nesterov: learning rate of the outer step."""
    outer_momentum: float = 0.9
    """nesterov: momentum of the outer step, 0 to 1."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on frozen weights (LoRA)."""

    rank: int | None = None
    """Of each adapter: W x + alpha / rank * B A x, A [rank, in], B [out, rank]; null: no adapters,
    all weights are trained."""
    alpha: float = 16.0
    """Scale of the adapters, divided by the rank."""
    targets: list[str] = field(default_factory=lambda: ["query", "value"])
    """Which linear layers get one: of query, key, value, attention.output, gate, up and down."""

    @property
    def scale(self) -> float:
        """Of what the adapters give; 0 where there are none."""
        return 0.0 if self.rank is None else self.alpha / self.rank


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture."""

    path: str = MISSING
    """As data.path."""
    weight: float = MISSING
    """Its share of the samples is weight / the sum of all weights."""


@dataclass(frozen=True)
class DataConfig:
    """The training tokens."""

    path: str | None = MISSING
    """Folder of `slurm-pt data prepare`, or PREFIX of a Megatron-LM dataset (PREFIX.bin and
    PREFIX.idx); null: data.mixture, else the Python standard library's source."""
    mixture: list[MixtureSource] | None = None
    """Several sources, [{path: ..., weight: ...}, ...], instead of data.path."""
    mask_documents: bool = False
    """Keep attention and positions within the documents of a sample."""
    validation_fraction: float = 0.0
    """Part of each source, at its end, that is held out from training, 0 to 1."""
    prefetch: int = 2
    """Steps whose tokens a thread has ready; 0: read when needed, a stop then waits for the read.

    Does not change what a run computes."""


@dataclass(frozen=True)
class SlurmConfig:
    """What to ask Slurm for. Keys are sbatch's own options; null: the option is not written."""

    partition: str | None = None
    """Slurm's partition."""
    qos: str | None = None
    """Quality of service."""
    account: str | None = None
    """Who pays."""
    nodes: int | None = None
    """null: as few as hold tp * pp * dp ranks."""
    gpus_per_node: int | None = None
    """null: cluster.gpus_per_node when cluster.device is cuda."""
    gres: str | None = None
    """Generic resources in Slurm's spelling; then gpus_per_node is not written."""
    cpus_per_task: int | None = None
    """CPUs for each rank."""
    mem: str | None = None
    """Memory per node in Slurm's spelling (64G; a bare number is MB; 0 is all of the node)."""
    mem_per_cpu: str | None = None
    """Instead of mem."""
    mem_per_gpu: str | None = None
    """Instead of mem."""
    time: str | None = None
    """Time limit in Slurm's spelling (90 is minutes; 1:30:00; 2-12:00:00). Quote it in YAML."""
    constraint: str | None = None
    """Features that the nodes must have."""
    reservation: str | None = None
    """A reservation to run in."""
    nodelist: str | None = None
    """Nodes to use."""
    exclude: str | None = None
    """Nodes to stay away from."""
    exclusive: bool = False
    """Share the nodes with nobody."""
    dependency: str | None = None
    """Jobs to wait for, in Slurm's spelling."""
    job_name: str | None = None
    """null: the run's name."""
    signal_lead_s: int = 120
    """Warning before the time limit, in seconds (--signal=USR2@...); 0: none."""
    cpu_bind: str = "none"
    """srun --cpu-bind; `none` is safe on every node."""
    array_parallelism: int | None = None
    """Trials of one sweep that run at once; null: no limit."""
    max_failures: int = 3
    """Failed attempts in a row without a new committed step, after which the run is given up.

    0: any failure ends it. An attempt that a time limit ended without a new step counts as one."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the ranks start (module load ..., source ...)."""
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    """More sbatch options, name to value; true writes the bare option."""
    python: str | None = None
    """Python interpreter on the nodes; null: the one that submits."""


@dataclass(frozen=True)
class ClusterConfig:
    """What the machine offers."""

    device: str = "auto"
    """cuda, cpu, or auto: cuda when torch sees a GPU."""
    gpus_per_node: int | None = None
    """GPUs of one node; null: none are asked for."""
    ranks_per_node: int | None = None
    """Most ranks on one node; null: gpus_per_node, or all in one node."""
    interface: str | None = None
    """Network interface for gloo and for NCCL's bootstrap; null: the one that leads to rank 0."""
    start_timeout_s: int = 600
    """How long ranks wait for each other at the start."""
    collective_timeout_s: int = 1800
    """How long a collective may take before its ranks give up."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When and how state is saved."""

    interval_s: float = 600.0
    """Seconds between periodic saves; 0: after every step."""
    keep_last: int = 2
    """Committed checkpoints that are kept."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    verify: bool = True
    """Compare checksums before a checkpoint is used."""


@dataclass(frozen=True)
class MonitorConfig:
    """How a run reports on itself."""

    heartbeat_s: float = 10.0
    """Seconds between heartbeat files of a rank."""
    comment_s: float = 30.0
    """Seconds between updates of the job's comment in squeue; 0: never."""
    poll_s: float = 30.0
    """Seconds between two questions to the controller while a launcher waits."""


@dataclass(frozen=True)
class JobConfig:
    """What a job needs, whatever it trains: enough for `slurm_pt.start`."""

    name: str = "run"
    """First part of the run folder's name; letters, digits and . _ -"""
    run_root: str = "runs"
    """Folder of all runs, on a file system that all nodes share."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)


@dataclass(frozen=True)
class RunConfig(JobConfig):
    """A job that trains our model on our data."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)


def _writable(hint: Any) -> Any:
    """A type with the dataclasses inside of `list[...]` and `... | None` made writable."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is list and dataclasses.is_dataclass(arguments[0]):
        return list[schema_of(typing.cast("type", arguments[0]))]  # type: ignore[misc]
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, map(_writable, arguments))
    return hint


@functools.cache
def schema_of(frozen: type) -> type:
    """The same dataclass, but writable and made of writable parts, as Hydra's schemas must be.

    One class for one class: OmegaConf merges a group only into the very type it was declared with.
    """
    hints = typing.get_type_hints(frozen)
    fields: list[tuple[str, Any, Any]] = []
    for declared in dataclasses.fields(frozen):
        hint: Any = hints[declared.name]
        factory: Any = declared.default_factory
        hint = _writable(hint)
        if dataclasses.is_dataclass(hint):
            hint = factory = schema_of(typing.cast("type", hint))
        if isinstance(hint, types.UnionType):  # OmegaConf knows Optional[X], not X | None
            hint = typing.Union[typing.get_args(hint)]  # noqa: UP007
        if factory is not dataclasses.MISSING:
            default = field(default_factory=factory)
        else:
            default = field(default=declared.default)
        fields.append((declared.name, hint, default))
    return dataclasses.make_dataclass(frozen.__name__, fields)
