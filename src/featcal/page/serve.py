"""The page on this machine alone, with a box that computes any recipe while one waits.

No other machine is to reach it: it listens on 127.0.0.1, answers to that name alone (a page
elsewhere could point a name of its own here), and takes nothing but JSON, which other pages may not
send. Other users of the same machine can reach it, and see no more than the page shows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final

from featcal.core.errors import InputError

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
LONGEST = 2**16  # bytes of a request: some dozens of recipes
JSON_TYPE = "application/json"

# The text of a recipe and those it stands beside -> what the page shows of it.
Compute = Callable[[str, Sequence[str]], dict[str, Any]]
Check = Callable[[str], object]  # refuses text that nothing can be computed for


def anything(recipe: str) -> None:
    """Leaves every refusal to what computes."""


@final
class Explorer(ThreadingHTTPServer):
    """Serves one page, and computes one recipe at a time.

    Attributes:
        page: the HTML.
        compute: what makes the numbers of a recipe.
        check: what refuses a recipe at once, whatever is being computed.
    """

    daemon_threads = True  # a computation does not outlive Ctrl-C

    def __init__(
        self, page: str, compute: Compute, port: int = 0, *, check: Check = anything
    ) -> None:
        self.page, self.compute, self.check = page.encode(), compute, check
        self.one_at_a_time = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise InputError(
                f"port {port} cannot be opened ({error.strerror}): choose another with --port, or "
                "leave it out for a free one"
            ) from error

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Explorer
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds for what is half sent; computing is not waited for so

    def do_GET(self) -> None:
        if not self._is_ours():
            self._refuse(HTTPStatus.FORBIDDEN, "this page answers to 127.0.0.1 alone")
        elif self.path in ("/", "/index.html"):
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path[:80]}: see /")

    def do_POST(self) -> None:
        if not self._is_ours() or self.headers.get_content_type() != JSON_TYPE:
            self._refuse(HTTPStatus.FORBIDDEN, "recipes are taken as JSON from this page alone")
        elif self.path != "/recipe":
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path[:80]}: see /")
        else:
            self._answer()

    def _answer(self) -> None:
        try:
            asked = self._asked()
        except InputError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        try:
            self.server.check(asked[0])
            with self.server.one_at_a_time:
                found = self.server.compute(*asked)
        except InputError as error:
            # A person may mistype: for the browser that is an answer like any other, where a
            # status of 400 would stand in its console as an error of the page.
            found = {"error": str(error)}
        except Exception as error:  # the page waits for an answer, whatever went wrong
            why = f"this recipe failed ({type(error).__name__}: {error}): try another"
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, why)
            return
        body = json.dumps(found, allow_nan=False).encode()
        self._send(HTTPStatus.OK, body, JSON_TYPE)

    def _asked(self) -> tuple[str, list[str]]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > LONGEST:
            raise InputError(f"a request has at most {LONGEST} bytes: shorten the recipe")
        try:
            asked = json.loads(self.rfile.read(int(length)))
            recipe, beside = asked["recipe"], asked.get("beside", [])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError('give {"recipe": "clip | temperature"}') from error
        if not isinstance(recipe, str):
            raise InputError(f"recipe is {recipe!r}: give text, as in 'clip | temperature'")
        if not isinstance(beside, list) or not all(isinstance(name, str) for name in beside):
            raise InputError("beside is no list of texts: give the recipes the page shows already")
        return recipe, beside

    def _is_ours(self) -> bool:
        """Whether the request was made by our own page, or by hand."""
        host = (self.headers.get("Host") or "").partition(":")[0]
        origin = self.headers.get("Origin")
        return host in NAMES and (origin is None or origin == f"http://{self.headers['Host']}")

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self.close_connection = True  # what was not read is not a next request
        self._send(status, json.dumps({"error": sentence}).encode(), JSON_TYPE)

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        with suppress(ConnectionError):  # the page was closed meanwhile
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the terminal is for the address and for errors."""
