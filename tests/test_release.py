"""What is given away: wheel and sdist are complete, and work in an environment of their own."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from featcal.version import __version__

ROOT = Path(__file__).parents[1]
NEEDED = "import torch, safetensors, click, rich, matplotlib, jinja2, plotly, sysconfig"
WHERE = "print(*{sysconfig.get_path(kind) for kind in ('purelib', 'platlib')}, sep='\\n')"
LONGEST = 900  # seconds; on a busy machine the demo takes minutes
# What is imported from the source here is not to be found there.
PLAIN = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def output(*words, cwd=ROOT):
    ran = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=PLAIN, timeout=LONGEST)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, by the build that is installed."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    output(sys.executable, "-m", "hatchling", "build", "-d", folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_both_hold_every_file(built):
    with zipfile.ZipFile(built[0]) as wheel, tarfile.open(built[1]) as sdist:
        in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licences = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    source = (path for path in (ROOT / "src").rglob("*") if path.is_file())
    wanted = {path.relative_to(ROOT / "src").as_posix() for path in source}
    assert in_wheel == {path for path in wanted if "__pycache__" not in path}
    assert "featcal/py.typed" in in_wheel
    assert licences == [f"featcal-{__version__}.dist-info/licenses/LICENSE"]
    if not (ROOT / ".git").exists():
        pytest.skip("not in a git checkout: nothing says which files belong to the sdist")
    tracked = (name for name in output("git", "ls-files").splitlines() if name[0] != ".")
    assert [name for name in tracked if name not in in_sdist and (ROOT / name).exists()] == []


def test_their_descriptions_can_be_shown(built):
    pytest.importorskip("twine")
    output(sys.executable, "-m", "twine", "check", "--strict", *built)


def test_the_description_of_an_index_has_no_link_into_the_repository(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        _, _, text = wheel.read(name).decode().partition("\n\n")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    readme = (ROOT / "README.md").read_text()
    assert text.startswith(readme.splitlines()[0])
    assert len(text) > 0.7 * len(readme)


def test_with_an_address_links_and_images_lead_there():
    pytest.importorskip("hatchling")
    found = runpy.run_path(str(ROOT / "hatch_build.py"))["Index"]
    home, metadata = "https://example.org/featcal", {}
    found(str(ROOT), {"repository": f"{home}/"}).update(metadata)
    text = metadata["readme"]["text"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", text)
    assert {link.startswith("https://") for _, link in links} == {True}
    assert f"]({home}/raw/main/docs/images/reliability.png)" in text
    ours = [link.partition("#")[0] for _, link in links if link.startswith(home)]
    repository, *pages, _ = metadata["urls"].values()
    assert repository == home
    for link in [*ours, *pages]:
        assert (ROOT / re.sub(r"^/(raw|blob)/main/", "", link.removeprefix(home))).is_file(), link


def interpreter(name):
    """A Python with what featcal needs, and where that lies."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here")
    asked = subprocess.run([found, "-c", f"{NEEDED}; {WHERE}"], capture_output=True, text=True)
    if asked.returncode:
        said = asked.stderr.strip().split("\n")[-1]
        pytest.skip(f"{name} does not have what featcal needs: {said}")
    return found, asked.stdout


@pytest.mark.parametrize("name", [sys.executable, "python3.12", "python3.13"])
def test_the_wheel_gives_the_demo_in_an_environment_of_its_own(built, name, tmp_path):
    python, packages = interpreter(name)
    place, out = tmp_path / "venv", tmp_path / "new" / "out"
    output(python, "-m", "venv", "--without-pip", place)
    own = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install"]
    output(*own, "--no-deps", "--no-index", "--no-compile", built[0])
    (site,) = place.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(packages)  # torch is not installed once more
    spec = "import importlib.util as u; print(u.find_spec('featcal').origin)"
    found = output(place / "bin" / "python", "-c", spec, cwd=tmp_path).strip()
    assert Path(found) == site / "featcal" / "__init__.py"
    said = output(place / "bin" / "featcal", "demo", "-o", out, cwd=tmp_path)
    for word in ("none", "temperature", "clip | temperature", "before", "after"):
        assert word in said
    *pictures, page = sorted(out.iterdir())
    assert [path.suffix for path in pictures] == [".png", ".svg"]
    assert all(str(path) in said for path in pictures)
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
    assert said.splitlines()[-1] == f"Report, for a browser: {page}"
    assert page.read_text().startswith("<!doctype html>")
    told = " ".join(said.split())
    raw, best = re.search(r"calibration error ([\d.]+)% before, ([\d.]+)% after", told).groups()
    assert float(best) < float(raw) / 4


def test_the_citation_is_of_this_version_and_of_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["title"], cited["version"]) == ("featcal", __version__)
    (paper,) = cited["references"]
    assert paper["title"] == "Feature Clipping for Uncertainty Calibration"
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
