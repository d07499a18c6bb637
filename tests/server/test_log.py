"""The log: equal lines of tritonserver are counted, and whoever does not read holds up nobody."""

import os
import threading

from server.log import LineLimiter, Log


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_of_equal_lines_pass_and_the_others_are_counted() -> None:
    clock = Clock()
    limiter = LineLimiter(clock)
    lines = [line for number in range(1000) for line in limiter.admit(b"[warn] accept() %d: Too many\n" % number)]
    assert lines == [b"[warn] accept() %d: Too many\n" % number for number in range(5)]
    assert limiter.admit(b"another\n") == [b"another\n"]
    clock.now = 10.0
    assert limiter.admit(b"later\n") == [
        b"(left out: 995 more lines within 10 s like: [warn] accept() 0: Too many)\n",
        b"later\n",
    ]
    assert limiter.close_window() == []


def test_a_flood_of_different_lines_is_bounded_as_well() -> None:
    limiter = LineLimiter(Clock())
    names = ["".join(chr(97 + int(digit)) for digit in str(number)).encode() for number in range(5000)]
    assert sum(len(limiter.admit(b"unexpected " + name + b"\n")) for name in names) == 2000
    assert limiter.close_window() == [b"(left out: 3000 more lines within 10 s of many kinds)\n"]


def test_what_nobody_reads_is_dropped_and_told_of() -> None:
    reading, writing = os.pipe()
    log = Log(writing)
    # Far more than a pipe holds and than may wait.
    for number in range(30_000):
        log.say(f"line {number} " + "x" * 100)
    texts: list[bytes] = []

    def read() -> None:
        while piece := os.read(reading, 1 << 16):
            texts.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    log.close(timeout_s=30)
    os.close(writing)
    reader.join()
    lines = b"".join(texts).decode().splitlines()
    # Told of whenever a line finds room again: before the first one as well, where its thread came late, and more than
    # once.
    assert "line 0 " + "x" * 100 in lines[:2]
    told = [line for line in lines if line.startswith("warning: ")]
    counts = [int(line.split()[1]) for line in told]
    assert told == [f"warning: {count} lines of the log were lost: nobody reads them" for count in counts] != []
    assert len(lines) - len(told) + sum(counts) == 30_000


def test_a_closed_reader_ends_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    log = Log(writing)
    for _ in range(10):
        log.say("anybody there?")
    log.close()
    os.close(writing)
