"""The explorer: what a page is answered about another recipe, and whom its server answers."""

import http.client
import json
import socket
import struct
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from serving import serving

import featcal
from featcal import InputError
from featcal.page import Content
from featcal.page.html import comparison_table
from featcal.page.serve import HOST, LONGEST, Explorer, Live


@pytest.fixture(scope="module")
def live(content):
    return Live(content)


def test_another_recipe_is_answered_as_the_page_has_its_own(live, content):
    found = live.answer("temperature | temperature")
    assert found["entry"]["recipe"] == "temperature | temperature"
    assert found["sweep"] is None
    assert set(found["rows"]) == {"comparison", "counts", "entropy", "changed"}
    assert '<th scope="row"><code>temperature | temperature</code>' in found["rows"]["comparison"]
    assert "changes nothing" in found["words"][0]
    same, own = live.answer("clip"), content.as_json()["recipes"][2]
    assert same["entry"]["metrics"] == own["metrics"]
    assert same["entry"]["differences"] == own["differences"]
    assert same["sweep"]["recipe"] == "clip"
    assert any("never looks at features" in sentence for sentence in same["words"])
    json.dumps(same, allow_nan=False)


def test_what_was_tried_is_not_fitted_again_and_has_its_own_sweep_where_it_may(live, monkeypatch):
    first = live.answer("clip | vector")
    assert first["sweep"] is None
    assert any("threshold explorer has no place for it" in one for one in first["words"])
    answered = live.answer("clip(min_accuracy=0.99) | temperature")["sweep"]
    assert answered["recipe"] == "clip(min_accuracy=0.99) | temperature"
    monkeypatch.setattr("featcal.page.serve.compare", None)
    assert live.answer(" clip |vector ")["rows"] == first["rows"]


def marked(comparison, seen=()):
    rows = comparison_table(comparison, seen).rows
    return {row[0].text: sum(cell.mark == "best" for cell in row) for row in rows}


def test_stars_are_judged_among_all_that_is_shown(pack):
    """As a comparison of the same recipes would have them, whichever were typed in."""
    few = {"resamples": 100}
    found = Content.of(pack, ["vector"], **few)
    live = Live(found)
    live.answer("temperature")
    last = live.answer("clip | temperature", ["none", "temperature", "never seen"])
    rows = {last["entry"]["recipe"]: last["rows"]["comparison"], **last["judged"]}
    recipes = ["none", "vector", "temperature", "clip | temperature"]
    wanted = marked(
        featcal.compare(pack.split("val"), pack.split("test"), recipes, pack.head, **few)
    )
    assert {name: html.count("★ best") for name, html in rows.items()} == wanted
    assert {name: wanted[name] for name in ("none", "vector")} != marked(found.comparison)


def test_a_typed_recipe_does_not_judge_what_saw_the_answers(content):
    cheat = Live(replace(content, summary=replace(content.summary, seen=(1,))))
    judged = cheat.answer("clip")["judged"]
    assert "fitted on these very rows" in judged["temperature"]
    assert "★" not in judged["temperature"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [("nonsense", "nonsense"), ("", "recipe"), ("none", "as it is"), ("density", "trained on")],
)
def test_what_cannot_be_answered_is_said(live, bare, recipe, words):
    with pytest.raises(InputError, match=words):
        live.answer(recipe)
    with pytest.raises(InputError, match="logits alone"):
        Live(bare).answer("clip")


def computed(recipe, beside):
    if recipe == "nonsense":
        raise InputError("recipe 'nonsense': no method is called 'nonsense'")
    return {"recipe": recipe, "beside": beside}


@pytest.fixture(scope="module")
def explorer():
    live = SimpleNamespace(answer=computed, checked=lambda recipe: computed(recipe, []))
    with serving(Explorer("<p>naïve</p>", live)) as server:
        yield server


def asked(explorer, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(*explorer.server_address, timeout=5)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers
    connection.close()
    return found


def posted(explorer, body, path="/recipe", **headers):
    headers = {"Content-Type": "application/json", **headers}
    text = body if isinstance(body, str) else json.dumps(body)
    status, answer, _ = asked(explorer, "POST", path, text, **headers)
    return status, json.loads(answer)


def test_the_page_is_served_to_this_machine_alone_and_not_kept(explorer):
    assert explorer.server_address[0] == HOST
    assert explorer.address == f"http://127.0.0.1:{explorer.server_address[1]}/"
    status, page, headers = asked(explorer, "GET", "/")
    assert (status, page) == (200, "<p>naïve</p>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    for path in ("/etc/passwd", "/../pyproject.toml", "/recipe"):
        assert asked(explorer, "GET", path)[0] == 404
    assert posted(explorer, {"recipe": "clip"}, path="/other")[0] == 404


def test_a_recipe_is_computed_or_refused_with_its_sentence(explorer):
    """As an answer: a browser would log a status of 400 as an error of the page."""
    assert posted(explorer, {"recipe": "clip"}) == (200, {"recipe": "clip", "beside": []})
    body = {"recipe": "clip", "beside": ["none", "vector"]}
    assert posted(explorer, body) == (200, body)
    status, answer = posted(explorer, {"recipe": "nonsense"})
    assert (status, answer["error"]) == (200, "recipe 'nonsense': no method is called 'nonsense'")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((body, "give {") for body in ("{", "[]", '{"recipes": "clip"}', "\xff", "[" * 4000)),
        *(({"recipe": "clip", "beside": one}, "give {") for one in ([3], None)),
        ({"recipe": "x" * LONGEST}, f"at most {LONGEST} bytes"),
    ],
)
def test_what_is_no_request_is_refused(body, words, explorer):
    status, answer = posted(explorer, body)
    assert status == 400
    assert words in answer["error"]


def test_other_names_and_other_pages_are_refused(explorer):
    own = f"127.0.0.1:{explorer.server_address[1]}"
    for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example:1"):
        assert asked(explorer, "GET", "/", Host=host)[0] == 403
        assert posted(explorer, {"recipe": "clip"}, Host=host)[0] == 403
    for host in ("127.0.0.1", own.replace("127.0.0.1", "localhost")):
        assert asked(explorer, "GET", "/", Host=host)[0] == 200
    assert posted(explorer, {"recipe": "clip"}, Origin="http://evil.example")[0] == 403
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert posted(explorer, {"recipe": "clip"}, **form)[0] == 403
    assert posted(explorer, {"recipe": "clip"}, Origin=f"http://{own}")[0] == 200


def test_whatever_goes_wrong_is_answered(explorer, monkeypatch):
    monkeypatch.setattr(explorer.live, "answer", lambda *asked: 1 / 0)
    status, answer = posted(explorer, {"recipe": "clip"})
    assert status == 500
    assert answer["error"].startswith("this recipe failed (ZeroDivisionError")
    with pytest.raises(InputError, match=r"port \d+ cannot be opened .*--port"):
        Explorer("", explorer.live, port=explorer.server_address[1])


def test_one_recipe_is_computed_at_a_time_and_a_bad_one_does_not_wait(explorer, monkeypatch):
    begun, go_on, inside, most = threading.Event(), threading.Event(), [0], [0]

    def slow(*asked):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        begun.set()
        go_on.wait(20)
        inside[0] -= 1
        return {}

    monkeypatch.setattr(explorer.live, "answer", slow)
    threads = [threading.Thread(target=posted, args=(explorer, {"recipe": "clip"})) for _ in "123"]
    for thread in threads:
        thread.start()
    assert begun.wait(5)
    assert "no method" in posted(explorer, {"recipe": "nonsense"})[1]["error"]
    go_on.set()
    for thread in threads:
        thread.join()
    assert most == [1]


def raw(explorer, request):
    """Whatever comes back for these bytes."""
    with socket.create_connection(explorer.server_address, timeout=5) as to:
        to.sendall(request)
        to.shutdown(socket.SHUT_WR)
        answer = b""
        while part := to.recv(2**16):
            answer += part
    return answer


def test_odd_lengths_and_broken_connections_are_no_tracebacks(explorer, capfd):
    head = b"POST /recipe HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    for length in (b"9" * 5000, b"-1", b"1e3", b"", "\u0663".encode()):
        answer = raw(explorer, head + b"Content-Length: " + length + b"\r\n\r\n{}")
        assert answer.startswith(b"HTTP/1.1 400")
    for part in (b"GET / HT", head + b"Content-Length: 50\r\n\r\n{"):
        to = socket.create_connection(explorer.server_address, timeout=5)
        to.sendall(part)
        to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        to.close()  # a reset, in the middle of a request
    assert asked(explorer, "GET", "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_two_hundred_at_once_are_served():
    """A hundred of them, as many as every system lets wait, before the server takes the first."""
    server = Explorer("<p>", SimpleNamespace(answer=computed))

    def connected():
        return [socket.create_connection(server.server_address, timeout=5) for _ in range(100)]

    connections = connected()
    with serving(server):
        connections += connected()
        for one in connections:
            one.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        for one in connections:
            assert one.recv(12) == b"HTTP/1.1 200"
            one.close()


def test_what_nobody_waits_for_is_ended(explorer, monkeypatch):
    begun, ended, waiting = threading.Event(), threading.Event(), []

    def endless(recipe, beside):
        waiting.append(recipe)
        begun.set()
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(explorer.live, "answer", endless)
    body = b'{"recipe": "clip"}'
    request = b"POST /recipe HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    first, second = (socket.create_connection(explorer.server_address, timeout=5) for _ in "12")
    first.sendall(request)
    assert begun.wait(5)
    second.sendall(request)  # waits for its turn, and leaves before it comes
    second.close()
    time.sleep(0.5)
    assert not ended.is_set()
    first.close()
    assert ended.wait(5)
    monkeypatch.setattr(explorer.live, "answer", computed)
    assert posted(explorer, {"recipe": "clip"})[0] == 200
    assert waiting == ["clip"]
