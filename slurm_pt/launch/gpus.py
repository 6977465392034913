"""Which GPU this rank will use, by its UUID: known from NVML, before torch is imported.

So two ranks on one GPU are found before the first collective, where NCCL would only hang or say
"invalid usage".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

from slurm_pt.launch.environment import RankInfo, pick_device_index


def own_gpu(info: RankInfo, environ: Mapping[str, str], device: str) -> tuple[str, ...]:
    """The UUID of this rank's GPU; empty where the rank uses none.

    Args:
        info: This rank.
        environ: Its environment, for CUDA_VISIBLE_DEVICES.
        device: cluster.device.

    Raises:
        LaunchError: The rank sees GPUs, but too few for the ranks of its node.
    """
    if device == "cpu" or (device == "auto" and "+cpu" in _torch_version()):
        return ()
    visible = visible_gpus(list_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    return (visible[pick_device_index(len(visible), info)],) if visible else ()


def list_gpus() -> list[str]:
    """The UUIDs of the GPUs that the driver shows here; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def visible_gpus(present: Sequence[str], setting: str | None) -> list[str]:
    """The GPUs of `present` that CUDA_VISIBLE_DEVICES lets a process see, in its order.

    A number or the beginning of a UUID stands for a GPU, and what follows an unknown one is not
    seen (CUDA C Programming Guide, environment variables). A part of a GPU (MIG) keeps the name
    that it was given.

    >>> visible_gpus(["GPU-aa", "GPU-bb"], "1")
    ['GPU-bb']
    >>> visible_gpus(["GPU-aa", "GPU-bb"], None)
    ['GPU-aa', 'GPU-bb']
    """
    if setting is None:
        return list(present)
    seen: list[str] = []
    for word in (part.strip() for part in setting.split(",")):
        if word.startswith("MIG-"):
            seen.append(word)
        elif word.isdecimal() and int(word) < len(present):
            seen.append(present[int(word)])
        else:
            named = [uuid for uuid in present if word and uuid.startswith(word)]
            if len(named) != 1:
                break
            seen.append(named[0])
    return seen


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
