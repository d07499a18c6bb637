"""One stream of an engine, without a server.

    python -m benches.serving.offline VERSION_FOLDER < PLAN

Opens what lies in the folder as the lean step does, takes a JSON object as one line (`tokenizer`, `texts`, `first`,
`seconds`), says `ready`, and begins with the next line. What comes back is how long each text of that time took, alone
and unpadded, and the CPU time of all.
"""

import json
import sys
import threading
import time
from pathlib import Path

# The graph's output, as the task of the demo's checkpoint names it.
_OUTPUT = ["sentence_embedding"]

BACKENDS = Path(__file__).resolve().parents[3] / "backends"

for folder in ("python_preprocess", "python_openvino", "python_lean"):
    sys.path.append(str(BACKENDS / folder))

from engines import ENGINES  # noqa: E402
from tokenization import TextTokenizer  # noqa: E402


def main() -> None:
    folder = Path(sys.argv[1])
    file = next(name for name in reversed(ENGINES) if (folder / name).is_file())
    run, _ = ENGINES[file](folder / file, 1)
    plan = json.loads(sys.stdin.readline())
    tokenizer = TextTokenizer(Path(plan["tokenizer"]), ["input_ids", "attention_mask", "token_type_ids"])
    feeds = [tokenizer.stack([row]) for row in tokenizer.encode([(text,) for text in plan["texts"]])]
    # What an engine still compiles in the background, and what it compiles for a length that it meets, is done by then.
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
    for feed in feeds:
        run(_OUTPUT, feed)
    print("ready", flush=True)  # noqa: T201
    sys.stdin.readline()
    count, latencies = 0, []
    start, cpu = time.monotonic(), time.process_time()
    while (begun := time.monotonic()) < start + plan["seconds"]:
        run(_OUTPUT, feeds[(count + plan["first"]) % len(feeds)])
        latencies.append(round(1000 * (time.monotonic() - begun), 3))
        count += 1
    taken = {"seconds": time.monotonic() - start, "cpu_s": time.process_time() - cpu, "latencies_ms": latencies}
    print(json.dumps(taken))  # noqa: T201


if __name__ == "__main__":
    main()
