"""A program that answers in the place of a server: the same words to whatever it is asked, or words without end."""

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, ThreadingTCPServer

_OK = b"HTTP/1.1 200 OK\r\n"

# What begins to be said, and what is then said again and again: in the headers, in the body, or in place of an answer.
DRIPS = (
    (_OK + b"Content-Length: 100000\r\n\r\n{", b" "),
    (_OK + b"\r\n{", b" "),
    (_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    (_OK + b"X", b"a"),
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    (b"HTTP/1.1 500 Internal\r\nContent-Length: 100000\r\n\r\n{", b" "),
)


@contextlib.contextmanager
def answering(*answers: str) -> Iterator[str]:
    """Answer 200 and these words, one after another and the last of them again and again; yield the address."""
    left = list(answers)

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{stranger.server_port}"
        stranger.shutdown()


@contextlib.contextmanager
def dripping(
    beginning: bytes, drop: bytes, for_s: float = 20, last: bytes = b"", *, pause_s: float = 0.02
) -> Iterator[str]:
    """Answer whoever connects with a beginning, and then with drop after drop; yield the address.

    It says its last and hangs up after far longer than anybody should wait: a test of one who waits for it ends.
    """
    ended = threading.Event()

    class Drips(BaseRequestHandler):
        def handle(self) -> None:
            end = time.monotonic() + for_s
            with contextlib.suppress(OSError):
                self.request.recv(1 << 16)
                self.request.sendall(beginning)
                while time.monotonic() < end and not ended.wait(pause_s):
                    self.request.sendall(drop)
                self.request.sendall(last)

    with ThreadingTCPServer(("127.0.0.1", 0), Drips) as listener:
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{listener.server_address[1]}"
        ended.set()
        listener.shutdown()
