"""featcal explore: a page of this machine, until Ctrl-C."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from cli_cases import done, refused

from featcal.cli import report as explore

WAIT = 60  # seconds, for a process to begin and to end


@pytest.fixture
def running(pack):
    command = [sys.executable, "-m", "featcal", "explore", str(pack), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def posted(address, recipe):
    body = json.dumps({"recipe": recipe}).encode()
    request = urllib.request.Request(f"{address}recipe", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        return json.load(answer)


def test_the_page_is_served_computes_and_ends_with_ctrl_c(running, pack):
    line = running.stdout.readline()
    assert line.startswith(f"{pack} is at http://127.0.0.1:")
    address = line.split()[3].rstrip(";")
    with urllib.request.urlopen(address, timeout=WAIT) as answer:
        page = answer.read().decode()
    assert 'id="recipe-form"' in page
    found = posted(address, "vector")
    assert found["entry"]["recipe"] == "vector"
    assert "did you mean vector?" in posted(address, "vectr")["error"]
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=WAIT)
    assert (running.returncode, out, err) == (0, "Stopped.\n", "")


def test_ctrl_c_ends_a_fit_that_is_under_way_too(running):
    address = running.stdout.readline().split()[3].rstrip(";")
    asking = threading.Thread(target=lambda: suppressed(address), daemon=True)
    asking.start()
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=WAIT)
    assert (running.returncode, out, err) == (0, "Stopped.\n", "")


def suppressed(address):
    with contextlib.suppress(OSError, http.client.HTTPException):
        posted(address, "clip | parameterised")


def test_the_page_is_that_of_the_report_with_the_same_options(pack, cal, tmp_path, monkeypatch):
    """Recipes, files and bins; what it was made with can be typed again."""
    served = []
    monkeypatch.setattr(
        explore, "_until_interrupted", lambda explorer: served.append(explorer.page)
    )
    options = ("--recipe", "vector", "--bins", "9", "--split", "val", "--fit-split", "test")
    done("explore", pack, cal, *options, "--no-browser")
    done("report", pack, cal, *options, "-o", tmp_path / "r.html")
    mine, theirs = (data(text) for text in (served[0].decode(), (tmp_path / "r.html").read_text()))
    told = "--recipe vector --split val --fit-split test --bins 9"
    assert mine["about"].pop("command") == f"featcal explore {pack} {cal} {told}"
    theirs["about"].pop("command")
    for body in (mine, theirs):
        for row in body["recipes"]:
            row.pop("seconds")
            row.pop("fit")
    assert mine == theirs
    assert [row["recipe"] for row in mine["recipes"]][1] == "vector"
    assert mine["recipes"][2]["file"] == str(cal)


def data(page):
    text = page.split('id="featcal-data">')[1]
    return json.loads(text.split("</script>")[0])


def test_what_is_wrong_is_said_before_anything_is_computed(pack, tmp_path):
    assert "does not exist" in refused("explore", tmp_path / "none")
    assert "split" in refused("explore", pack, "--split", "other")
    assert "both 'val'" in refused("explore", pack, "--split", "val")
    assert "no method" in refused("explore", pack, "--recipe", "nonsense")
    assert "does not exist" in refused("explore", pack, tmp_path / "no.safetensors")
    assert "65536" in refused("explore", pack, "--port", 65536)
