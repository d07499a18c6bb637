"""Clients that ask one text after another, in a process of their own.

    python -m benches.serving.http_load < PLAN

PLAN is a JSON object: `port`, `path`, `bodies`, `connections`, `warm_s`, `seconds` and `pid`, the server's process. One
object comes back: latencies of what was answered in the window, in milliseconds; errors; and what the cores did.
"""

import asyncio
import itertools
import json
import sys
import time

from benches.serving import usage

# A request without an answer for this long is an error.
TIMEOUT_S = 30.0


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """Send a request and read the whole answer; return its status."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), None)
    if length is not None:
        await reader.readexactly(length)
    else:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            await reader.readexactly(size + 2)
        await reader.readuntil(b"\r\n")
    return int(lines[0].split()[1])


async def drive(plan: dict) -> dict:
    """Ask until the window is over."""
    head = f"POST {plan['path']} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    bodies = [body.encode() for body in plan["bodies"]]
    turns = itertools.cycle([f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies])
    answered: list[tuple[float, float]] = []
    errors: list[tuple[float, str]] = []
    begin = time.monotonic() + plan["warm_s"]
    end = begin + plan["seconds"]

    async def client() -> None:
        reader = writer = None
        while (start := time.monotonic()) < end:
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", plan["port"], limit=1 << 22)
                status = await asyncio.wait_for(ask(reader, writer, next(turns)), TIMEOUT_S)
                error = "" if status == 200 else f"status {status}"
            except (OSError, EOFError, ValueError, asyncio.TimeoutError) as exc:
                error = type(exc).__name__
            now = time.monotonic()
            if not error:
                answered.append((now, now - start))
                continue
            errors.append((now, error))
            if writer is not None and not error.startswith("status"):
                writer.close()
                writer = None
            await asyncio.sleep(0.05)
        if writer is not None:
            writer.close()

    async def look(moment: float) -> tuple:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))
        return time.monotonic(), usage.read_cpu_s(plan["pid"]), usage.read_machine_cpu_s(), time.process_time()

    clients = [asyncio.create_task(client()) for _ in range(plan["connections"])]
    before, after = await asyncio.gather(look(begin), look(end))
    memory = usage.read_memory_bytes(plan["pid"])
    await asyncio.gather(*clients)
    inside = [latency for when, latency in answered if before[0] <= when < after[0]]
    wall, own = after[0] - before[0], after[3] - before[3]
    cpu_s = usage.subtract(after[1], before[1])
    return {
        "seconds": wall,
        "latencies_ms": [round(1000 * latency, 3) for latency in inside],
        "errors": [error for when, error in errors if before[0] <= when < after[0]],
        "cpu_s": cpu_s,
        "clients_cpu_s": own,
        "others_cores": max(0.0, (after[2] - before[2] - own - sum(cpu_s.values())) / wall),
        "memory_bytes": memory,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(drive(json.load(sys.stdin)))))
