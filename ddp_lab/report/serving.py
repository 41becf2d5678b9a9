"""Serves the report's folder over HTTP: read-only, without listings, and nothing that lies outside the folder."""

from __future__ import annotations

import errno
import signal
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from ddp_core.base.errors import ExitCode, UserError


class _Handler(SimpleHTTPRequestHandler):
    """GET and HEAD of files inside the folder; links are followed first, so a link that leads outside is a 404, too."""

    server: ThreadingHTTPServer
    server_version = "ddp-report"
    sys_version = ""

    def parse_request(self) -> bool:
        """Refuse a request for another name than ours: a page elsewhere could let its own name lead here."""
        if not super().parse_request():
            return False
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            host = ""
        if host in (getattr(self.server, "server_name", ""), "localhost") or _is_address(host):
            return True
        self.send_error(421, "this report is served under another name")
        return False

    def translate_path(self, path: str) -> str:
        """Return the file asked for; for a file that is hidden or outside the folder, a path where there is nothing."""
        root, found = Path(self.directory).resolve(), Path(super().translate_path(path)).resolve()
        hidden = any(part.startswith(".") for part in found.parts[len(root.parts) :])
        return str(found if found.is_relative_to(root) and not hidden else root / ".nothing")

    def list_directory(self, path: object) -> None:
        """Answer 404: folders are not listed."""
        self.send_error(404)

    def end_headers(self) -> None:
        """Tell browsers to ask again each time, so that they show the newest report."""
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *words: object) -> None:
        """Write nothing: a line per request would bury the report's own lines."""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def address(words: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT. Raises UserError (2) for anything else."""
    host, _, port = words.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--serve {words}: expected HOST:PORT, for example --serve 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def make_server(folder: Path, place: tuple[str, int]) -> ThreadingHTTPServer:
    """Return a server that listens but does not answer yet. Raises UserError (4) where it cannot listen."""
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
