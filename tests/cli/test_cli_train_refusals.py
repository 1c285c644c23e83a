"""featcal train refuses in one sentence, and before any work where it can."""

from dataclasses import replace

import made
import pytest
from cli_cases import featcal, refused
from train_cases import words

from featcal.datasets import load_images
from featcal.train import run_folder as checkpoint
from featcal.train.run_folder import made_folder

EARLY = {
    "epochs twice": (("--budget", "0.1"), ["--budget and --epochs contradict each other"]),
    "a loss there is not": (("--loss", "fokal"), ["'fokal'", "did you mean focal"]),
    "an argument there is not": (("--loss", "focal(beta=1)"), ["no argument 'beta'"]),
    "a rate below zero": (("--lr", "-1"), ["'--lr': -1.0 is not in the range x>0"]),
    "a rate that is no number": (("--lr", "nan"), ["lr is nan: give a number above 0"]),
    "a gradient of no length": (("--clip-norm", "0"), ["'--clip-norm': 0.0 is not in the range"]),
    "no budget": (("--budget", "0"), ["'--budget': 0.0 is not in the range 0<x<=1"]),
    "a budget in percent": (("--budget", "10"), ["'--budget': 10.0 is not in the range 0<x<=1"]),
    "mixing below zero": (("--mixup", "-1"), ["'--mixup': -1.0 is not in the range x>=0"]),
    "labels without a class": (("--smoothing", "1"), ["'--smoothing': 1.0", "0<=x<1"]),
    "a device without numbers": (("--device", "meta"), ["device is 'meta'", "cpu or cuda"]),
    "a graph on a CPU": (("--graph", "--device", "cpu"), ["graph is True, and needs one process"]),
    "a device there is not": (("--device", "toaster"), ["device is 'toaster'", "cpu or cuda"]),
    "soft labels": (("--smoothing", "0.1", "--loss", "focal"), ["--smoothing", "focal takes"]),
    "no option": (("--network-option", "width"), ["'width' is not NAME=VALUE", "width=2"]),
    "a size for CIFAR": (("--image-size", "64"), ["--image-size is for folders alone"]),
    "rows below one": (("--val", "0"), ["--val"]),
}


@pytest.mark.parametrize("case", EARLY)
def test_before_the_data_is_read(case, train_project, monkeypatch):
    more, expected = EARLY[case]
    monkeypatch.setattr("featcal.cli.train.load_images", None)
    options = ("--network-option", "width=1") if "--network-option" not in more else ()
    said = refused(*words("run", *more, *options, network="wrn16x4"))
    assert all(word in said for word in expected), said
    assert not (train_project / "run").exists()


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("wrn16x5", ["no network is called 'wrn16x5'", "wrn16x4", "package.module:function"]),
        ("train_nets:tinny", ["train_nets has no function 'tinny'", "tiny"]),
        ("nowhere:tiny", ["there is no module 'nowhere'"]),
        (":tiny", ["name the function that returns a network"]),
    ],
)
def test_a_network_there_is_not(network, expected, train_project, monkeypatch):
    monkeypatch.setattr("featcal.cli.train.load_images", None)
    said = refused(*words("run", network=network))
    assert all(word in said for word in expected), said


@pytest.mark.parametrize("value", ["{[]: 1}", "-" * 5000 + "1", "(" * 300])
def test_an_option_that_is_no_literal_is_text(value, train_project, monkeypatch):
    monkeypatch.setattr("featcal.cli.train.load_images", None)
    said = refused(*words("run", "--network-option", f"width={value}", network="wrn16x4"))
    assert "width is" in said


def test_an_option_the_network_has_not(train_project, monkeypatch):
    monkeypatch.setattr("featcal.cli.train.load_images", None)
    said = refused(*words("run", "--network-option", "widht=1", network="wrn16x4"))
    assert "wrn16x4 has no option 'widht': it takes depth=16, width=4" in said


@pytest.mark.parametrize(
    ("network", "more", "expected"),
    [
        ("train_nets:lists", (), ["train_nets:lists returned list", "torch.nn.Module"]),
        (
            "train_nets:nothing",
            (),
            ["cannot be called with the number of classes", "(classes,"],
        ),
        ("train_nets:tiny", ("--network-option", "depth=2"), ["{'depth': 2}", "'depth'"]),
        ("train_nets:tiny", ("--checkpoint-every", "nan"), ["checkpoint_every is nan"]),
        ("train_nets:twice", (), ["head", "here: --head PATH, or --no-pack"]),
        ("train_nets:sure", (), ["gives probabilities", "leave its softmax out"]),
        ("train_nets:pair", ("--no-pack",), ["the model gives tuple of two images"]),
        ("train_nets:tiny", ("--head", "0"), ["'0'"]),
        ("train_nets:binary", (), ["2", "10"]),
        (
            "train_nets:tiny",
            ("--batch", "100"),
            ["--batch is 100, and train has 72", "--batch of 72"],
        ),
        ("train_nets:tiny", ("--val", "80"), ["--val is 80 of 80", "a --val from 1 to 79"]),
        ("train_nets:tiny", ("--held-out", "72"), ["--held-out is 72 of 72 images"]),
        ("train_nets:tiny", ("--loss", "adafocal", "--held-out", "0"), ["--held-out 0: adafocal"]),
    ],
)
def test_before_the_first_step(network, more, expected, train_project):
    said = refused(*words("run", *more, network=network))
    assert all(word in said for word in expected), said
    assert not (train_project / "run").exists()


@pytest.mark.parametrize(
    ("dataset", "more", "expected"),
    [
        ("folder", (), ["--image-size is missing"]),
        ("folder", ("--image-size", "8", "--download"), ["--download gets CIFAR alone"]),
        ("folder", ("--image-size", "8", "--test-norm", "reference"), ["for CIFAR alone"]),
        ("folder", ("--image-size", "8"), ["has no folder train"]),
        ("cifar100", (), ["has no cifar100", "with --download"]),
        ("mnist", (), ["mnist"]),
    ],
)
def test_data_there_is_not(dataset, more, expected, train_project):
    command = ("train", dataset, "wrn16x4", "-o", "run", "--data", "data", *more)
    said = refused(*command, "--network-option", "width=1")
    assert all(word in said for word in expected), said
    assert not (train_project / "run").exists()


def test_folders_that_are_taken(train_project, tmp_path):
    (tmp_path / "file").touch()
    assert "exists" in refused(*words(tmp_path / "file"))
    assert "does not exist: create it first" in refused(*words(tmp_path / "no" / "run"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert "mine exists" in refused(*words(tmp_path / "mine"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").touch()
    assert "old holds a finished run (run.json)" in refused(*words(tmp_path / "old"))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--loss", "focal"), "--loss = ce, not focal"),
        (("--network-option", "width=5"), "--network-option width = None, not 5"),
        (("--seed", "2"), "--seed = 1, not 2"),
        (("--val", "9"), "rows of train = 72, not 71; rows of val = 8, not 9"),
        (("--seed", "2", "--lr", "0.3"), "--lr = 0.1, not 0.3; --seed = 1, not 2"),
    ],
)
def test_a_run_goes_on_as_it_was_begun(more, expected, train_project, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("featcal.train.loop.Trainer._adapt", stopped)
        ran = featcal(*words(tmp_path / "run", "--checkpoint-every", "0"))
    assert ran.code == 130
    assert (tmp_path / "run" / checkpoint.FILE).exists()
    said = refused(*words(tmp_path / "run", *more))
    assert "is of a run with" in said
    assert expected in said
    assert "choose another folder" in said


def test_a_folder_of_images_without_a_test_part(train_project, tmp_path):
    made.write_folders(tmp_path / "images", parts={"train": 12})
    command = ("train", "folder", "vit", "-o", "run", "--data", tmp_path / "images")
    assert "neither val nor test" in refused(*command, "--image-size", "8")


def test_one_command_at_a_time(train_project, tmp_path):
    with made_folder(tmp_path / "run"):
        assert "is being written by another process" in refused(*words(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_what_to_change_in_a_run_that_diverges_can_be_typed(train_project, tmp_path):
    run, other = tmp_path / "clip_norm lr (1)", tmp_path / "other"  # a name that is left alone
    ran = featcal(*words(run, "--lr", "1e30", "--checkpoint-every", "0"))
    assert ran.code == 2
    told = f"lower --lr (1e+30), or limit the gradients with --clip-norm; and remove {run}, which"
    assert told in " ".join(ran.err.split())
    assert (run / checkpoint.FILE).exists()
    ran = featcal(*words(other, "--lr", "1e30", "--published"))
    assert ran.err.rstrip().endswith("lower --lr (1e+30), or lower --clip-norm (2)")
    assert not other.exists()


def test_other_images_do_not_go_on(train_project, tmp_path, monkeypatch):
    featcal(*words(tmp_path / "run", "--lr", "1e30", "--checkpoint-every", "0"))

    def darker(*given, **options):
        found = load_images(*given, **options)
        return replace(found, train=replace(found.train, pixels=found.train.pixels // 2))

    monkeypatch.setattr("featcal.cli.train.load_images", darker)
    said = refused(*words(tmp_path / "run", "--lr", "1e30"))
    assert "is of a run with other images in train: choose another folder" in said


@pytest.mark.parametrize("more", [(), ("--no-pack",)])
def test_images_that_a_network_cannot_take(more, train_project):
    made.write_folders(train_project / "pets")
    given = ("train", "folder", "densenet121", "-o", "run", "--data", "pets", "--image-size", "4")
    small = ("--network-option", "growth=2", "--batch", "16", "--epochs", "1", *more)
    said = refused(*given, *small)
    assert "densenet121 cannot take images of 4 x 4 pixels (" in said
    assert said.endswith("): give another --image-size, or other options of the network\n")
    assert not (train_project / "run").exists()


def test_a_network_of_the_user_s_that_fails_says_what_it_was_given(train_project):
    made.write_folders(train_project / "pets")
    given = ("train", "folder", "train_nets:tiny", "-o", "run", "--data", "pets")
    with pytest.raises(RuntimeError) as caught:
        featcal(*given, "--image-size", "2", "--batch", "16", "--epochs", "1")
    told = "train_nets:tiny was given two images of 2 x 2 pixels, of shape (2, 3, h, w)"
    assert caught.value.__notes__ == [told]


def test_what_the_folder_cannot_give_is_said_of_the_options(train_project):
    parts = {"train": 24, "val": 6, "test": 6}
    made.write_folders(train_project / "pets", parts=parts)
    given = ("train", "folder", "train_nets:tiny", "-o", "run", "--data", "pets")
    said = refused(*given, "--image-size", "24", "--val", "10")
    assert "--val is 10, and pets has a val part of its own of 6 images: leave --val out" in said
    said = refused(*given, "--image-size", "40000")
    assert "above the limit of 16.0 GiB: give a smaller --image-size, fewer images, or" in said
