"""Who may import whom, and how little `import featcal` brings along."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = {
    *("click", "lightning", "matplotlib", "mlflow", "onnx", "onnxruntime", "onnxscript", "pandas"),
    *("pyarrow", "rich", "scipy", "sklearn", "timm", "torchmetrics", "transformers", "wandb"),
}
NEEDED = {"featcal", "numpy", "safetensors", "torch"}

PROBE = """
import sys, time, torch, numpy, safetensors.torch
random, threads = torch.get_rng_state(), torch.get_num_threads()
before, started = set(sys.modules), time.process_time()
import featcal
featcal.calibrate
print(time.process_time() - started)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
assert torch.equal(random, torch.get_rng_state()) and threads == torch.get_num_threads()
assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
"""
BUDGET = 0.3  # seconds beyond the import of torch, promised in the README


def test_import_is_quick_and_silent_and_brings_torch_numpy_and_safetensors_alone(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)  # bytecode is kept, as where it is installed
    for _ in range(4):  # the first one writes the bytecode
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROBE],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        seconds, packages = done.stdout.splitlines()
        assert set(packages.split()) <= NEEDED
        if float(seconds) < BUDGET:
            break
    assert float(seconds) < BUDGET


AT_ONCE = """
import io, os, sys
from contextlib import redirect_stdout
import featcal
from featcal.cli import app, main
seen = io.StringIO()
packs = [["pack", name, "--help"] for name in ("import", "info")]
helps = [["--version"], ["--help"], *([name, "--help"] for name in app.KNOWN), *packs]
for words in (*helps, ["paper", "ece-posthoc"]):
    try:
        with redirect_stdout(seen):
            main(words)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    assert "torch" not in sys.modules, words
    assert words not in helps or "rich" not in sys.modules, words  # a third of what is left
os.environ["_FEATCAL_COMPLETE"] = "bash_complete"
for line in ("featcal e", "featcal fit --fo", "featcal compare --metric ada"):
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    try:
        main([])
    except SystemExit:
        pass
assert "calibrate" in dir(featcal)
print("loaded:", *sorted({"numpy", "torch"} & set(sys.modules)))
"""


def test_help_of_every_command_completion_and_the_paper_wait_for_no_torch():
    """Two seconds of every call would go into it."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", AT_ONCE], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    *words, loaded = done.stdout.split("\n")[:-1]
    assert loaded == "loaded:"
    commands, options = ["plain,export", "plain,eval", "plain,explore"], ["plain,--force"]
    assert words == [*commands, *options, "plain,adaptive_ece"]


def test_the_layers_hold():
    tool = shutil.which("lint-imports") or shutil.which(
        "lint-imports", path=str(Path(sys.executable).parent)
    )
    if tool is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_the_command_line_and_reports_import_optional_packages_inside_functions():
    """Module-level imports of extras would make them requirements."""
    wrong = []
    for path in (ROOT / "src" / "featcal").rglob("*.py"):
        if {"cli", "bridges"} & set(path.parts):  # what only their users import
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            top = line.startswith(("import ", "from "))
            if top and line.split()[1].split(".")[0] in EXTRAS:
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line}")
    assert wrong == []
