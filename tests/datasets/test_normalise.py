"""What networks are fed, against plain formulas and the published values."""

import numpy as np
import pytest
import torch
from made import images

from featcal import InputError
from featcal.datasets import Images, Normalisation, normalisations

CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def values(normalisation):
    return normalisation.mean, normalisation.std


def bytes_(n=7, size=(5, 6)):
    return torch.from_numpy(images(n, size=size, noise=80.0).pixels)


def test_the_values_are_those_of_a_plain_formula():
    pixels = bytes_()
    found = Normalisation(*CIFAR)(pixels)
    expected = (pixels.numpy().astype(np.float64) / 255 - CIFAR[0]) / CIFAR[1]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected.transpose(0, 3, 1, 2), atol=2e-6)


def test_the_order_in_memory_is_channels_last():
    found = Normalisation(*CIFAR)(bytes_())
    assert found.shape == (7, 3, 5, 6)
    assert found.is_contiguous(memory_format=torch.channels_last)
    turned = bytes_(size=(6, 5)).transpose(1, 2)  # a view that is not contiguous
    assert Normalisation(*CIFAR)(turned).is_contiguous(memory_format=torch.channels_last)


def test_the_pixels_stay_as_they_are():
    pixels = bytes_()
    before = pixels.clone()
    Normalisation(*CIFAR)(pixels)
    assert torch.equal(pixels, before)


def test_a_compiled_graph_gives_the_same():
    normalise = Normalisation(*CIFAR)

    class Module(torch.nn.Module):
        def forward(self, pixels):
            return normalise(pixels)

    pixels = bytes_()
    exported = torch.export.export(Module(), (pixels,))
    assert torch.equal(exported.module()(pixels), normalise(pixels))


@pytest.mark.parametrize("chunk", [4096, 50, 7])
def test_measured_values_are_those_of_all_pixels(chunk, monkeypatch):
    monkeypatch.setattr("featcal.datasets.images.CHUNK", chunk)
    pixels = bytes_(50)
    found = Normalisation.measured(Images(pixels, torch.zeros(50).long()))
    plain = pixels.numpy().reshape(-1, 3) / 255
    np.testing.assert_allclose(found.mean, plain.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, plain.std(0), rtol=1e-12)
    normal = found(pixels)
    np.testing.assert_allclose(normal.mean((0, 2, 3)), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(normal.std((0, 2, 3), correction=0), np.ones(3), atol=1e-6)


def test_a_channel_without_variation_has_no_measure():
    flat = Images(torch.full((3, 2, 2, 3), 9, dtype=torch.uint8), torch.zeros(3).long())
    with pytest.raises(InputError, match=r"same in every pixel of the images: check them, or"):
        Normalisation.measured(flat)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_matched_is_one_for_all_and_the_default(name):
    for pair in (normalisations(name), normalisations(name, "matched")):
        assert [values(found) for found in pair] == [CIFAR, CIFAR]


def test_reference_differs_for_the_test_images_of_cifar100_alone():
    assert [values(v) for v in normalisations("cifar100", "reference")] == [CIFAR, IMAGENET]
    assert [values(v) for v in normalisations("cifar10", "reference")] == [CIFAR, CIFAR]
    assert [values(v) for v in normalisations("imagenet", "reference")] == [IMAGENET, IMAGENET]


def test_training_images_can_be_measured_in_place_of_published_values():
    made = Images(bytes_(20), torch.zeros(20).long())
    train, test = normalisations("pets", measure=made)
    assert train == test == Normalisation.measured(made)
    with pytest.raises(InputError, match=r"measure=splits.train"):
        normalisations("pets")
    with pytest.raises(InputError, match="give one of the two"):
        normalisations("cifar100", "reference", measure=made)


def test_wrong_arguments_are_refused():
    with pytest.raises(InputError, match="test_norm='published': give 'matched' or 'reference'"):
        normalisations("cifar10", "published")
    with pytest.raises(InputError, match="std above 0"):
        Normalisation((0.5, 0.5, 0.5), (0.5, 0.0, 0.5))
    with pytest.raises(InputError, match="three numbers each"):
        Normalisation((0.5,), (0.5,))
    with pytest.raises(InputError, match=r"give torch.uint8 of shape"):
        Normalisation(*CIFAR)(torch.zeros(2, 3, 4, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_can_record_it():
    normalise, pixels = Normalisation(*CIFAR), bytes_().cuda()
    graph = torch.cuda.CUDAGraph()
    normalise(pixels)
    with torch.cuda.graph(graph):
        found = normalise(pixels)
    pixels.copy_(255 - pixels)
    graph.replay()
    assert torch.equal(found, normalise(pixels))
