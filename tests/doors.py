"""What the gateway's tests and its bench share: toy models of each kind, and a real `python -m gateway`."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import CHECKOUT
from launcher import find_ports
from tokenizers.processors import TemplateProcessing
from trainers.task_checkpoints import build_cross_encoder
from trainers.writers import END, build_writer, train_bpe

from export.__main__ import main

# As Llama's: it writes the first token out, and refuses what it does not know.
CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('who is ' + message.role) }}{% endif %}
{{- message.role }}: {{ message.content | trim }}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""

# Of text-embeddings-inference, router/src/lib.rs.
TEI_ERRORS = ("Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty")


def save_chat_writer(directory: Path) -> Path:
    """Save a decoder whose tokenizer puts a token before each text, as those of chats do."""
    tokenizer = train_bpe()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, 0)]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    build_writer("llama", len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def publish_models(folder: Path, embedder: Path) -> Path:
    """Publish one model of each kind, and return the repository."""
    repository = folder / "models"
    sources = {
        "embedder": embedder,
        "ranker": build_cross_encoder(folder / "ranker", embedder),
        "writer": save_chat_writer(folder / "writer"),
    }
    for name, source in sources.items():
        assert main(["run", str(source), "--name", name, "--repository", str(repository)]) == 0
    return repository


class Gateway:
    """A `python -m gateway` with its output."""

    def __init__(self, server: str, repository: Path, *options: str, under: Sequence[str] = ()) -> None:
        (self.port,) = find_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        command = [*under, sys.executable, "-m", "gateway", "--server", server, "--repository", str(repository)]
        command += ["--port", str(self.port), *options]
        self.process = subprocess.Popen(command, cwd=CHECKOUT, env=os.environ, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def close(self) -> None:
        """Stop it, where it still runs, and read the rest of what it says."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(timeout=30)
        self._reader.join(timeout=30)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_for_line(self, text: str, limit_s: float = 60) -> str:
        """Return the first line with `text`, of all that it has said and will say."""
        deadline = time.monotonic() + limit_s
        while True:
            for line in self.lines:
                if text in line:
                    return line
            assert time.monotonic() < deadline and self.process.poll() is None, (text, self.lines)
            time.sleep(0.02)

    def ask(
        self, path: str, content: Any = None, *, key: str = "", body: bytes | None = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Return status, content and headers of an answer."""
        data = body if body is not None else None if content is None else json.dumps(content).encode()
        said = {"content-type": "application/json", **headers} | ({"authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, data, said)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, got, names = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as exc:
            status, got, names = exc.code, exc.read(), exc.headers
        is_json = names["content-type"] == "application/json"
        return status, json.loads(got) if is_json else got.decode(), {k.lower(): v for k, v in names.items()}

    def refuse(self, path: str, content: Any = None, **options: Any) -> tuple[int, str]:
        """Return status and sentence of a refusal, which has OpenAI's form, or TEI's."""
        status, got, _ = self.ask(path, content, **options)
        if path in ("/embed", "/rerank", "/predict", "/tokenize"):
            assert got.keys() == {"error", "error_type"} and got["error_type"] in TEI_ERRORS, got
            return status, got["error"]
        assert got["error"].keys() == {"message", "type", "param", "code"}, got
        return status, got["error"]["message"]

    def read_metric(self, line: str) -> float:
        """Return the value of a line of /metrics; 0 where there is none."""
        _, text, _ = self.ask("/metrics")
        found = [each.rsplit(" ", 1)[1] for each in text.splitlines() if each.startswith(line)]
        return sum(map(float, found))


@contextlib.contextmanager
def opened(server: str, repository: Path, *options: str, under: Sequence[str] = ()) -> Iterator[Gateway]:
    """Run a gateway, behind the command `under`, for as long as the block takes."""
    gateway = Gateway(server, repository, *options, under=under)
    try:
        gateway.wait_for_line("listening on")
        yield gateway
    finally:
        gateway.close()
