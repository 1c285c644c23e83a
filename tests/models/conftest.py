"""No test of this folder goes to the network; the small model of several of them is made here."""

import copy
import os
from functools import partial

import pytest
import two_ranks
from whole_path import pictures

from featcal import calibrate

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # read on import


@pytest.fixture(scope="session")
def images():
    return pictures()


@pytest.fixture(scope="session")
def case():
    return two_ranks.case()


@pytest.fixture
def model(case):
    """A small ResNet with spread logits."""
    return copy.deepcopy(case[0])


@pytest.fixture(scope="session")
def batches(case):
    """Its labelled batches of images."""
    return case[1]


@pytest.fixture
def fitted(batches):
    """Calibrates such a model the quick way: each step for itself, and without evidence."""
    quick = {"mode": "sequential", "evidence": False}
    return partial(calibrate, loader=batches, recipe="clip | temperature", **quick)
