"""A rollout of a model that writes text: both versions at once stay within the memory that the model has."""

import contextlib
import os
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from launcher import running
from trainers.writers import build_writer, train_bpe

from client import Client
from export.__main__ import main

# Of 32 tokens, 2 layers, keys and values of 64 numbers of 4 bytes.
MEGABYTES = 2
CLAIMS = Path(f"/dev/shm/modelyard-kv-{os.geteuid()}")


class Watch:
    """What the versions claim, looked at often."""

    def __init__(self, tritonserver: int) -> None:
        self._pattern = f"{tritonserver}-*"
        self._ended = threading.Event()
        self.seen: set[tuple[int, ...]] = set()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            # A claim may go between the look and the reading.
            try:
                paths = sorted(CLAIMS.glob(self._pattern))
                self.seen.add(tuple(int.from_bytes(path.read_bytes(), "little") for path in paths))
            except FileNotFoundError:
                continue


def find_crashes(pids: set[int]) -> list[str]:
    """Return what the kernel says of processes that crashed; nothing where it may not be asked."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if any(f"[{pid}]: segfault" in line for pid in pids)]


@pytest.mark.rarer
def test_two_versions_share_the_memory_and_every_text_is_wholly_of_one(tmp_path: Path) -> None:
    repository, tokenizer = tmp_path / "models", train_bpe()
    for version in (1, 2):
        folder, model = tmp_path / f"writer{version}", build_writer("gpt2", len(tokenizer))
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(torch.rand_like(parameter) + 0.5)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        later = ["--no-activate"] if version == 2 else []
        asked = ["--name", "writer", "--repository", str(repository), "--kv-cache-mb", str(MEGABYTES)]
        assert main(["run", str(folder), *asked, *later]) == 0
    prompts = [f"The {word} sat on" for word in ("cat", "dog", "mouse", "hen", "fox", "cow", "pig", "ant")]
    with running(repository) as server, contextlib.ExitStack() as stack:
        server.read_until("serving")
        server.follow()
        client = stack.enter_context(Client(f"127.0.0.1:{server.grpc}", protocol="grpc", model="writer"))
        ended = threading.Event()

        def write(prompt: str) -> str:
            return "".join(client.generate(prompt, max_tokens=400, temperature=0, ignore_eos=True))

        def write_on(prompt: str) -> list[str]:
            texts = [write(prompt)]
            while not ended.is_set():
                texts.append(write(prompt))
            return texts

        with Watch(server.tritonserver) as watch, ThreadPoolExecutor(8) as pool:
            first = list(pool.map(write, prompts))
            pids = {stub.pid for stub in server.find_stubs("writer")}

            asking = [pool.submit(write_on, prompt) for prompt in prompts]
            wait = ["--wait", f"localhost:{server.status}", "--repository", str(repository)]
            code = main(["activate", "writer", "2", *wait])
            time.sleep(1)
            ended.set()
            during = [future.result() for future in asking]
            last = list(pool.map(write, prompts))
            pids |= {stub.pid for stub in server.find_stubs("writer")}
    assert code == 0
    assert len(pids) == 2 and find_crashes(pids) == []
    for old, texts, new in zip(first, during, last, strict=True):
        assert old != new and set(texts) <= {old, new}
    both = [claims for claims in watch.seen if len(claims) == 2 and all(claims)]
    assert both, "the versions never had requests at the same time"
    assert max(sum(claims) for claims in watch.seen) <= MEGABYTES << 20
    # The old one had all that one may have, and the new one found its room beside it.
    assert max(max(claims, default=0) for claims in watch.seen) > 0.8 * (MEGABYTES << 20)


@pytest.mark.rarer
def test_another_configuration_is_loaded_once_what_is_being_written_has_ended(tmp_path: Path) -> None:
    """Loaded in its place, tritonserver 2.51 died of it, 4 of 10 times."""
    repository, tokenizer, folder = tmp_path / "models", train_bpe(), tmp_path / "writer"
    build_writer("llama", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert main(["run", str(folder), "--name", "writer", "--repository", str(repository)]) == 0
    config = repository / "writer/config.pbtxt"
    with running(repository) as server, ThreadPoolExecutor(4) as pool:
        server.read_until("serving")
        server.follow()
        pid = server.tritonserver

        def write(_: int) -> str:
            with Client(f"127.0.0.1:{server.grpc}", protocol="grpc", model="writer", retry_s=60) as client:
                return "".join(client.generate("The cat", max_tokens=800, temperature=0, ignore_eos=True))

        (whole,) = set(pool.map(write, range(4)))
        for seats in range(20, 28):
            writing = [pool.submit(write, number) for number in range(4)]
            time.sleep(0.4)
            staged = config.with_name("staged")
            staged.write_text(
                re.sub(r'(max_num_seqs"\s*value \{\s*string_value: ")\d+', rf"\g<1>{seats}", config.read_text())
            )
            assert staged.read_text() != config.read_text()
            staged.rename(config)
            server.wait_for_line("version 1 is served", 60)
            assert {future.result() for future in writing} == {whole}
            assert set(pool.map(write, range(4))) == {whole}
        assert server.tritonserver == pid
        assert server.stop() == 0
