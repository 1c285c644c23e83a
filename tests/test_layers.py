"""Who may import whom, and how little `import featcal` brings along."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("click", "rich", "matplotlib", "sklearn", "scipy", "onnx", "onnxruntime", "pandas", "timm")

PROBE = f"""
import sys, torch, numpy, safetensors.torch
before = set(sys.modules)
import featcal
print(*sorted(name for name in {HEAVY} if name in sys.modules and name not in before))
"""


def test_import_brings_no_heavy_package():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == []


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
        if "cli" in path.parts:
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            top = line.startswith(("import ", "from "))
            if top and line.split()[1].split(".")[0] in HEAVY:
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line}")
    assert wrong == []
