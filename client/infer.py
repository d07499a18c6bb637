"""Ask a running server about texts, pictures or sounds: `python client/infer.py --url localhost:8000 --text "Hello"`.

Runs from any folder as a file, as a module, and as the installed `modelyard infer`.
"""

import importlib
import os
import sys
from pathlib import Path

# gRPC would write its own account of a failure beside our sentence.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if not __package__:
    # Run as a file, it finds its siblings as the package that they are (PEP 366).
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = importlib.import_module("client").__name__

from .command.ending import EXIT_UNANSWERED, answer, begin, end_quietly

if __name__ == "__main__":
    # Loading the rest takes a while, of which nobody wants a traceback.
    begin()

import argparse
import codecs
import json
import re
import time

try:
    from .answers import check_answers
    from .batch.files import answer_file
    from .command.connection import COMMAND_WORDS, Connection
    from .command.parser import Parser
    from .command.prompts import ask_writer
    from .command.sent_files import IMAGES, SOUNDS, ask_files
    from .display import count, decode, to_json, to_table
    from .errors import ClientError, RefusedError, UsageError
    from .model import Model
    from .options import DEFAULT_URLS
    from .synchronous import Client
except ImportError as missing:
    if __name__ != "__main__":
        raise
    sys.exit(
        f"error: {missing.name} is not installed for {sys.executable}; pip install 'tritonclient[http,grpc]' numpy."
    )

# A file goes on while a server restarts, or another one takes its place.
_RETRY_S = 300.0
_PROGRESS_S = 0.5

# RFC 9110, section 5: a token, and visible characters with blanks between.
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):\s*([!-~]+(?: +[!-~]+)*)")

# What the reader types: a command where this was installed, else this file, which may be a copy.
_IS_INSTALLED = __package__ == "modelyard.client"
_COMMAND = "modelyard infer" if _IS_INSTALLED else f"python {sys.argv[0]}"
_SERVE = "modelyard serve" if _IS_INSTALLED else "python -m server"

_EXAMPLES = f"""
examples:
  {_COMMAND} --url localhost:8000 --text "A cat sleeps." "A kitten naps."
  {_COMMAND} --url localhost:8000 --text "Who wrote it?" --pair "It was written by Ada Lovelace."
  {_COMMAND} --url localhost:8001 --protocol grpc --file sentences.txt
  {_COMMAND} --url localhost:8000 --file texts.jsonl --output answers.jsonl
  {_COMMAND} --url localhost:8000 --file reviews.parquet --column body --output vectors.parquet
  {_COMMAND} --model writer --prompt "Once upon a time" --stream
  printf 'one\\ntwo\\n' | {_COMMAND} --file - --json
  {_COMMAND} --model image_classification --image photo.jpg --output annotated.png
  {_COMMAND} --model image_classification --image photos/ 'more/*.png' --json
  {_COMMAND} --model audio_classification --audio speech.wav
  {_COMMAND} --url https://models.example:8443 --header @token.txt --text "Hello"

A token is best kept in a file with a line such as "Authorization: Bearer TOKEN": what stands on a command line can be
read by everyone on this machine.

MODELYARD_URL and MODELYARD_GRPC_URL, where they are set, are used without --url.

With --output each line of --file becomes one line of JSON, and a run that was broken off goes on where it was. In a
file called .jsonl each line is a text in JSON, or an object with "text" and, for pairs, "pair"; one called .parquet has
columns of these names, or of those that --column says, and is answered in lines of JSON or in Parquet.

exit codes: 0 answered, 1 refused or no answer (one sentence on stderr), 2 wrong usage,
{EXIT_UNANSWERED} answered, but the answer cannot be written
"""


def main() -> int:
    """Run the command line and return the exit code."""
    arguments = _build_parser().parse_args()
    try:
        if arguments.image or arguments.audio:
            kind = IMAGES if arguments.image else SOUNDS
            return ask_files(arguments, kind, lambda: _connect(arguments))
        if arguments.prompt is not None:
            return ask_writer(arguments, lambda: _connect(arguments))
        if arguments.stream or arguments.parameters != "{}":
            flag = "--stream" if arguments.stream else "--parameters"
            raise UsageError(f"{flag} has no effect", expected="--prompt", got="texts", remedy="leave it out")
        if arguments.output:
            return _answer_file(arguments)
        _check_texts(arguments)
        return _ask_texts(arguments)
    except ClientError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 1


def _connect(arguments: argparse.Namespace) -> Connection:
    return Connection(
        arguments.url or DEFAULT_URLS[arguments.protocol],
        arguments.protocol,
        arguments.timeout,
        tls=arguments.tls,
        ca=arguments.ca,
        headers=_read_headers(arguments.header),
    )


def _ask_texts(arguments: argparse.Namespace) -> int:
    texts = _collect_texts(arguments)
    # One second text goes with every first one, such as one context with many questions.
    pairs = [_encode(text) for text in arguments.pair] * (len(texts) if len(arguments.pair) == 1 else 1)
    connection = _connect(arguments)
    model = connection.find_model(arguments.model)
    start = time.perf_counter()
    try:
        answers = connection.infer(model, texts, pairs=pairs)
    except RefusedError as exc:
        raise _explain_refusal(exc, model) from exc
    seconds = time.perf_counter() - start
    shown = [decode(text) for text in texts]
    shown_pairs = [decode(text) for text in pairs]
    if arguments.json:
        answer(json.dumps(to_json(model, shown, shown_pairs, answers), ensure_ascii=False))
    else:
        head = f"{model.name}, version {model.version}, at {connection.url} over {connection.protocol}"
        check_answers(model.name, answers)
        answer(f"{head}: {count(len(texts), 'text')} in {seconds * 1000:.1f} ms\n")
        answer("\n".join(to_table(shown, answers)))
    return 0


def _explain_refusal(exc: RefusedError, model: Model) -> ClientError:
    """Return what is wrong where a text was sent in the place of a file, else the error itself."""
    kind = next((kind for kind in (IMAGES, SOUNDS) if model.inputs == (kind.input,)), None)
    if kind is None or not exc.is_content:
        return exc
    return UsageError(
        f"{model.name} takes {kind.noun}s",
        expected=f"--{kind.option} and a file",
        got="a text that is none",
        remedy="pass the file, or choose another model with --model",
    )


def _answer_file(arguments: argparse.Namespace) -> int:
    """Answer a file line by line into another one, and tell how far it is where somebody looks."""
    _check_output(arguments)
    started, shown_at = time.perf_counter(), 0.0
    first = None

    def tell(lines: int) -> None:
        nonlocal first, shown_at
        now = time.perf_counter()
        first = lines if first is None else first
        if sys.stderr.isatty() and now > shown_at + _PROGRESS_S:
            shown_at = now
            speed = (lines - first) / (now - started)
            print(f"\r{lines} lines, {speed:.0f} a second", end="", file=sys.stderr, flush=True)  # noqa: T201

    with Client(
        arguments.url,
        protocol=arguments.protocol,
        timeout_s=arguments.timeout,
        retry_s=_RETRY_S,
        tls=arguments.tls,
        ca=arguments.ca,
        headers=_read_headers(arguments.header),
        words=COMMAND_WORDS,
    ) as client:
        asked = answer_file(
            client,
            Path(arguments.file),
            arguments.output,
            model=arguments.model,
            pair=arguments.pair[0] if arguments.pair else None,
            columns=tuple(arguments.column),
            on_progress=tell,
        )
    if shown_at:
        print(file=sys.stderr)  # noqa: T201
    seconds = time.perf_counter() - started
    answer(
        f"{arguments.output}: {(first or 0) + asked} lines, {asked} asked now in {seconds:.1f} s",
        done=f"{arguments.output} is whole",
    )
    return 0


def _check_texts(arguments: argparse.Namespace) -> None:
    """Refuse what has an effect on rows of a file alone, where texts are asked at once."""
    if arguments.file and Path(arguments.file).suffix in (".jsonl", ".parquet"):
        raise UsageError(
            f"{arguments.file} holds more than texts",
            expected="--output, where rows become lines of JSON or Parquet",
            got="none",
            remedy="pass it, or a file with one text a line",
        )
    if arguments.column:
        raise UsageError("--column has no effect", expected="--file and --output", got="one alone")


def _check_output(arguments: argparse.Namespace) -> None:
    for option, is_given, remedy in (
        ("--output needs --file", arguments.file in (None, "-"), "a file can be taken up again, a stream cannot"),
        ("--output takes no --text", bool(arguments.text), "write the texts into the file"),
        ("--output takes one --pair", len(arguments.pair) > 1, "write pairs into a .jsonl file"),
        ("--output takes no --json", arguments.json, "it always writes JSON, one object a line"),
    ):
        if is_given:
            raise UsageError(option, remedy=remedy)


def _collect_texts(arguments: argparse.Namespace) -> list[bytes]:
    texts = [_encode(text) for text in arguments.text]
    if arguments.file:
        try:
            content = sys.stdin.buffer.read() if arguments.file == "-" else Path(arguments.file).read_bytes()
        except OSError as exc:
            raise ClientError(
                f"{arguments.file} cannot be read",
                expected="a file with one text a line",
                got=f"'{exc.strerror}'",
                remedy="correct --file",
            ) from exc
        # Editors that mark a file as UTF-8 mean no text by it.
        content = content.removeprefix(codecs.BOM_UTF8)
        texts += [line.rstrip(b"\r") for line in content.removesuffix(b"\n").split(b"\n")] if content else []
    # A blank line among others is a text as well: answers stay beside the lines that they belong to.
    if not any(text.strip() for text in texts):
        raise ClientError(
            "there is no text to send",
            expected="--text or lines in --file",
            got="nothing but blanks" if texts else "neither",
            remedy="pass a text with --text, or lines with --file or on standard input",
        )
    return texts


def _read_headers(given: list[str]) -> dict[str, str]:
    """Return the headers that `--header` names, as curl's option of that name takes them.

    Args:
        given: `NAME: VALUE` each, or `@FILE` with such lines.

    Raises:
        ClientError: A file cannot be read or a line is not a header; its text, which may be a token, is not repeated.
    """
    headers = {}
    for text in given:
        lines, where = [text], "--header"
        if text.startswith("@"):
            where = text[1:]
            try:
                lines = Path(where).read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as exc:
                raise ClientError(
                    f"{where} cannot be read",
                    expected="a file with one header a line",
                    got=f"'{exc}'",
                    remedy="correct --header",
                ) from exc
        for line in filter(None, map(str.strip, lines)):
            match = _HEADER.fullmatch(line)
            if match is None:
                raise ClientError(
                    f"{where} holds no header", expected="NAME: VALUE in printable ASCII", got="another text"
                )
            headers[match[1]] = match[2]
    return headers


def _encode(text: str) -> bytes:
    # What is no UTF-8 on the command line goes out as the bytes it came in, and the server says what it thinks of it.
    return text.encode("utf-8", errors="surrogateescape")


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_COMMAND,
        description="Ask a running server about texts, pictures or sounds.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url", help=f"host:port of the server (default: {DEFAULT_URLS['http']}, over gRPC {DEFAULT_URLS['grpc']})"
    )
    parser.add_argument("--protocol", choices=tuple(DEFAULT_URLS), default="http", help="default: %(default)s")
    parser.add_argument("--tls", action="store_true", help="encrypt, as https:// in front of the URL asks for as well")
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="certificates to trust, PEM (default: those that are trusted anyway)"
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="to send with every request, such as a token; @FILE reads headers from a file, one a line",
    )
    parser.add_argument("--model", help="model to ask (default: the one ensemble there is)")
    parser.add_argument("--text", nargs="+", action="extend", default=[], metavar="T", help="one or more texts")
    parser.add_argument(
        "--pair",
        nargs="+",
        action="extend",
        default=[],
        metavar="T",
        help="the second text of each, such as the context of a question; one alone goes with every text",
    )
    parser.add_argument("--prompt", metavar="T", help="a text to go on from, of a model that generates text")
    parser.add_argument("--stream", action="store_true", help="print what is written as it comes")
    parser.add_argument(
        "--parameters",
        default="{}",
        metavar="JSON",
        help='how it is written, such as \'{"max_tokens": 100, "temperature": 0.7}\' (default: as the model has it)',
    )
    parser.add_argument("--file", help="file with one text a line; - reads standard input")
    parser.add_argument(
        "--column",
        nargs="+",
        default=[],
        metavar="NAME",
        help="with --file called .jsonl or .parquet, name of the text, and of the second one (default: text, and pair "
        "where there is one)",
    )
    parser.add_argument(
        "--image",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="encoded pictures: files, folders or patterns; they are sent as they are",
    )
    parser.add_argument(
        "--audio",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="encoded sounds, WAV or FLAC: files, folders or patterns; they are sent as they are",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --file, where the answers go, one JSON object a line, or Parquet; with --image, draw them onto "
        "the one picture",
    )
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all values")
    return parser


if __name__ == "__main__":
    sys.exit(end_quietly(main))
