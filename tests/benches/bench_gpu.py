"""What ONNX Runtime makes of published graphs on a GPU: how far off, and how many texts a second: `make bench-gpu`.

    python -m benches.bench_gpu REPOSITORY NAME [NAME ...] [--texts 512] [--cpu]

NAME is a sentence embedding that `run` published, with whichever `--precision` and `--batching`. Each is asked for 512
texts of 3 to 60 words, 32 at a time as those of mixed lengths come in: one after another, padded to the longest, or
joined where the graph takes rows of any lengths. Errors are those to the first NAME on
the CPU, each text alone. Wants onnxruntime-gpu in onnxruntime's place; `--cpu` shows that it works where there is none.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
from benches.gpu_sessions import NoGPUError, Rows, ask_joined, ask_padded, find_version, load, load_on_gpu
from tokenizers import Tokenizer

from export.tasks.texts.text import read_verification_texts

TOGETHER, WINDOWS = 32, 7

Ask = Callable[[onnxruntime.InferenceSession, Rows], np.ndarray]


def make_texts(count: int) -> list[str]:
    """Return so many texts of 3 to 60 words, cut out of real ones; the same every time."""
    draw = random.Random(0)
    words = " ".join(read_verification_texts()).split()
    starts = [(draw.randint(3, 60), draw.randrange(len(words) - 60)) for _ in range(count)]
    return [" ".join(words[start : start + length]) for length, start in starts]


PADDED: Sequence[tuple[str, Ask, int]] = (("padded", ask_padded, TOGETHER), ("alone", ask_padded, 1))
JOINED: Sequence[tuple[str, Ask, int]] = (("joined", ask_joined, TOGETHER),)


def ask_all(session: onnxruntime.InferenceSession, rows: Rows, ask: Ask, together: int) -> np.ndarray:
    """Return the vectors of all rows, so many in one run."""
    return np.concatenate([ask(session, rows[start : start + together]) for start in range(0, len(rows), together)])


def measure(run: Callable[[], np.ndarray], texts: int) -> str:
    """Return texts a second: the median of the windows, the least and the most."""
    speeds = []
    for _ in range(WINDOWS):
        begun = time.perf_counter()
        run()
        speeds.append(texts / (time.perf_counter() - begun))
    return f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("repository", type=Path, help="where they are published")
    parser.add_argument("names", nargs="+", metavar="NAME", help="what to measure; the first is in fp32")
    parser.add_argument("--texts", type=int, default=512, help="how many (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, to see that it works")
    options = parser.parse_args()
    folder = find_version(options.repository, f"{options.names[0]}_preprocess")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    rows = [np.array(encoding.ids, np.int64) for encoding in tokenizer.encode_batch(make_texts(options.texts))]
    cpu = ["CPUExecutionProvider"]
    truth = ask_all(load(options.repository, options.names[0], cpu), rows, ask_padded, 1)
    sys.stdout.write("| | run | furthest off | least cosine | texts/s |\n|---|---|---|---|---|\n")
    for name in options.names:
        for tf32 in ("0",) if options.cpu else ("0", "1"):
            try:
                load_it = partial(load, providers=cpu) if options.cpu else partial(load_on_gpu, tf32=tf32)
                session = load_it(options.repository, name)
            except NoGPUError as exc:
                parser.exit(1, f"error: {exc}, or pass --cpu.\n")
            joins = any(item.name == "row_shapes" for item in session.get_inputs())
            for way, ask, together in JOINED if joins else PADDED:
                run = partial(ask_all, session, rows, ask, together)
                vectors = run()
                cosines = (vectors * truth).sum(1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(truth, axis=1)
                label = f"{name}, TF32" if tf32 == "1" else name
                cells = (
                    label,
                    way,
                    f"{np.abs(vectors - truth).max():.1e}",
                    f"{cosines.min():.7f}",
                    measure(run, len(rows)),
                )
                sys.stdout.write(f"| {' | '.join(cells)} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
