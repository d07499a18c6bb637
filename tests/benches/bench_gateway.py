"""What the gateway costs: a server asked over gRPC and through it in turns, by 1 caller and by 16.

    python -m benches.bench_gateway --repository model_repository --model sentence_embedding
    python -m benches.bench_gateway --quick

Prints the latency that it adds to one caller at p50, and its part of gRPC's throughput. Both are asked by asyncio in
this process, whose own cost counts on both sides; where the model fills every core, the gateway takes its part from the
server. Turns alternate, so that whatever else the machine does falls on both.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from doors import opened
from harness import CHECKOUT
from launcher import running

from client import AsyncClient

TEXT = "A cat sleeps on the mat while it rains, and nobody knows when it will stop."
CALLERS = 16

Ask = Callable[[], Awaitable[None]]


async def time_one(ask: Ask, requests: int) -> float:
    """Return the p50 of one caller, in milliseconds."""
    taken = []
    for _ in range(requests):
        began = time.perf_counter()
        await ask()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1000


async def time_many(ask: Ask, requests: int) -> float:
    """Return requests a second of all callers together."""

    async def call() -> None:
        for _ in range(requests // CALLERS):
            await ask()

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return requests // CALLERS * CALLERS / (time.perf_counter() - began)


async def measure(grpc: str, gateway: str, model: str, rounds: int, requests: int) -> None:
    """Print a line for each round, and the medians."""
    body = {"model": model, "input": TEXT, "encoding_format": "base64"}
    async with AsyncClient(grpc, protocol="grpc", in_flight=CALLERS) as client, aiohttp.ClientSession() as session:

        async def ask_grpc() -> None:
            await client.embed([TEXT], model=model)

        async def ask_gateway() -> None:
            async with session.post(f"{gateway}/v1/embeddings", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        ways = (ask_grpc, ask_gateway)
        for ask in ways:
            await time_many(ask, 4 * CALLERS)
        added, kept = [], []
        sys.stdout.write("round   gRPC p50 ms   added ms   gRPC texts/s   kept\n")
        for number in range(rounds):
            alone = [await time_one(ask, requests) for ask in ways]
            together = [await time_many(ask, 4 * requests) for ask in ways]
            added.append(alone[1] - alone[0])
            kept.append(together[1] / together[0])
            sys.stdout.write(
                f"{number + 1:5}   {alone[0]:11.2f}   {added[-1]:8.2f}   {together[0]:12.1f}   {kept[-1]:4.2f}\n"
            )
        sys.stdout.write(f"medians: {statistics.median(added):.2f} ms added, {statistics.median(kept):.2f} kept\n")


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, default=CHECKOUT / "model_repository", metavar="DIR")
    parser.add_argument("--model", default="sentence_embedding", help="one that makes vectors (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=300, help="of one caller in a round (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two short rounds, to see that it works")
    arguments = parser.parse_args()
    rounds, requests = (2, 20) if arguments.quick else (arguments.rounds, arguments.requests)
    with running(arguments.repository) as server:
        server.read_until("serving HTTP")
        server.follow()
        with opened(f"127.0.0.1:{server.grpc}", arguments.repository) as gateway:
            gateway.wait_for_line(f"{arguments.model}, version")
            gateway.wait_for_line("ready")
            asyncio.run(measure(f"127.0.0.1:{server.grpc}", gateway.url, arguments.model, rounds, requests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
