"""Makes the feature pack inside featcal from the arrays beside the repository.

Usage: python experiments/make_demo_pack.py [OUT]

Reads ../shared/packs/cifar100-wrn16x4.npz, adds its origin and the names of the classes, and
writes OUT (src/featcal/assets/cifar100-wrn16x4 unless given), which must not exist.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from featcal.data import import_files

ROOT = Path(__file__).parents[1]
SOURCE = ROOT.parent / "shared" / "packs" / "cifar100-wrn16x4.npz"
OUT = ROOT / "src" / "featcal" / "assets" / "cifar100-wrn16x4"

ORIGIN = {
    "origin": "trained for this project",
    "architecture": "Wide-ResNet-16-4",
    "training_loss": "cross-entropy",
    "data": "CIFAR-100: 45,000 training images train the network, the other 5,000 are the split "
    "val, the 10,000 test images are the split test",
    "made_by": "experiments/make_demo_pack.py",
}

# The fine labels in their official order, which is alphabetical.
FINE_LABELS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    with np.load(SOURCE, allow_pickle=False) as archive:
        arrays = dict(archive)
    arrays["meta"] = np.array(json.dumps({**json.loads(arrays["meta"].item()), **ORIGIN}))
    arrays["class_names"] = np.array(FINE_LABELS.split())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / SOURCE.name
        np.savez(file, **arrays)
        pack = import_files(file, out)
    print(json.dumps(pack.summary(), indent=1))


if __name__ == "__main__":
    main()
