"""One rank in a process of its own, for the rendezvous tests: `python -m ... SPEC`.

SPEC is JSON. What happens is printed as JSON lines: `log` for a log line, then one `meeting` or
`error`. After a meeting the process waits for the end of its input, holding its connections.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path

from slurm_pt.launch.environment import Launcher, RankInfo
from slurm_pt.launch.rendezvous import MeetingStoppedError, make_hello, meet


def say(**record):
    print(json.dumps(record), flush=True)


def main():
    spec = json.loads(sys.argv[1])
    counts = spec["counts"]
    rank, world_size = spec["rank"], sum(counts)
    node = next(n for n in range(len(counts)) if rank < sum(counts[: n + 1]))
    info = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank - sum(counts[:node]),
        local_world_size=counts[node],
        node_rank=node,
        num_nodes=len(counts),
        launcher=Launcher.slurm,
        hosts=tuple(f"n{n + 1}" for n in range(len(counts))),
        ranks_per_node=tuple(counts),
        job_id="7",
        step_id="0",
    )
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    hello = dataclasses.replace(make_hello(info), **spec.get("hello", {}))
    say(begun=True)
    try:
        meeting = meet(
            info,
            folder=Path(spec["folder"]),
            launch_key=spec.get("key", "k"),
            hello=hello,
            timeout_s=spec.get("timeout_s", 60),
            report_s=spec.get("report_s", 30),
            interface=spec.get("interface"),
            log=lambda line: say(log=line),
            stop_requested=lambda: bool(signals),
            agree=lambda hellos: {"attempt": 3, "pids": [hello.pid for hello in hellos]},
        )
    except (Exception, MeetingStoppedError) as error:
        say(error=str(error), kind=type(error).__name__)
        return
    shown = {"address": meeting.address, "port": meeting.port, "interface": meeting.interface}
    shown |= {"hosts": meeting.hosts, "agreed": meeting.agreed, "controls": len(meeting.control)}
    say(meeting=shown | {"several_machines": meeting.several_machines})
    if spec.get("store"):
        use_store(meeting, info)
    sys.stdin.read()
    meeting.close()


def use_store(meeting, info):
    """torch's own store on the socket that the meeting kept, and a sum over gloo."""
    import os
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
    store = dist.TCPStore(
        meeting.address,
        meeting.port,
        info.world_size,
        is_master=info.rank == 0,
        timeout=timedelta(seconds=30),
        master_listen_fd=meeting.take_store_fd(),
    )
    dist.init_process_group("gloo", store=store, rank=info.rank, world_size=info.world_size)
    total = torch.tensor([info.rank + 1.0])
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    say(total=total.item())


if __name__ == "__main__":
    main()
