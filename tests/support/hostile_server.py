"""A server on loopback that answers as a test says: never, endlessly, or against the rules of HTTP."""

import contextlib
import re
import threading
from collections.abc import Callable, Mapping

from object_server import LoopbackServer, QuietHandler

BLOCK = bytes(1 << 20)


class HostileServer(LoopbackServer):
    """Answers each request by calling `answer` with its handler.

    Attributes:
        seen: Methods, paths and headers of the requests, in order of arrival.
        waiting: Set once a request is in `stall`.
    """

    def __init__(self, answer: "Callable[[Handler], None]") -> None:
        self.answer = answer
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.waiting = threading.Event()
        super().__init__(Handler)


class Handler(QuietHandler):
    """Answers one request of a connection."""

    server: HostileServer

    def _serve(self) -> None:
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.server.answer(self)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def begin(self, status: int, headers: Mapping[str, object]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def send(self, data: bytes, headers: Mapping[str, object] | None = None, status: int = 200) -> None:
        # Without the mark, a client may send its next request to the connection while that is being closed.
        self.begin(status, {"Content-Length": len(data), "Connection": "close", **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_endlessly(self, *, chunked: bool = False) -> None:
        """Send a body until the client goes away."""
        block = b"%x\r\n%s\r\n" % (len(BLOCK), BLOCK) if chunked else BLOCK
        while not self.server.closing.is_set():
            self.wfile.write(block)

    def stall(self) -> None:
        """Answer nothing until the server closes."""
        self.server.waiting.set()
        self.server.closing.wait()

    def span(self, size: int) -> tuple[int, int]:
        """Return the range of an object of `size` bytes that the request asks for."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, size)
