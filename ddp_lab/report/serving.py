"""Serves the report over HTTP: one page, to be read only."""

from __future__ import annotations

import errno
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddp_core.base.beneath import open_file
from ddp_core.base.errors import ExitCode, UserError
from ddp_lab.options import end_as_by_interrupt


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD with the page, which is read anew each time, and any other address with 404."""

    server: ThreadingHTTPServer
    server_version = "ddp-report"
    sys_version = ""

    def __init__(self, page: Path, *words: Any) -> None:
        self._page = page
        super().__init__(*words)

    def do_GET(self) -> None:
        """Send the page."""
        if not self._is_asked_for():
            return
        try:
            with open_file(self._page) as file:
                content = file.read()
        except OSError:
            self.send_error(404)
            return
        self.send_response(200)
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(content))}
        headers |= {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def _is_asked_for(self) -> bool:
        """Refuse a request for another name than ours: a page elsewhere could let its own name lead here."""
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            host = ""
        if host not in (getattr(self.server, "server_name", ""), "localhost") and not _is_address(host):
            self.send_error(421, "this report is served under another name")
        elif self.path.partition("?")[0] not in ("/", "/index.html"):
            self.send_error(404)
        else:
            return True
        return False

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


def make_server(page: Path, place: tuple[str, int]) -> ThreadingHTTPServer:
    """Return a server that listens but does not answer yet. Raises UserError (4) where it cannot listen."""
    try:
        return ThreadingHTTPServer(place, partial(_Handler, page))
    except OSError as error:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise UserError(
            f"cannot serve on {place[0]}:{place[1]}: {reason}; choose another with --serve HOST:PORT",
            ExitCode.RESOURCES,
        ) from None


def serve(page: Path, place: tuple[str, int]) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises as `make_server` does."""
    with make_server(page, place) as server:
        end_as_by_interrupt()
        print(f"report: serving {page} on http://{place[0]}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("report: no longer serving", flush=True)
