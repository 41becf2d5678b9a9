"""The report's folder over HTTP: to be read only, no listings, nothing outside it."""

from __future__ import annotations

import errno
import signal
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

from ddp_core.errors import ExitCode, UserError


class _Handler(SimpleHTTPRequestHandler):
    """GET and HEAD of files that lie inside the folder, links followed; everything else is 404."""

    server_version = "ddp-report"
    sys_version = ""

    def translate_path(self, path: str) -> str:
        """The file asked for, or a path that does not exist where it lies outside or is hidden."""
        root, found = Path(self.directory).resolve(), Path(super().translate_path(path)).resolve()
        hidden = any(part.startswith(".") for part in found.parts[len(root.parts) :])
        return str(found if found.is_relative_to(root) and not hidden else root / ".nothing")

    def list_directory(self, path: object) -> None:
        """No listings."""
        self.send_error(404)

    def end_headers(self) -> None:
        """Always the newest report."""
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *words: object) -> None:
        """Requests are not worth a line."""


def address(words: str) -> tuple[str, int]:
    """HOST:PORT taken apart. Raises UserError (2)."""
    host, _, port = words.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--serve {words}: expected HOST:PORT, for example --serve 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def make_server(folder: Path, place: tuple[str, int]) -> ThreadingHTTPServer:
    """A server that listens, not yet serving. Raises UserError (4) where it cannot listen."""
    try:
        return ThreadingHTTPServer(place, partial(_Handler, directory=str(folder)))
    except OSError as error:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise UserError(
            f"cannot serve on {place[0]}:{place[1]}: {reason}; choose another with --serve HOST:PORT",
            ExitCode.RESOURCES,
        ) from None


def serve(folder: Path, place: tuple[str, int]) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises as `make_server` does."""
    with make_server(folder, place) as server:
        signal.signal(signal.SIGTERM, _as_interrupt)
        print(f"report: serving {folder} on http://{place[0]}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("report: no longer serving", flush=True)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
