"""An S3 and a Google Cloud Storage of this machine, which hold one folder until they are told to stop.

.cache/stores/bin/python tests/export/stores.py FOLDER

Both have it in the bucket `models` as `teams/tiny`, with the empty object that their pages write for a folder, beside
`teams/tiny-2`, whose name begins alike. Prints their addresses as JSON; ends when its standard input does.
"""

import json
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from gcp_storage_emulator.server import create_server
from moto.server import ThreadedMotoServer

BUCKET = "models"


def main(folder: Path) -> None:
    amazon = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    amazon.start()
    s3 = "http://{}:{}".format(*amazon.get_host_and_port())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    google = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    google.start()
    gs = f"http://127.0.0.1:{port}"
    try:
        send("PUT", f"{s3}/{BUCKET}", b"")
        for name, content in list_objects(folder):
            send("PUT", f"{s3}/{BUCKET}/{urllib.parse.quote(name)}", content)
            place = f"{gs}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={urllib.parse.quote(name, safe='')}"
            # This one cannot be sent nothing.
            send("POST", place, content or b" ")
        sys.stdout.write(json.dumps({"s3": s3, "gs": gs}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        amazon.stop()
        google.stop()


def list_objects(folder: Path) -> Iterator[tuple[str, bytes]]:
    yield "teams/tiny/", b""
    yield "teams/tiny/1_Pooling/", b""
    yield "teams/tiny-2/config.json", b"of another model"
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield f"teams/tiny/{path.relative_to(folder)}", path.read_bytes()


def send(method: str, url: str, content: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    with urllib.request.urlopen(urllib.request.Request(url, content, headers, method=method)):
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
