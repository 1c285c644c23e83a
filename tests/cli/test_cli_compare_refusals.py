"""What featcal compare refuses: exit code 2, one sentence naming option, value and remedy."""

import pytest
from cli_cases import arrays, done, packed, refused, tree

FEW = ("--resamples", "100")


def compare(*args):
    return done("compare", *args, *(() if "--resamples" in args else FEW))


REFUSED = {
    "one resample": (["--resamples", "1"], ["--resamples is 1", "100 to 10000"]),
    "resamples below 0": (["--resamples", "-5"], ["--resamples is -5", "0 for none"]),
    "resamples no number": (["--resamples", "few"], ["--resamples", "few"]),
    "one fold": (["--folds", "1"], ["--folds", "1"]),
    "too many folds": (["--folds", "241"], ["--folds is 241", "val has 240 rows", "at most 240"]),
    "folds and test": (
        ["--folds", "5", "--test-split", "test"],
        ["--folds 5", "leave out --test-split test"],
    ),
    "negative seed": (["--seed", "-1"], ["--seed", "-1"]),
    "unknown metric": (["--metric", "ecce"], ["--metric", "ecce", "classwise_ece"]),
    "unknown order": (["--sort", "ecce"], ["--sort", "ecce", "given"]),
    "unknown format": (["--format", "xml"], ["--format", "xml", "latex"]),
    "two formats": (["--json", "--format", "csv"], ["--json and --format csv", "give one"]),
    "bad baseline": (["--baseline", "klip"], ["'klip'"]),
    "paper and recipes": (["clip", "--paper"], ["--paper", "'clip'", "leave out"]),
    "paper and baseline": (["--paper", "--baseline", "none"], ["--paper", "--baseline none"]),
    "paper and sort": (["--paper", "--sort", "ece"], ["--paper", "--sort ece"]),
    "no such train split": (["--train-split", "no"], ["'no'", "val, test"]),
}


@pytest.mark.parametrize(("flags", "words"), REFUSED.values(), ids=REFUSED)
def test_bad_options(pack, flags, words):
    said = refused("compare", pack, *flags)
    assert all(word in said for word in words), said


def test_recipes_that_need_training_rows(pack, tmp_path):
    for command in (("compare", pack, "density"), ("fit", pack, "density", "-o", tmp_path / "c")):
        assert "--train-split" in refused(*command)
    assert tree(tmp_path) == {}
    made = arrays()
    made |= {f"train_{key}": made[f"val_{key}"][:100] for key in ("features", "labels")}
    whole = packed(tmp_path, made)
    assert compare(whole, "density", "--train-split", "train", "--resamples", "0").out
    assert done("fit", whole, "density", "--train-split", "train", "-o", tmp_path / "c").out
    for flags in (("--train-split", "val"), ("--train-split", "test")):
        assert "trained on" in refused("compare", whole, "density", *flags)
    said = refused("fit", whole, "density", "--train-split", "val", "-o", tmp_path / "d")
    assert "--train-split is 'val'" in said


def test_a_metric_named_twice_is_shown_once(pack):
    text = compare(pack, "none", "--metric", "ece", "--metric", "ece", "--format", "csv").out
    assert len(text.splitlines()) == 2


def test_a_file_whose_name_tells_no_format(pack, tmp_path):
    for name in ("out", "out.xlsx"):
        said = refused("compare", pack, "-o", tmp_path / name)
        assert name in said
        assert "--format" in said
    assert tree(tmp_path) == {}


def test_one_split_for_both_names_the_way_out(pack):
    assert "--folds 5" in refused("compare", pack, "--test-split", "val")


def test_a_pack_of_one_split_can_be_cross_fitted(tmp_path):
    made = {key: value for key, value in arrays().items() if not key.startswith("test")}
    one = packed(tmp_path, made)
    said = refused("compare", one)
    assert said.endswith(
        "has no split 'test': choose one of val, or cross-fit val with --folds 5\n"
    )
    said = refused("compare", one, "--fit-split", "train", "--folds", "5")
    assert "--folds" not in said


def test_the_way_out_is_one_of_the_command_line(pack, logits_pack, tmp_path):
    (tmp_path / "out.csv").write_text("")
    for args in (["compare", pack], ["fit", pack, "temperature"], ["predict", pack, "cal"]):
        said = refused(*args, "-o", tmp_path / "out.csv")
        assert said.endswith("choose another name, or overwrite it with --force\n")
    said = refused("compare", logits_pack, "group")
    assert said.endswith("or use a method that needs no features\n")
