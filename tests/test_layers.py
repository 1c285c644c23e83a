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
before, started = set(sys.modules), time.process_time()
import featcal
print(time.process_time() - started)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
"""
BUDGET = 0.3  # seconds beyond the import of torch, promised in the README


def probed(cache):
    """CPU seconds of the import, and the packages it brought; bytecode is kept as installed."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        env={**env, "PYTHONPYCACHEPREFIX": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    seconds, packages = done.stdout.splitlines()
    return float(seconds), set(packages.split())


def test_import_is_quick_and_brings_torch_numpy_and_safetensors_alone(tmp_path):
    runs = [probed(tmp_path) for _ in range(4)]  # the first one writes the bytecode
    assert all(packages <= NEEDED for _, packages in runs)
    assert min(seconds for seconds, _ in runs) < BUDGET


def test_import_prints_nothing_and_touches_no_global_state():
    probe = (
        "import torch; s = torch.get_rng_state(); n = torch.get_num_threads(); import featcal; "
        "assert torch.equal(s, torch.get_rng_state()); assert n == torch.get_num_threads(); "
        "assert torch.is_grad_enabled(); assert torch.get_default_dtype() is torch.float32"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
