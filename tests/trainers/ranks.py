"""Ranks of a group on this machine's CPU, forked from one process: importing a trainer takes longer than training."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable

import torch

# Every rank's optimizer loads these, which takes each four seconds of what trains for a tenth of one.
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist


def fork_ranks(world_size: int, run: Callable[[int], None]) -> None:
    """Call `run(rank)` in one forked process per rank, with the environment of `torchrun`; fail if one fails."""
    port = _find_port()
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
                torch.set_num_threads(1)
                run(rank)
                dist.barrier()
                dist.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
    if failed:
        raise SystemExit(f"ranks {failed} of {world_size} failed")


def _find_port() -> int:
    """Return a port that is free, and none of those that the system gives to whoever asks for any meanwhile."""
    for port in random.Random().sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("no port is free")
