"""What ONNX Runtime holds of a GPU, by published graph: `make memory-gpu`.

    python -m benches.measure_gpu_memory REPOSITORY NAME [NAME ...] [--rows 8] [--tokens 512]

NAME is a sentence embedding that `run` published, with whichever `--precision` and `--batching`. Each has a process of
its own: what the GPU holds more than before once the session is ready, after a text of 8 tokens, and after so many rows
of so many tokens at once; and what the process holds of the machine's memory then. All in MB. Nothing else may run on
the GPU. Wants onnxruntime-gpu in onnxruntime's place.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from benches.gpu_sessions import NoGPUError, ask_joined, ask_padded, find_version, load_on_gpu

_QUERY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]


def read_used() -> int:
    """Return what the first GPU holds, in bytes.

    Raises:
        NoGPUError: There is none.
    """
    if not shutil.which("nvidia-smi"):
        raise NoGPUError("there is no nvidia-smi, and so no GPU; run it where one is")
    return int(subprocess.run(_QUERY, stdout=subprocess.PIPE, text=True, check=True).stdout) << 20


def read_resident() -> int:
    """Return what this process holds of the machine's memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_weights(path: Path) -> int:
    """Return the bytes of a graph's weights."""
    graph = onnx.load(path, load_external_data=False).graph
    widths = {tensor.name: onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type) for tensor in graph.initializer}
    return sum(int(np.prod(tensor.dims)) * widths[tensor.name].itemsize for tensor in graph.initializer)


def measure(repository: Path, name: str, rows: int, tokens: int) -> str:
    """Return a line of the table."""
    before = read_used()
    session = load_on_gpu(repository, name)
    ask = ask_joined if any(item.name == "row_shapes" for item in session.get_inputs()) else ask_padded
    held = [read_used() - before]
    for count, length in ((1, 8), (rows, tokens)):
        for _ in range(3):
            ask(session, [np.full(length, 1000, np.int64)] * count)
        held.append(read_used() - before)
    weights = count_weights(find_version(repository, f"{name}_model") / "model.onnx")
    figures = [f"{figure / 1e6:,.0f}" for figure in (weights, *held, read_resident())]
    return f"| {name} | {' | '.join(figures)} |"


def main() -> None:
    """Print a table, of which each line is measured by a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("repository", type=Path, help="where they are published")
    parser.add_argument("names", nargs="+", metavar="NAME", help="what to measure")
    parser.add_argument("--rows", type=int, default=8, help="of the largest batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each of its rows (default: %(default)s)")
    options = parser.parse_args()
    heads = (
        "",
        "weights",
        "on the GPU, ready",
        "after 8 tokens",
        f"after {options.rows} x {options.tokens}",
        "resident",
    )
    sys.stdout.write(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n")
    sys.stdout.flush()
    for name in options.names:
        # A new one each: what a session has taken, its process keeps.
        with multiprocessing.get_context("spawn").Pool(1) as process:
            try:
                line = process.apply(measure, (options.repository, name, options.rows, options.tokens))
            except NoGPUError as exc:
                parser.exit(1, f"error: {exc}.\n")
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
