"""Downloads, from a server of this machine."""

import hashlib
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

import made
import pytest

from featcal import InputError
from featcal.core.progress import listen
from featcal.datasets import load_images
from featcal.datasets.cifar import ARCHIVES


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing among the lines of the tests."""


class Cut(BaseHTTPRequestHandler):
    """Promises more than it sends, as a connection that breaks."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(b"only a part")

    def log_message(self, *_):
        """Nothing among the lines of the tests."""


@pytest.fixture
def serve(monkeypatch):
    """Starts a server with a handler and sets the archive's address to it."""
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(handler, name="cifar10", **changes):
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        url = f"http://127.0.0.1:{server.server_port}/{ARCHIVES[name].file}"
        monkeypatch.setitem(ARCHIVES, name, replace(ARCHIVES[name], url=url, **changes))

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def site(tmp_path):
    """A folder with the archive of a tiny data set, what it holds, and its checksum."""
    written = made.write_binary(tmp_path / "site")
    content = (written.folder / "cifar-10-binary.tar.gz").read_bytes()
    return written, hashlib.md5(content).hexdigest()


def files(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_the_archive_is_downloaded_once(tmp_path, serve, site):
    written, md5 = site
    serve(partial(Quiet, directory=written.folder), md5=md5)
    seen, target = [], tmp_path / "deep" / "data"
    with listen(lambda *told: seen.append(told)):
        found = load_images("cifar10", target, download=True)
    assert made.same(found.train, written.train)
    size = (target / "cifar-10-binary.tar.gz").stat().st_size
    assert seen[-1] == ("downloading cifar-10-binary.tar.gz, bytes", size, size)
    assert files(target) == ["cifar-10-binary.tar.gz"]
    (written.folder / "cifar-10-binary.tar.gz").unlink()
    load_images("cifar10", target, download=True)  # is there: nothing is asked for again


def test_pickles_beside_it_do_not_matter_to_a_download(tmp_path, serve, site):
    written, md5 = site
    serve(partial(Quiet, directory=written.folder), md5=md5)
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
    found = load_images("cifar10", tmp_path / "data", download=True)
    assert made.same(found.test, written.test)


def test_another_checksum_is_refused_and_the_file_removed(tmp_path, serve, site):
    written, md5 = site
    serve(partial(Quiet, directory=written.folder))  # with the md5 of the official archive
    with pytest.raises(InputError, match=f"md5 {md5} in place of c32a1d.*it was removed"):
        load_images("cifar10", tmp_path / "data", download=True)
    assert not (tmp_path / "data").exists()


def test_a_broken_connection_leaves_nothing(tmp_path, serve):
    serve(Cut)
    with pytest.raises(InputError, match="it was removed: download it again"):
        load_images("cifar10", tmp_path, download=True)
    assert files(tmp_path) == []


def test_a_site_without_the_file_is_said(tmp_path, serve, site):
    (tmp_path / "empty").mkdir()
    serve(partial(Quiet, directory=tmp_path / "empty"))
    with pytest.raises(InputError, match=r"cannot be downloaded \(HTTP Error 404"):
        load_images("cifar10", tmp_path / "data", download=True)


def test_a_failed_download_leaves_no_folder_that_it_made(tmp_path, serve):
    serve(Cut)
    (tmp_path / "mine").mkdir()
    for target in ("mine", "mine/new/deep"):
        with pytest.raises(InputError, match="download it again"):
            load_images("cifar10", tmp_path / target, download=True)
    assert files(tmp_path) == ["mine"]


def test_a_folder_that_others_fill_meanwhile_stays(tmp_path, monkeypatch):
    target = tmp_path / "new" / "deep"

    def failing(*_, **__):
        (tmp_path / "new" / "notes.txt").write_text("of another process")
        raise KeyboardInterrupt

    monkeypatch.setattr("featcal.datasets.cifar.urlopen", failing)
    with pytest.raises(KeyboardInterrupt):
        load_images("cifar10", target, download=True)
    assert files(tmp_path) == ["new", "notes.txt"]


def test_without_a_connection_the_way_around_is_said(tmp_path, serve, monkeypatch):
    serve(Quiet)
    url = "http://127.0.0.1:9/cifar-10-binary.tar.gz"  # a port where nobody answers
    monkeypatch.setitem(ARCHIVES, "cifar10", replace(ARCHIVES["cifar10"], url=url))
    with pytest.raises(InputError, match=f"on another machine and put it into {tmp_path}"):
        load_images("cifar10", tmp_path, download=True)
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be made .*: choose another"):
        load_images("cifar10", tmp_path / "file" / "data", download=True)


def test_nothing_is_downloaded_unasked(tmp_path, serve, site):
    written, md5 = site
    serve(partial(Quiet, directory=written.folder), md5=md5)
    with pytest.raises(InputError, match="with download=True"):
        load_images("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "md5"),
    [
        ("cifar10", "c32a1d4ab5d03f1284b67883e8d87530"),
        ("cifar100", "03b5dce01913d631647c71ecec9e9cb8"),
    ],
)
def test_the_official_archives_are_those_of_their_authors(name, md5):
    archive = ARCHIVES[name]
    assert archive.md5 == md5
    assert archive.url == f"https://www.cs.toronto.edu/~kriz/{archive.file}"
