import importlib
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def imported():
    """Imports a module of experiments/ by its name; they import each other as they stand there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "experiments")
        yield importlib.import_module
