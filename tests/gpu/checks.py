"""How checks run on GPU ranks: one after the other, a line each, and all of them though one fails."""

import gc
import os
import sys
import traceback

import torch
import torch.distributed as dist

CUDA = os.environ.get("DEVICE", "cuda") == "cuda"


def run_checks(checks, names=()):
    """Run `(function, argument or None)` pairs, print what each says, and end the process: with 1 if any failed.

    Args:
        names: of the functions to run; all without any.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    unknown = set(names) - {check.__name__ for check, _ in checks}
    assert not unknown, f"there is no {sorted(unknown)}"
    rank, failed = int(os.environ["RANK"]), 0
    for check, given in checks:
        if names and check.__name__ not in names:
            continue
        try:
            line = "ok: " + check(*([] if given is None else [given]))
        except Exception as error:
            failed += 1
            line = f"FAILED: {type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"CHECK rank {rank} {check.__name__} {given or ''} {line}", flush=True)
    dist.barrier()
    if CUDA:
        torch.cuda.synchronize()
    torch._dynamo.reset()  # lets go of CUDA graphs that hold NCCL's launches, for which its communicators may wait
    gc.collect()
    print(f"CHECKS rank {rank} done, {failed} failed", flush=True)
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)
