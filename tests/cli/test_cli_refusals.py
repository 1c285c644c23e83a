"""Bad input of every command: exit code 2, one sentence that names the culprit, nothing written."""

import shlex
import sys
import textwrap
from dataclasses import replace

import made
import pytest
from cli_cases import arrays, done, featcal, logits_alone, packed, refused
from nets import BUILD
from train_cases import words, write_data, write_network

from featcal.datasets import load_images
from featcal.train import run_folder


def state(folder):
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The current folder, with something of everything that a command may be given."""
    here = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(sys, "path", list(sys.path))
        packed(here, arrays())
        packed(here, logits_alone(), "logits")
        packed(here, arrays(k=5), "five")
        packed(here, {k: v for k, v in arrays().items() if not k.startswith("test")}, "one")
        training = {f"train_{key}": arrays()[f"val_{key}"] for key in ("features", "labels")}
        packed(here, arrays() | training, "three")
        done("fit", "pack", "clip | temperature", "-o", "cal")
        done("fit", "pack", "vector", "-o", "vector")
        write_data(here)
        write_network(here)
        made.write_folders(here / "pets", parts={"train": 12, "val": 6, "test": 6})
        (here / "my_nets.py").write_text(textwrap.dedent(BUILD))
        (here / "taken").write_text("mine")
        (here / "folder").mkdir()
        (here / "folder" / "notes").touch()
        (here / "finished").mkdir()
        (here / "finished" / "run.json").touch()
        (here / "val.csv").write_text("id,a,b,label\nx,1,2,0\n")
        (here / "bad.csv").write_text("a,b,label\n1,2,0\n1,oops,0\n")
        (here / "cut.npz").write_bytes((here / "pack.npz").read_bytes()[:500])
        (here / "cut").write_bytes((here / "cal").read_bytes()[:-1])
        yield here
    for name in ("train_nets", "my_nets"):
        sys.modules.pop(name, None)


TRAIN = "train cifar10 wrn16x4 -o new --data data --network-option width=1 --batch 16 --epochs 1"
NET = "train cifar10 train_nets:%s -o new --data data --batch 16 --epochs 1"
PETS = "train folder train_nets:tiny -o new --data %s --batch 8 --epochs 1"
# The command, and what its sentence must name.
REFUSED = [
    ("evaluate pack", "evaluate"),
    ("eval", "PACK"),
    ("eval pack cal more", "more"),
    ("eval pack --nope", "--nope"),
    ("eval pack --bins 0", "--bins"),
    ("demo -o cal", "cal"),
    # Packs and calibrators that are none, or of another network.
    ("eval nowhere", "nowhere does not exist"),
    ("compare folder", "manifest.json"),
    ("pack info cal", "cal is not a folder"),
    ("eval pack.npz", "featcal pack import"),
    ("eval pack nowhere", "nowhere"),
    ("eval pack cut", "cut"),
    ("eval five vector", "was fitted to 4 classes five have 5"),
    ("eval logits cal", "logits logits alone"),
    ("report pack -o page.pdf", "page.pdf .html"),
    ("report one -o new.html", "'test' --folds 5"),
    ("fit logits clip -o new", "logits alone"),
    ("compare logits none clip", "logits alone needs no features"),
    # Splits.
    ("fit pack clip -o new --fit-split train", "'train' val, test"),
    ("eval pack --test-split train", "'train' val, test"),
    ("compare pack --fit-split train", "'train' val, test"),
    ("compare one", "'test' --folds 5"),
    ("compare pack --test-split val", "never fit on test --folds 5"),
    ("fit pack density -o new", "--train-split"),
    ("compare pack density", "--train-split"),
    ("fit three density --train-split val -o new", "--train-split is 'val'"),
    ("compare three density --train-split test", "--train-split is 'test'"),
    ("compare pack --train-split no", "'no'"),
    # Outputs.
    ("fit pack temperature", "-o"),
    ("fit pack temperature -o taken", "taken exists --force"),
    ("compare pack -o taken --json", "taken exists --force"),
    ("pack import pack.npz -o folder", "folder exists"),
    ("fit pack temperature -o no/new", "does not exist"),
    ("pack import pack.npz -o /proc/new", "/proc"),
    (f"fit pack temperature -o {'long' * 80}", "long"),
    # Recipes.
    ("fit pack '' -o new", "empty"),
    ("fit pack klip -o new", "'klip' did you mean clip?"),
    ("compare pack none klip", "'klip' did you mean clip?"),
    ("fit pack 'clip(c=3)' -o new", "'c' did you mean threshold? min_accuracy"),
    ("fit pack 'temperature | clip' -o new", "wrong order"),
    (f"compare pack {'(' * 500}", "does not parse"),
    # Options of compare.
    ("compare pack --resamples 1", "resamples is 1"),
    ("compare pack --folds 1", "--folds"),
    ("compare pack --folds 241", "folds is 241 240 rows"),
    ("compare pack --folds 5 --test-split test", "--folds 5 --test-split test"),
    ("compare pack --metric ecce", "--metric ecce classwise_ece"),
    ("compare pack --sort ecce", "--sort ecce given"),
    ("compare pack --json --format csv", "--json --format csv"),
    ("compare pack clip --paper", "--paper 'clip'"),
    ("compare pack --paper --sort ece", "--paper --sort ece"),
    ("compare pack -o new.xlsx", "new.xlsx --format"),
    # Reports.
    ("report pack", "-o"),
    ("report pack -o new.html --recipe nonsense", "nonsense"),
    ("report logits -o new.html --recipe clip", "works on features"),
    ("report pack -o new.html --recipe density", "rows the network was trained on"),
    ("report pack -o new.html --test-split val", "both 'val'"),
    ("report pack -o new.html --md new.html", "-o --md new"),
    ("explore pack --test-split dev", "'dev'"),
    ("explore pack --port 65536", "65536"),
    # Files to import.
    ("pack import -o new", "FILE"),
    ("pack import nowhere.csv -o new", "nowhere.csv does not exist"),
    ("pack import val.csv -o new", "--logits --probs"),
    ("pack import val.csv --logits -o new", "val.csv 'id' --ignore id"),
    ("pack import bad.csv --logits -o new", "bad.csv line 3 'b' 'oops'"),
    ("pack import val.csv --logits --probs -o new", "--logits --probs"),
    ("pack import cut.npz -o new", "cut.npz"),
    # Functions that build a network.
    ("collect my_nets -o new", "package.module:function"),
    ("collect my_nets.py:build -o new", "'my_nets.py' my_nets:function"),
    ("collect other:build -o new", "'other'"),
    ("collect my_nets:bild -o new", "'bild' build"),
    ("collect my_nets:nothing -o new", "NoneType (model, {'val': loader"),
    ("collect my_nets:unknown -o new", "'classes' class_names"),
    ("collect my_nets:more -o new --head 1", "'4'"),
    ("collect my_nets:build -o new --device toaster", "--device toaster"),
    ("collect my_nets:broken -o folder", "folder exists"),
    ("export nowhere cal -o new.onnx", "neither a folder nor package.module:function"),
    ("export pack cal -o new.onnx --test-split train", "'train'"),
    ("export pack cal -o new.onnx --head fc", "--head"),
    ("export my_nets:build cal -o new.onnx --test-split train", "'train'"),
    ("export my_nets:build cal -o new.onnx --head 1", "'1'"),
    # Training: before anything is read, before the first step.
    (f"{TRAIN} --budget 0.1", "--budget --epochs"),
    (f"{TRAIN} --loss fokal", "'fokal' did you mean focal"),
    (f"{TRAIN} --lr -1", "--lr"),
    (f"{TRAIN} --lr nan", "lr is nan"),
    (f"{TRAIN} --device meta", "--device is 'meta'"),
    (f"{TRAIN} --graph --device cpu", "--graph"),
    (f"{TRAIN} --smoothing 0.1 --loss focal", "--smoothing focal"),
    (f"{TRAIN} --network-option width", "'width' NAME=VALUE"),
    (f"{TRAIN} --network-option widht=1", "'widht' width=4"),
    (f"{TRAIN} --image-size 64", "--image-size"),
    (f"{TRAIN} --batch 100", "--batch is 100 72 rows"),
    (f"{TRAIN} --val 80", "--val is 80 of 80"),
    (f"{TRAIN} --held-out 72", "--held-out is 72 of 72"),
    (f"{TRAIN} --loss adafocal --held-out 0", "--held-out adafocal"),
    (TRAIN.replace("wrn16x4", "wrn16x5"), "'wrn16x5' wrn16x4"),
    (TRAIN.replace("cifar10", "cifar100"), "cifar100 --download"),
    (TRAIN.replace("cifar10", "mnist"), "mnist"),
    (TRAIN.replace("-o new", "-o taken"), "taken exists"),
    (TRAIN.replace("-o new", "-o folder"), "folder exists"),
    (TRAIN.replace("-o new", "-o finished"), "finished holds a finished run"),
    (TRAIN.replace("-o new", "-o no/new"), "does not exist"),
    (NET % "tinny", "'tinny' tiny"),
    (NET % "lists", "train_nets:lists returned list"),
    (NET % "nothing", "number of classes"),
    (NET % "tiny --network-option depth=2", "'depth'"),
    (PETS % "pets", "--image-size is missing"),
    (PETS % "pets --image-size 8 --download", "--download"),
    (PETS % "pets --image-size 8 --test-norm reference", "--test-norm"),
    (PETS % "pets --image-size 8 --val 10", "--val is 10 leave --val out"),
    (PETS % "pets --image-size 40000", "--image-size"),
    (
        "train folder densenet121 -o new --data pets --image-size 4 --network-option growth=2",
        "densenet121 4 x 4 pixels --image-size",
    ),
    # Histories.
    ("history folder", "folder holds no run"),
]


@pytest.mark.parametrize("command", [command for command, _ in REFUSED])
def test_it_is_refused_by_name_and_nothing_is_written(command, world):
    before = state(world)
    said = refused(*shlex.split(command))
    for word in dict(REFUSED)[command].split():
        assert word in said, said
    assert state(world) == before
    assert not (world / "new").exists()


def test_errors_of_the_user_s_own_code_keep_their_traceback(world):
    with pytest.raises(RuntimeError, match="the disk with the weights is away"):
        featcal("collect", "my_nets:broken", "-o", "new")
    with pytest.raises(RuntimeError) as caught:
        featcal(*shlex.split(PETS % "pets --image-size 2"))
    told = "train_nets:tiny was given two images of 2 x 2 pixels, of shape (2, 3, h, w)"
    assert caught.value.__notes__ == [told]


@pytest.fixture(scope="module")
def diverged(world, tmp_path_factory):
    """A run with a checkpoint that its own command cannot mend."""
    run = tmp_path_factory.mktemp("runs") / "clip_norm lr (1)"  # a name that is left alone
    ran = featcal(*words(run, "--lr", "1e30", "--checkpoint-every", "0"))
    assert ran.code == 2
    told = f"lower --lr (1e+30), or limit the gradients with --clip-norm; and remove {run}, which"
    assert told in " ".join(ran.err.split())
    return run


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--loss", "focal"), "--loss = ce, not focal"),
        (("--network-option", "width=5"), "--network-option width = None, not 5"),
        (("--val", "9"), "rows of train = 72, not 71; rows of val = 8, not 9"),
        (("--seed", "2", "--lr", "0.3"), "--lr = 1e+30, not 0.3; --seed = 1, not 2"),
        (("--published",), "--clip-norm = None, not 2.0"),
        (("--test-norm", "reference"), "--test-norm = matched, not reference"),
    ],
)
def test_a_run_goes_on_as_it_was_begun(more, expected, diverged):
    said = refused(*words(diverged, "--lr", "1e30", *more))
    assert expected in said
    assert "choose another folder" in said


def test_other_images_do_not_go_on(diverged, monkeypatch):
    def darker(*given, **options):
        found = load_images(*given, **options)
        return replace(found, train=replace(found.train, pixels=found.train.pixels // 2))

    monkeypatch.setattr("featcal.cli.run.load_images", darker)
    assert "with other images in train" in refused(*words(diverged, "--lr", "1e30"))


def test_one_command_at_a_time(world, tmp_path):
    with run_folder.made_folder(tmp_path / "run"):
        assert "is being written by another process" in refused(*words(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
