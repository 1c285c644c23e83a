"""Networks by name, and what is said where a name, an option or a size cannot be."""

import pytest
import torch

from featcal import InputError
from featcal.models import MODELS, Classifier, build, network_options

NAMES = "resnet50, resnet110, densenet121, wrn26x10, wrn16x4, vit"


@pytest.mark.parametrize("name", MODELS)
def test_every_name_builds_its_classifier(name):
    with torch.device("meta"):
        model = build(name, 7)
    assert isinstance(model, Classifier)
    assert model.head.out_features == 7
    assert model.family
    assert model.__doc__


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "resnet-50",
            f"no network is called 'resnet-50'; did you mean resnet50? There are {NAMES}",
        ),
        ("wrn", f"no network is called 'wrn'; did you mean wrn16x4? There are {NAMES}"),
        ("alexnet_v2", f"no network is called 'alexnet_v2'; there are {NAMES}"),
        (50, f"no network is called 50; there are {NAMES}"),
        (["vit"], f"no network is called ['vit']; did you mean vit? There are {NAMES}"),
    ],
)
def test_a_name_there_is_not(name, text):
    with pytest.raises(InputError) as caught:
        build(name, 10)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("resnet50", {"depth": 3}, "has no option 'depth': it takes blocks=(3, 4, 6, 3), width=64"),
        ("wrn16x4", {"growth": 3}, "wrn16x4 has no option 'growth': it takes depth=16, width=4"),
        (
            "vit",
            {"dropout": 0.1},
            "no option 'dropout': it takes image_size=32, patch=4, width=384",
        ),
        ("resnet50", {"width": 0}, "width is 0: give a whole number from 1 up"),
        ("resnet50", {"width": 1.5}, "width is 1.5: give a whole number from 1 up"),
        ("resnet50", {"blocks": (3, 4, 6)}, "blocks is (3, 4, 6): give a tuple of 4 whole numbers"),
        ("resnet50", {"blocks": (3, 4, 0, 3)}, "blocks is 0: give a whole number from 1 up"),
        ("densenet121", {"blocks": ()}, "blocks is (): give a tuple of whole numbers"),
        ("densenet121", {"blocks": 6}, "blocks is 6: give a tuple of whole numbers"),
        ("densenet121", {"growth": True}, "growth is True: give a whole number from 1 up"),
        ("wrn26x10", {"depth": 27}, "depth is 27: give 2 more than a multiple of 6, such as 26"),
        ("wrn26x10", {"depth": 2}, "depth is 2: give a whole number from 8 up"),
        ("wrn16x4", {"depth": 26}, "depth is 26: give 4 more than a multiple of 6, such as 22"),
        ("vit", {"patch": 5}, "patch is 5: give a number that divides image_size = 32"),
        ("vit", {"heads": 7}, "heads is 7: give a number that divides width = 384"),
        ("vit", {"depth": 0}, "depth is 0: give a whole number from 1 up"),
    ],
)
def test_an_option_that_cannot_be(name, options, text):
    with pytest.raises(InputError) as caught, torch.device("meta"):
        build(name, 10, **options)
    assert text in str(caught.value)


@pytest.mark.parametrize("classes", [1, 0, -1, 2.0, "10", None, True])
@pytest.mark.parametrize("name", MODELS)
def test_classes_are_two_or_more(name, classes):
    said = r"classes is .*: give a whole number from 2 up"
    with pytest.raises(InputError, match=said), torch.device("meta"):
        build(name, classes)


def test_the_options_of_a_name_are_its_own():
    assert network_options("resnet110") == {"blocks": (3, 4, 26, 3), "width": 64}
    assert network_options("wrn26x10") == {"depth": 26, "width": 10}
    assert build("wrn16x4", 2, width=1).feature_size == 64
    assert build("resnet50", 2, width=2, blocks=[1, 1, 1, 1]).feature_size == 64


def test_the_first_weights_follow_torch_s_seed():
    torch.manual_seed(5)
    first = build("wrn16x4", 3, width=1).state_dict()
    torch.manual_seed(5)
    again = build("wrn16x4", 3, width=1).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
