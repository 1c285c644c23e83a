"""The explorer's server: what it answers, and to whom."""

import http.client
import json
import threading

import pytest
from serving import serving

from featcal import InputError
from featcal.page.serve import HOST, LONGEST, Explorer


def computed(recipe, beside):
    if recipe == "nonsense":
        raise InputError("recipe 'nonsense': no method is called 'nonsense'")
    return {"recipe": recipe, "beside": beside}


@pytest.fixture
def explorer():
    server = Explorer("<p>naïve</p>", computed)
    with serving(server):
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


def test_it_listens_to_this_machine_alone(explorer):
    assert explorer.server_address[0] == HOST
    assert explorer.address == f"http://127.0.0.1:{explorer.server_address[1]}/"


def test_the_page_is_served_as_utf8_and_not_kept(explorer):
    status, page, headers = asked(explorer, "GET", "/")
    assert (status, page) == (200, "<p>naïve</p>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"


def test_there_is_nothing_else(explorer):
    for path in ("/etc/passwd", "/../pyproject.toml", "/recipe"):
        status, answer, _ = asked(explorer, "GET", path)
        assert status == 404
        assert "there is no" in json.loads(answer)["error"]
    assert posted(explorer, {"recipe": "clip"}, path="/other")[0] == 404


def test_a_recipe_is_computed(explorer):
    assert posted(explorer, {"recipe": "clip"}) == (200, {"recipe": "clip", "beside": []})
    asked = {"recipe": "clip", "beside": ["none", "vector"]}
    assert posted(explorer, asked) == (200, asked)


def test_a_bad_recipe_is_refused_with_its_sentence(explorer):
    """As an answer: a browser would log a status of 400 as an error of the page."""
    status, answer = posted(explorer, {"recipe": "nonsense"})
    assert status == 200
    assert answer == {"error": "recipe 'nonsense': no method is called 'nonsense'"}


@pytest.mark.parametrize("body", ["", "{", "[]", '"clip"', '{"recipes": "clip"}', "\xff"])
def test_what_is_no_request_is_refused_with_an_example(body, explorer):
    status, answer = posted(explorer, body)
    assert status == 400
    assert answer == {"error": 'give {"recipe": "clip | temperature"}'}


def test_a_recipe_that_is_no_text_is_refused(explorer):
    assert posted(explorer, {"recipe": 3})[1]["error"].startswith("recipe is 3: give text")


@pytest.mark.parametrize("beside", ["none", [3], {"none": 1}, None])
def test_other_recipes_are_a_list_of_texts(beside, explorer):
    status, answer = posted(explorer, {"recipe": "clip", "beside": beside})
    assert status == 400
    assert answer["error"].startswith("beside is no list of texts")


def test_a_long_request_is_refused_unread(explorer):
    status, answer = posted(explorer, {"recipe": "x" * LONGEST})
    assert status == 400
    assert f"at most {LONGEST} bytes" in answer["error"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example:1"]
)
def test_other_names_for_this_machine_are_refused(host, explorer):
    assert asked(explorer, "GET", "/", Host=host)[0] == 403
    assert posted(explorer, {"recipe": "clip"}, Host=host)[0] == 403


def test_whatever_goes_wrong_is_answered(explorer):
    explorer.compute = lambda *asked: 1 / 0
    status, answer = posted(explorer, {"recipe": "clip"})
    assert status == 500
    assert answer["error"].startswith("this recipe failed (ZeroDivisionError")


def test_a_body_of_brackets_is_no_request(explorer):
    assert posted(explorer, "[" * 4000)[0] == 400


def test_other_pages_are_refused(explorer):
    assert posted(explorer, {"recipe": "clip"}, Origin="http://evil.example")[0] == 403
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert posted(explorer, {"recipe": "clip"}, **form)[0] == 403
    own = f"127.0.0.1:{explorer.server_address[1]}"
    assert posted(explorer, {"recipe": "clip"}, Origin=f"http://{own}")[0] == 200


def test_a_name_without_a_port_is_ours(explorer):
    assert asked(explorer, "GET", "/", Host="127.0.0.1")[0] == 200


def test_the_name_localhost_is_ours_too(explorer):
    assert asked(explorer, "GET", "/", Host=f"localhost:{explorer.server_address[1]}")[0] == 200


def test_a_taken_port_is_said_with_a_remedy(explorer):
    with pytest.raises(InputError, match=r"port \d+ cannot be opened .*--port"):
        Explorer("", computed, port=explorer.server_address[1])


def test_a_bad_recipe_does_not_wait_for_a_fit():
    begun, go_on = threading.Event(), threading.Event()

    def slow(*asked):
        begun.set()
        go_on.wait(20)
        return {}

    def check(recipe):
        if recipe == "nonsense":
            raise InputError("no method is called 'nonsense'")

    server = Explorer("", slow, check=check)
    threads = [
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}),
        threading.Thread(target=posted, args=(server, {"recipe": "clip"})),
    ]
    for thread in threads:
        thread.start()
    try:
        assert begun.wait(5)
        answer = posted(server, {"recipe": "nonsense"})
        assert answer == (200, {"error": "no method is called 'nonsense'"})
    finally:
        go_on.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join()


def test_one_recipe_is_computed_at_a_time(explorer):
    inside, most = [0], [0]

    def slow(*asked):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.02)
        inside[0] -= 1
        return {}

    explorer.compute = slow
    threads = [threading.Thread(target=posted, args=(explorer, {"recipe": "clip"})) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
