"""How checks run on GPU ranks: one after the other, a line each, and all of them though one fails."""

import os
import sys
import traceback

import torch
import torch.distributed as dist

CUDA = os.environ.get("DEVICE", "cuda") == "cuda"


def run_checks(checks):
    """Run `(function, argument or None)` pairs, print what each says, and end the process: with 1 if any failed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rank, failed = int(os.environ["RANK"]), 0
    for check, given in checks:
        try:
            line = "ok: " + check(*([] if given is None else [given]))
        except Exception as error:
            failed += 1
            line = f"FAILED: {type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"CHECK rank {rank} {check.__name__} {given or ''} {line}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)
