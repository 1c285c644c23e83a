"""The pack that travels inside featcal, so that every command has something to run on."""

from pathlib import Path

from featcal.data.pack import Pack

DEMO = Path(__file__).parents[1] / "assets" / "cifar100-wrn16x4"


def demo_pack() -> Pack:
    """CIFAR-100 through a Wide-ResNet-16-4: 256 features, 5,000 rows of val and 10,000 of test.

    >>> demo_pack().splits
    ('val', 'test')
    """
    return Pack.open(DEMO)
