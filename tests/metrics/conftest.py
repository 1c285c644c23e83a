import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors here are tiny: on a busy machine threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
