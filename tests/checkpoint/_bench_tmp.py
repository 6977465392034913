import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import torch.distributed.checkpoint, torch.distributed.tensor
sys.path.insert(0, "/work/main")
from tests.checkpoint.toy import checkpointer, groups_of
from slurm_pt.checkpoint import peers as P, store
def main(folder, mb, degrees, n):
    g = groups_of(*degrees)
    count = 48
    per = int(mb*1e6/4/count/ (degrees[0]) )
    tensors = {f"t{i}": torch.rand(per//512, 512) for i in range(count)}
    dims = {k: 0 for k in tensors}
    s = checkpointer(Path(folder), g, report=lambda *a: None)
    times = {}
    def timed(obj, name):
        f = getattr(obj, name)
        def w(*a, **k):
            t=time.monotonic()
            try: return f(*a, **k)
            finally: times.setdefault(name, []).append(round(time.monotonic()-t,4))
        setattr(obj, name, w)
    for n_ in ("_prepare","_write","_commit","_read_back","_prune"): timed(s, n_)
    for n_ in ("meet","gather"): timed(s._peers, n_)
    out=[]
    for i in range(n):
        for t in tensors.values(): t.add_(1)
        dist.barrier()
        t0=time.monotonic()
        s.save(i+1, tensors, shard_dims=dims, rank_state={}, common={}, wait=False)
        stall=s.last_stall_s
        s.wait()
        out.append((round(stall,4), round(s.last_save_s,4), round(time.monotonic()-t0,4)))
    return out, {k:v[:2] for k,v in times.items()}
if __name__=="__main__":
    pass
def prof(folder, mb, degrees):
    import cProfile, pstats, io
    g = groups_of(*degrees)
    tensors = {f"t{i}": torch.rand(int(mb*1e6/4/48/512/degrees[0])+1, 512) for i in range(48)}
    dims = {k: 0 for k in tensors}
    s = checkpointer(Path(folder), g, report=lambda *a: None, asynchronous=False)
    txt=[]
    for i in range(3):
        dist.barrier()
        pr=cProfile.Profile(); pr.enable()
        s.save(i+1, tensors, shard_dims=dims, rank_state={}, common={}, wait=False)
        pr.disable(); b=io.StringIO(); pstats.Stats(pr,stream=b).sort_stats("cumtime" if i==0 else "tottime").print_stats(45 if i==0 else 22); txt.append(b.getvalue())
    return txt
def first(folder):
    import threading, cProfile, pstats, io
    g = groups_of(2,1,2)
    tensors = {f"t{i}": torch.rand(500, 512) for i in range(48)}
    dims = {k: 0 for k in tensors}
    s = checkpointer(Path(folder), g, report=lambda *a: None)
    pr=cProfile.Profile()
    old=s._run
    def run(x):
        pr.enable(); old(x); pr.disable()
    s._run=run
    s.save(1, tensors, shard_dims=dims, rank_state={}, common={}, wait=False)
    s.wait()
    b=io.StringIO(); pstats.Stats(pr,stream=b).sort_stats("cumtime").print_stats(60); return b.getvalue()
