"""The page on this machine alone, with a box that computes any recipe while one waits.

No other machine is to reach it: it listens on 127.0.0.1, answers to that name alone (a page
elsewhere could point a name of its own here), and takes nothing but JSON, which other pages may not
send. Other users of the same machine can reach it, and see no more than the page shows.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final

from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.text import NONE, parse
from featcal.page.content import Content, Entry, check_train, clipped, sweep
from featcal.page.html import comparison_table, recipe_cells, rows_html
from featcal.page.verdict import Certainty, idle
from featcal.page.wording import say
from featcal.report.compare import compare


@final
class Live:
    """One more recipe for a page that is open: what `featcal explore` answers.

    It remembers what was tried: the best of a column is judged among all recipes a reader sees, and
    what was fitted once is not fitted again.
    """

    def __init__(self, content: Content) -> None:
        self.content = content
        self.known = {row.recipe: row for row in content.comparison}

    def answer(self, recipe: str, beside: Sequence[str] = ()) -> dict[str, Any]:
        """Fits a recipe as the page's own were fitted, and gives all that the page shows of it.

        Args:
            recipe: its text.
            beside: the recipes the page shows already; its own ones go without saying.

        Returns:
            `entry`, as in the page's JSON; `rows`, an HTML row for each table by its name;
            `judged`, the rows of the comparison by their recipes, since a star may have moved;
            `sweep`, or None; `words`, sentences for the reader.

        Raises:
            InputError: for text that is no recipe, or one that this pack cannot serve.
        """
        name = repr(self.checked(recipe))
        scene, own = self.content.scene, self.content.comparison
        with scene.calmly():
            if name not in self.known:
                asked = {key: own.settings[key] for key in ("mode", "bins", "resamples", "seed")}
                found = compare(scene.fit, scene.samples, [name], scene.head, **asked)
                self.known[name] = found[0]
            row = self.known[name]
            entry, (clip, why) = Entry.of(scene, row), clipped(row.calibrator)
            swept = [one for one in self.content.sweeps if one.recipe == name]
            if clip is not None and not swept:
                swept = list(sweep(scene, {name: clip}))
        # The page's own rows, those tried before that it shows, and this one; each once.
        tried = [self.known[one] for one in beside if one in self.known]
        rows_shown = tuple({one.recipe: one for one in (*own, *tried, row)}.values())
        shown = replace(own, rows=rows_shown, against=(None, *(0 for _ in rows_shown[1:])))
        table = comparison_table(shown, self.content.summary.seen)  # its own rows first
        judged = {row.recipe: cells for row, cells in zip(shown, table.rows, strict=True)}
        rows = {"comparison": judged.pop(name), **recipe_cells(entry)}
        place = [one.recipe for one in shown].index(name)
        differences = shown.as_json()["rows"][place]["differences"]
        growths = {known.recipe: known.entropy for known in self.content.entries}
        certainty = Certainty(name, entry.entropy, growths)
        told = [
            *(say("idle", one) for one in idle([row])),
            "" if why is None else say("no_sweep", why),
            " ".join(say(part, certainty) for part in ("certainty", "certainty_numbers")).rstrip(),
            say("changed", entry.changed),
        ]
        return {
            "entry": {**entry.as_json(), "differences": differences},
            "rows": rows_html(rows),
            "judged": rows_html(judged),
            "sweep": swept[0].as_json() if swept else None,
            "words": list(filter(None, told)),
        }

    def checked(self, recipe: str) -> Calibrator:
        """A fresh calibrator of the recipe, which computes nothing.

        Raises:
            InputError: see `answer`.
        """
        if recipe.strip() == NONE:
            raise InputError(
                "none is the model as it is, which the page shows already: give a recipe"
            )
        calibrator = parse(recipe)
        check_train(calibrator)
        if calibrator.needs_features and not self.content.scene.has_features:
            raise InputError(f"{calibrator!r} works on features, and this pack holds logits alone")
        return calibrator


HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
LONGEST = 2**16  # bytes of a request: some dozens of recipes
GLANCE = 0.2  # seconds between two looks whether anybody still waits
JSON_TYPE = "application/json"
ASKED = 'give {"recipe": "clip | temperature", "beside": ["none"]}, all of it text'


@final
class Explorer(ThreadingHTTPServer):
    """Serves one page, and computes one recipe at a time.

    Attributes:
        page: the HTML.
        live: what answers with the numbers of a recipe, and refuses a bad one at once.
    """

    daemon_threads = True  # a computation does not outlive Ctrl-C
    request_queue_size = 1024  # connections that may wait to be taken

    def __init__(self, page: str, live: Live, port: int = 0) -> None:
        self.page, self.live = page.encode(), live
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

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Says nothing of a connection that broke; anything else has its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def answer(
        self, recipe: str, beside: Sequence[str], left: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """What `Live` answers when it is this recipe's turn; None once nobody waits for it.

        Args:
            recipe: its text.
            beside: as `Live.answer` takes them.
            left: whether whoever asked has gone: a fit under way is ended then.
        """
        found: Future[dict[str, Any] | None] = Future()

        def work() -> None:
            try:
                found.set_result(self.live.answer(recipe, beside))
            except Left:
                found.set_result(None)
            except Exception as error:
                found.set_exception(error)

        while not self.one_at_a_time.acquire(timeout=GLANCE):
            if left():
                return None
        try:
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            while thread.is_alive():
                thread.join(GLANCE)
                if thread.is_alive() and left():
                    end(thread)  # once: a second would cut off what cleans up after the first
                    thread.join()
        finally:
            self.one_at_a_time.release()
        return found.result() if found.done() else None


class Left(BaseException):
    """Raised in a computation that nobody waits for; no `except Exception` stops it."""


def end(thread: threading.Thread) -> None:
    """Raises `Left` in a thread, between two steps of Python: no fit has to ask for it."""
    assert thread.ident is not None
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(Left))


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
            self.server.live.checked(asked[0])
            found = self.server.answer(*asked, self._left)
            body = json.dumps(found, allow_nan=False).encode()
        except InputError as error:
            # A person may mistype: for the browser that is an answer like any other, where a
            # status of 400 would stand in its console as an error of the page.
            body = json.dumps({"error": str(error)}).encode()
        except Exception as error:  # the page waits for an answer, whatever went wrong
            why = f"this recipe failed ({type(error).__name__}: {error}): try another"
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, why)
            return
        self._send(HTTPStatus.OK, body, JSON_TYPE)

    def _left(self) -> bool:
        """Whether whoever asked has closed the connection."""
        self.connection.settimeout(0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(self.timeout)

    def _asked(self) -> tuple[str, list[str]]:
        length = self.headers.get("Content-Length", "")
        known = length.isascii() and length.isdigit() and len(length) <= len(str(LONGEST))
        if not known or int(length) > LONGEST:
            raise InputError(f"a request has at most {LONGEST} bytes: shorten the recipe")
        try:
            asked = json.loads(self.rfile.read(int(length)))
            recipe, beside = asked["recipe"], list(asked.get("beside", ()))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(ASKED) from error
        if not all(isinstance(name, str) for name in (recipe, *beside)):
            raise InputError(ASKED)
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
        with suppress(ConnectionError):  # the page was closed meanwhile
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the terminal is for the address and for errors."""
