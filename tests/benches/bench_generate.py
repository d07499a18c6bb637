"""Text through the server beside the bare engine and others: tokens per second, first token, between tokens, memory.

    python -m benches.bench_generate [--rounds 3] [--tokens 64] [--quick] [--json]

A GPT-2 of random weights is written of with 1, 4 and 16 prompts at once by each of:

    served                   modelyard's own server, each prompt a stream of gRPC
    openvino-genai           the engine alone, in a process of its own
    transformers             one prompt after another
    transformers, batch      all prompts in one batch, padded on the left
    ctranslate2              the same, where it can be installed in .cache/ctranslate2

All are ready before anything is measured, and each round asks every one of them once, so that what else the machine is
at meets all alike. What counts are the ratios within a round; they are told with the smallest and the largest. Then a
request comes to the server while it is idle, and while it writes eight others, in turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benches.soak import say
from harness import CHECKOUT, run

NAME = "bench"
STREAMS = (1, 4, 16)
CTRANSLATE2 = CHECKOUT / ".cache" / "ctranslate2"
SERVED, BARE, ALONE, BATCH, CT2 = "served", "openvino-genai", "transformers", "transformers, batch", "ctranslate2"

# What is compared: above, below, streams above and below, and what is hoped for.
RATIOS = (
    (SERVED, BARE, 1, 1, 0.9),
    (SERVED, BARE, 16, 16, 0.9),
    (SERVED, BATCH, 16, 16, 2.3),
    (SERVED, ALONE, 16, 16, 10.0),
    (SERVED, CT2, 16, 16, 1.0),
)

# Requests that are being written when a late one comes, the late ones one after another, the seconds between these, as
# much as a step takes or more, and what is hoped for.
OTHERS, LATE, LATE_HOPED = 8, 15, 1.5
PAUSE_S = (0.02, 0.06)

# When each token of each prompt was there, in seconds from the start.
Moments = list[list[float]]
Write = Callable[[list[list[int]], int], Moments]


@dataclass(frozen=True)
class Measured:
    """One run of one engine.

    Attributes:
        tokens_per_s: Of all prompts together.
        first_s: Time to a prompt's first token, the median over prompts.
        between_s: Time between two tokens of a prompt, the median.
        between_p99_s: The 99th percentile of that.
    """

    tokens_per_s: float
    first_s: float
    between_s: float
    between_p99_s: float


def measure(moments: Moments) -> Measured:
    gaps = np.concatenate([np.diff(each) for each in moments])
    return Measured(
        tokens_per_s=sum(map(len, moments)) / max(each[-1] for each in moments),
        first_s=float(np.median([each[0] for each in moments])),
        between_s=float(np.median(gaps)),
        between_p99_s=float(np.percentile(gaps, 99)),
    )


def open_openvino(folder: Path, threads: int) -> Write:
    """The engine with the properties and the pool that the server has."""
    import openvino as ov
    import openvino_genai as genai

    from export.engines.openvino_generation import PARAMETERS, read_properties

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks, scheduler.max_num_seqs = 512, int(PARAMETERS["max_num_seqs"])
    # As the server takes in the prompts of so small a model.
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 1024, False
    properties = {**read_properties(folder), "INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def write(prompts: list[list[int]], tokens: int) -> Moments:
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
        start = time.monotonic()
        handles = [
            pipeline.add_request(number, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        moments: Moments = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.monotonic() - start
            for handle, known in zip(handles, moments, strict=True):
                while handle.can_read():
                    known += [now for output in handle.read().values() for _ in output.generated_ids]
        return moments

    return write


def open_transformers(folder: Path, threads: int, *, is_batch: bool) -> Write:
    """One prompt after another, or all of them in one batch."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    class Clock(StoppingCriteria):
        def __init__(self) -> None:
            self.moments: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.moments.append(time.monotonic())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def write(prompts: list[list[int]], tokens: int) -> Moments:
        longest = max(map(len, prompts))
        config = GenerationConfig(
            do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=0, pad_token_id=0
        )
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        start, moments = time.monotonic(), []
        groups = [(ids, mask)] if is_batch else [(ids[i : i + 1], mask[i : i + 1]) for i in range(len(prompts))]
        for group_ids, group_mask in groups:
            clock = Clock()
            with torch.no_grad():
                model.generate(
                    group_ids, attention_mask=group_mask, generation_config=config, stopping_criteria=[clock]
                )
            moments += [[moment - start for moment in clock.moments]] * len(group_ids)
        return moments

    return write


def open_ctranslate2(folder: Path, threads: int) -> Write:
    """Static batches in fp32; it says when the last token is there, and of a step what its callback is told."""
    ctranslate2: Any = importlib.import_module("ctranslate2")
    converted = folder.parent / "ctranslate2"
    if not converted.exists():
        importlib.import_module("ctranslate2.converters").TransformersConverter(str(folder)).convert(str(converted))
    generator = ctranslate2.Generator(str(converted), compute_type="float32", intra_threads=threads)

    def write(prompts: list[list[int]], tokens: int) -> Moments:
        start = time.monotonic()
        moments: Moments = [[] for _ in prompts]

        def tell(result: Any) -> bool:
            moments[result.batch_id].append(time.monotonic() - start)
            return False

        words = [[VOCABULARY.format(each) for each in prompt] for prompt in prompts]
        generator.generate_batch(
            words, max_length=tokens, min_length=tokens, include_prompt_in_result=False, callback=tell, beam_size=1
        )
        return moments

    return write


# ctranslate2 takes tokens by their text.
VOCABULARY = "t{}"

OPEN: dict[str, Callable[[Path, int], Write]] = {
    BARE: open_openvino,
    ALONE: lambda folder, threads: open_transformers(folder, threads, is_batch=False),
    BATCH: lambda folder, threads: open_transformers(folder, threads, is_batch=True),
    CT2: open_ctranslate2,
}


def work(engine: str, folder: Path, threads: int) -> None:
    """Be the process of an engine: one line of JSON with prompts in, one with moments out."""
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    write = OPEN[engine](folder, threads)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(write(asked["prompts"], asked["tokens"])), file=answers, flush=True)


class Worker:
    """An engine in a process of its own."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        command = [sys.executable, "-m", "benches.bench_generate", "--worker", engine, str(folder), str(threads)]
        paths = [str(CTRANSLATE2)] * (engine == CT2) + os.environ.get("PYTHONPATH", "").split(":")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": ":".join(paths)},
        )
        self._read()

    def write(self, prompts: list[list[int]], tokens: int) -> Moments:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        moments: Moments = self._read()
        return moments

    def find_pids(self) -> list[int]:
        return [self.process.pid]

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Served:
    """The same model behind a server."""

    def __init__(self, repository: Path) -> None:
        from launcher import Running

        self.server = Running(repository)
        self.server.read_until("serving")
        self.server.follow()

    def write(self, prompts: list[list[int]], tokens: int) -> Moments:
        import tritonclient.grpc as grpc

        moments: Moments = [[] for _ in prompts]
        # A caller who streams has a connection already.
        clients = [grpc.InferenceServerClient(f"127.0.0.1:{self.server.grpc}") for _ in prompts]
        for client in clients:
            client.is_server_live()
        start = time.monotonic()
        threads = [
            threading.Thread(target=self._listen, args=(client, prompt, tokens, start, known))
            for client, prompt, known in zip(clients, prompts, moments, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
        return moments

    def measure_late(self, number: int, tokens: int) -> tuple[float, float]:
        """Return the seconds to a request's first token: of an idle server, and while it writes others."""
        prompts = make_prompts(LATE, 100 + number)

        random = np.random.default_rng(number)

        def measure_first() -> float:
            firsts = []
            for prompt in prompts:
                # One right after another, each would come as a step begins, and wait for the whole of it.
                time.sleep(random.uniform(*PAUSE_S))
                firsts.append(self.write([prompt], 2)[0][0])
            return float(np.median(firsts))

        alone = measure_first()
        others = threading.Thread(target=self.write, args=(make_prompts(OTHERS, number), tokens))
        others.start()
        # Until all of them have begun.
        time.sleep(1)
        late = measure_first()
        if not others.is_alive():
            raise RuntimeError("the others were written before the late ones: expected more --tokens")
        others.join()
        return alone, late

    def _listen(self, client: Any, prompt: list[int], tokens: int, start: float, known: list[float]) -> None:
        import tritonclient.grpc as grpc

        values = {
            "text_input": np.array(["".join(VOCABULARY.format(each) + " " for each in prompt).encode()], dtype=object),
            "stream": np.array([True]),
            "sampling_parameters": np.array([json.dumps({"max_tokens": tokens, "ignore_eos": True}).encode()], object),
            "return_finish_reason": np.array([True]),
            "return_num_output_tokens": np.array([True]),
        }
        inputs = []
        for name, value in values.items():
            inputs.append(grpc.InferInput(name, [1], "BOOL" if value.dtype == bool else "BYTES"))
            inputs[-1].set_data_from_numpy(value)
        heard: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: heard.put((result, error)))
        client.async_stream_infer(NAME, inputs)
        while True:
            result, error = heard.get(timeout=300)
            if error is not None:
                raise RuntimeError(str(error))
            known += [time.monotonic() - start] * int(result.as_numpy("num_output_tokens")[0])
            if result.as_numpy("finish_reason")[0] != b"None":
                return

    def find_pids(self) -> list[int]:
        return [stub.pid for stub in self.server.find_stubs(NAME)]

    def close(self) -> None:
        self.server.process.terminate()
        self.server.process.wait(timeout=60)


def save_model(folder: Path, *, is_quick: bool) -> None:
    """Save a GPT-2 of random weights, whose tokenizer has a word for each token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4} if is_quick else {"n_embd": 768, "n_layer": 12, "n_head": 12}
    words = 8000 if is_quick else 50257
    config = GPT2Config(vocab_size=words, bos_token_id=0, eos_token_id=0, initializer_range=0.1, **sizes)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({VOCABULARY.format(i): i for i in range(words)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "t0", "bos_token": "t0", "unk_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of 24 to 40 tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(1, 8000, random.integers(24, 41)).tolist() for _ in range(count)]


def install_ctranslate2() -> str:
    """Return why it cannot be compared with; empty where it can."""
    if not CTRANSLATE2.is_dir():
        command = ["pip", "install", "-qq", "--no-deps", "--only-binary", ":all:", "--target", str(CTRANSLATE2)]
        done = run("-m", *command, "ctranslate2==4.8.5")
        if done.code:
            return (done.err.strip().splitlines() or ["pip failed"])[-1]
    return ""


def read_peak_bytes(pids: Sequence[int]) -> int:
    """Return the most memory that these processes have held."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def open_engines(folder: Path, threads: int) -> dict[str, Worker | Served]:
    """Return every engine that there is, ready."""
    version = folder / "models" / NAME / "1"
    engines: dict[str, Worker | Served] = {SERVED: Served(folder / "models"), BARE: Worker(BARE, version, threads)}
    engines |= {name: Worker(name, folder / "checkpoint", threads) for name in (ALONE, BATCH)}
    reason = install_ctranslate2()
    try:
        engines |= {} if reason else {CT2: Worker(CT2, folder / "checkpoint", threads)}
    except RuntimeError as exc:
        reason = str(exc)
    if reason:
        say(f"without {CT2}: {reason}")
    return engines


def compare(engines: dict[str, Worker | Served], rounds: int, tokens: int) -> dict[tuple[str, int], list[Measured]]:
    """Ask every engine in every round, each round beginning with another one."""
    found: dict[tuple[str, int], list[Measured]] = {}
    names = list(engines)
    for name in names:
        engines[name].write(make_prompts(max(STREAMS), 99), 4)
    for number in range(rounds):
        for streams in STREAMS:
            for name in names[number % len(names) :] + names[: number % len(names)]:
                # One prompt alone is not another thing in a batch.
                if (name, streams) == (BATCH, 1):
                    continue
                moments = engines[name].write(make_prompts(streams, number), tokens)
                found.setdefault((name, streams), []).append(measure(moments))
    return found


def compare_late(served: Worker | Served, rounds: int, tokens: int) -> list[tuple[float, float]]:
    """Return the seconds to a first token, idle and beside others, of each round."""
    assert isinstance(served, Served)
    return [served.measure_late(number, tokens) for number in range(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="written after each prompt")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens: to see that it works")
    parser.add_argument("--json", action="store_true", help="every single measurement")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        engine, place, threads = options.worker
        work(engine, Path(place), int(threads))
        return 0
    tokens = 16 if options.quick else options.tokens
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as name:
        folder = Path(name)
        save_model(folder / "checkpoint", is_quick=options.quick)
        done = run("-m", "export", "run", str(folder / "checkpoint"), "--name", NAME, "--repository",
                   str(folder / "models"))  # fmt: skip
        if done.code:
            raise SystemExit(done.err)
        engines = open_engines(folder, os.cpu_count() or 1)
        try:
            found = compare(engines, options.rounds, tokens)
            late = compare_late(engines[SERVED], options.rounds, 1000 if options.quick else 4 * tokens)
            peaks = {name: read_peak_bytes(engine.find_pids()) for name, engine in engines.items()}
        finally:
            for engine in engines.values():
                engine.close()
    if options.json:
        runs = [{"engine": n, "streams": s, **asdict(each)} for (n, s), all_ in found.items() for each in all_]
        say(json.dumps({"runs": runs, "late": late, "peak_bytes": peaks}, indent=2))
        return 0
    show(found, peaks, late)
    return 0


def show(
    found: dict[tuple[str, int], list[Measured]], peaks: dict[str, int], late: Sequence[tuple[float, float]]
) -> None:
    """Tell medians over rounds, and ratios within them."""
    say(f"{'':22} streams   tok/s   first ms   between ms (p99)   peak MB")
    for (name, streams), runs in sorted(found.items(), key=lambda item: item[0][1]):
        speed, first, between, between_p99 = np.median([list(asdict(each).values()) for each in runs], axis=0)
        say(
            f"{name:22} {streams:7} {speed:7.1f} {1e3 * first:10.0f} {1e3 * between:9.1f} ({1e3 * between_p99:6.1f}) "
            f"{peaks[name] / 1e6:9.0f}"
        )
    for above, below, many, few, hoped in RATIOS:
        if (below, few) in found:
            pairs = zip(found[above, many], found[below, few], strict=True)
            ratios = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
            say(
                f"{above} at {many} / {below} at {few}: {np.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}; hoped for {hoped:g})"
            )

    ratios = [beside / alone for alone, beside in late]
    alone, beside = np.median(late, axis=0)
    say(
        f"first token of a late request: {1e3 * beside:.0f} ms while {OTHERS} others are written, {1e3 * alone:.0f} ms "
        f"idle: {np.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}; hoped for {LATE_HOPED:g})"
    )


if __name__ == "__main__":
    sys.exit(main())
