"""Our own trained networks as tables; every number here is made up (made_training.py)."""

import re

import made_training
import pytest
from made_training import content, row, run

from featcal.losses import LOSSES
from featcal.report.paper import (
    PAPER_LOSSES,
    Run,
    TrainingRuns,
    arrow,
    clipped,
    direction,
    heading_of,
    paper_table,
    paper_tables,
    settings,
    spread,
)

TRAIN_TIME, ACCURACY, LAYERS = map(paper_table, ("train-time", "accuracy", "layers"))


def grids(table, *runs):
    """The tables beside one of the paper's, of these runs or of the whole made file."""
    made = {**content(), "runs": list(runs)} if runs else content()
    return TrainingRuns(made).beside(table)


def cell(grid, row, heading):
    (line,) = [cells for cells in grid.rows if cells[0].startswith(row)]
    return line[grid.headings.index(heading)]


def noted(grid, letter):
    return dict(grid.notes).get(letter)


# --- the losses ------------------------------------------------------------------------------


def test_the_paper_names_the_same_losses_in_the_same_order():
    headings = dict.fromkeys(column[0] for column in TRAIN_TIME.columns)
    assert list(headings) == list(PAPER_LOSSES)
    main = grids(TRAIN_TIME)[0]
    pairs = [(loss, kind) for loss in headings for kind in ("base", "+clip (c)")]
    assert [tuple(h.split("\n")) for h in main.headings[1:]] == pairs
    assert main.together == 2


def test_every_default_loss_has_the_heading_it_has_itself():
    found = {loss.title: heading_of(repr(loss())) for loss in LOSSES.values()}
    # The paper's MMCE is a published form, not our default.
    assert {title: heading for title, heading in found.items() if heading} == {
        heading: heading for heading in PAPER_LOSSES if heading != "MMCE"
    }


@pytest.mark.parametrize(
    ("text", "heading"),
    [
        ("focal", "Focal Loss"),
        ("focal(gamma=3.0)", "Focal Loss"),
        ("focal(gamma=2.0)", ""),
        ("label_smoothing(alpha=0.05)", "LS-0.05"),
        ("label_smoothing(alpha=0.1)", ""),
        ("label_smoothing(spread='all')", ""),
        ("mmce(variant='weighted', form='published')", "MMCE"),
        ("mmce", ""),
        ("flsd(closed_form=True)", ""),
        ("dual_focal(gamma=2.6)", "Dual Focal Loss"),
        ("flsc", ""),
    ],
)
def test_a_loss_of_other_hyperparameters_is_another_loss(text, heading):
    assert heading_of(text) == heading


@pytest.mark.parametrize(
    ("text", "loss", "reduction"),
    [
        ("ce", "ce", "mean"),
        ("ce(reduction='sum')", "ce", "sum"),
        ("focal(gamma=2.0, reduction='sum')", "focal(gamma=2.0)", "sum"),
        ("focal(reduction='sum', gamma=2.0)", "focal(gamma=2.0)", "sum"),
    ],
)
def test_the_reduction_is_read_apart_from_the_loss(text, loss, reduction):
    found = Run({"loss": text, "recipe": {}})
    assert (found.loss, found.reduction) == (loss, reduction)


def test_of_the_forms_of_mmce_the_published_one_is_the_papers():
    published = "mmce(variant='weighted', form='published')"
    first, further, _ = grids(TRAIN_TIME, run(published, 0.02, 0.5), run("mmce", 0.03, 0.6))
    assert cell(first, "CIFAR-10", "MMCE\nbase") == "2.00"
    assert further.rows[0][:2] == ("mmce", "3.00")


def test_of_two_gammas_the_shorter_text_is_the_papers():
    first, further, _ = grids(
        TRAIN_TIME, run("dual_focal(gamma=2.65)", 0.02, 0.5), run("dual_focal", 0.03, 0.6)
    )
    assert cell(first, "CIFAR-10", "Dual Focal Loss\nbase") == "3.00"
    assert further.rows[0][0] == "dual_focal(gamma=2.65)"


def test_a_sum_is_no_second_seed_of_a_mean():
    first, further, _ = grids(
        TRAIN_TIME, run("ce", 0.02, 0.5), run("ce", 0.04, 0.6, seed=2, reduction="sum")
    )
    assert cell(first, "CIFAR-10", "Cross Entropy\nbase") == "2.00"
    assert further.rows[0][:2] == ("ce, sum", "4.00")


# --- cells -----------------------------------------------------------------------------------


def test_cells_have_the_value_the_threshold_and_an_arrow_where_it_is_decided():
    main = grids(TRAIN_TIME)[0]
    assert cell(main, "CIFAR-10 WRN-16-4", "Brier Loss\nbase") == "2.11"
    assert cell(main, "CIFAR-10 WRN-16-4", "Brier Loss\n+clip (c)") == "0.70 (0.981)▼"
    assert cell(main, "CIFAR-10 WRN-16-4", "LS-0.05\n+clip (c)") == "2.97 (no-op)"
    assert cell(main, "CIFAR-100 WRN-16-4", "Cross Entropy\n+clip (c)") == "3.07 (2.26)"
    assert cell(main, "CIFAR-10 ResNet-50", "MMCE\n+clip (c)") == "-"
    assert noted(main, "-") == "Not trained."
    assert "nothing is changed" in noted(main, "no-op")


def test_seeds_are_a_mean_and_half_their_range():
    main = grids(TRAIN_TIME)[0]
    assert cell(main, "CIFAR-10 WRN-16-4", "Cross Entropy\nbase") == "4.29 ± 0.10"
    assert cell(main, "CIFAR-10 WRN-16-4", "Cross Entropy\n+clip (c)") == "1.43 ± 0.03 (0.25)▼"
    assert noted(main, "±").startswith("Mean over 2 seeds")
    three = [row("none", ece) for ece in (0.01, 0.02, 0.06)]
    assert spread(three, "ece") == "3.00 ± 2.50"
    assert spread([], "ece") == spread([None], "ece") == "-"


def test_an_arrow_over_seeds_needs_all_of_them():
    better, worse, open_ = (
        row("clip", 0.01, baseline="none", verdict=v) for v in ("better", "worse", "undecided")
    )
    assert arrow([better, better], "ece") == "▼"
    assert arrow([worse], "ece") == "▲"
    assert arrow([better, open_], "ece") == arrow([better, worse], "ece") == arrow([], "ece") == ""


def test_an_arrow_against_another_recipe_is_not_shown_as_one_against_base():
    other = row("clip", 0.01, baseline="temperature")
    assert direction(other, "ece") == "down"
    assert arrow([other], "ece") == ""


def test_a_clip_that_acts_for_some_seeds_says_so():
    some = [row("clip", 0.02, c=0.5), row("clip", 0.02, c=None)]
    assert clipped(some, "ece") == "2.00 ± 0.00 (0.5/-)"


# --- what was trained how --------------------------------------------------------------------


@pytest.mark.parametrize("table", [TRAIN_TIME, ACCURACY, LAYERS], ids=lambda t: t.name)
def test_no_table_can_be_taken_for_one_of_350_epochs(table):
    for grid in grids(table):
        assert re.search(r"\d+ epochs, the paper's have 350\)", grid.title)
        first = grid.notes[0][1]
        for word in ("batch 128", "learning rate 0.1", "rate by steps", "bfloat16", "seed"):
            assert word in first
        assert "gradients not clipped" in first
        assert "NVIDIA H200" in noted(grid, "made")


def test_each_way_of_training_has_its_own_row_and_note():
    longer = run("ce", 0.03, 0.4, epochs=350, clip_norm=2.0)
    main = grids(TRAIN_TIME, run("ce", 0.02, 0.5), longer)[0]
    assert [line[0] for line in main.rows] == ["CIFAR-10 WRN-16-4 [1]", "CIFAR-10 WRN-16-4 [2]"]
    assert "40 to 350 epochs" in main.title
    assert noted(main, "1").startswith("40 epochs, the paper's have 350; ")
    assert noted(main, "2").startswith("350 epochs; ")
    assert "gradient norm at most 2" in noted(main, "2")
    assert "(350 epochs)" in grids(TRAIN_TIME, longer)[0].title


def test_normalisation_and_mixing_are_told():
    odd = run("ce", 0.02, 0.5, mixup=0.2)
    odd["test_norm"] = "reference"
    told = grids(TRAIN_TIME, odd)[0].notes[0][1]
    assert "mixup 0.2" in told
    assert "normalised as published" in told


def test_the_note_on_losses_has_their_texts_and_sums():
    summed = [run(loss, 0.02, 0.5, reduction="sum") for loss in ("ce", "flsd")]
    (main, _) = grids(TRAIN_TIME, *summed)
    assert noted(main, "losses").endswith("FLSD-53 is flsd; each is summed over a batch.")
    (main, _) = grids(TRAIN_TIME, *summed, run("brier", 0.02, 0.5))
    assert noted(main, "losses").endswith("; Cross Entropy and FLSD-53 summed over a batch.")
    assert "focal(gamma=3.0); " in noted(grids(TRAIN_TIME)[0], "losses")


def test_rows_stand_in_the_order_of_the_paper_and_unknown_networks_last():
    runs = [
        run("ce", 0.02, 0.5, dataset=dataset, network=network)
        for dataset in ("tiny", "cifar100", "cifar10")
        for network in ("mine", "wrn26x10", "resnet50")
    ]
    found = [setting.network for setting in settings(map(Run, runs))]
    assert found[:3] == ["CIFAR-10 ResNet-50", "CIFAR-10 Wide-Resnet-26", "CIFAR-10 mine"]
    assert found[-1] == "tiny mine"


# --- the other tables ------------------------------------------------------------------------


def test_further_losses_have_a_table_of_their_own():
    _, further, *_ = grids(TRAIN_TIME)
    assert "further losses, CIFAR-10 WRN-16-4" in further.title
    assert further.rows == (("adafocal", "1.01", "0.34 (1.91)▼"),)
    alone = grids(TRAIN_TIME, run("soft_ece", 0.02, 0.5))
    assert [len(grid.rows) for grid in alone] == [1, 1]


def test_the_footnote_has_the_seeds_of_the_rows_above_it():
    first, further, *_ = grids(TRAIN_TIME)
    assert any(text.endswith("seeds 1 and 2.") for _, text in first.notes)
    assert noted(further, "1").endswith("seed 1.")
    second = run("ce", 0.04, 0.25, network="resnet50", seed=2)
    (layers,) = grids(LAYERS, run("ce", 0.04, 0.23, network="resnet50"), second)
    assert noted(layers, "1").endswith("seed 1.")


def test_accuracy_of_each_loss_and_of_the_clip_on_cross_entropy():
    main = grids(ACCURACY)[0]
    assert main.headings[1:] == (*PAPER_LOSSES, "clip after\nCross Entropy")
    assert cell(main, "CIFAR-10 ResNet-50", "Cross Entropy") == "93.12"
    assert main.rows[0][-1] == "93.00"
    made = run("ce", 0.02, 0.5)
    worse = {"baseline": "none", "delta": -0.0012, "verdict": "worse"}
    made["results"][1]["differences"]["accuracy"] = worse
    assert grids(ACCURACY, made)[0].rows[0][-1] == "93.00 ▼"


def test_every_run_stands_beside_a_temperature():
    first, second, third = TrainingRuns(content()).temperatures()
    assert first.title.startswith("CIFAR-10 ResNet-50 (60 epochs")
    assert len(second.rows) == len(made_training.LOSSES) + 2
    assert [line[0] for line in second.rows[:2]] == [
        "Cross Entropy, seed 1",
        "Cross Entropy, seed 2",
    ]
    names = ("none", "clip", "temperature", "clip | temperature")
    assert third.headings[1:] == tuple(f"{m}\n{name}" for m in ("ECE %", "NLL") for name in names)
    assert first.rows[0][1:3] == ("4.34 [4.14, 4.64]", "1.45 [1.25, 1.75] ▼")
    assert first.rows[0][5:7] == ("0.3170", "0.1723 ▼")
    assert noted(first, "▼ ▲").endswith("comparing clip with none.")
    assert noted(third, "▼ ▲") is None


def test_a_joint_fit_is_shown_where_there_is_one():
    made = run("ce", 0.02, 0.5)
    made["results"].append(
        row("clip | temperature", 0.011, mode="joint", baseline="temperature", verdict="worse")
    )
    (grid,) = TrainingRuns({**content(), "runs": [made, run("flsd", 0.02, 0.5)]}).temperatures()
    assert cell(grid, "Cross Entropy", "ECE %\njointly") == "1.10 [0.90, 1.40] ▲"
    assert cell(grid, "FLSD", "NLL\njointly") == "-"
    assert "clip | temperature with temperature" in noted(grid, "▼ ▲")


def test_layers_stand_beside_the_papers_where_the_network_is_its_own():
    (grid,) = grids(LAYERS)
    assert "loss ce, seed 1" in grid.title
    table = dict((line[0], line[1:]) for line in grid.rows)
    assert table["no clipping"] == ("-", "-", "4.34", "95.05", "4.34", "95.05")
    assert table["last layer"] == ("logits", "4.9", "1.21", "94.62", "1.21(4.98)", "94.62")
    assert table["penultimate"][:2] == ("features", "0.231")
    assert table["penultimate"][-2:] == ("1.10(0.23)", "94.93")
    assert table["antepenultimate"][-2:] == ("4.42(0.35)", "94.95")
    assert table["pre-antepenultimate"][:2] == ("layer2", "no-op")
    assert table["pre-antepenultimate"][-2:] == ("14.42(0.41)", "78.12")


def test_layers_of_another_network_stand_alone():
    made = content()
    made["layers"][0]["network"] = "wrn26x10"
    made["layers"][0]["rows"][0]["label"] = "something else"
    (grid,) = TrainingRuns(made).layers(LAYERS)
    assert grid.headings == ("", "layer", "c", "ECE", "accuracy")
    assert "epochs" not in grid.title  # no run of it is in the file
    made["layers"][0]["network"] = "resnet50"
    assert TrainingRuns(made).layers(LAYERS)[0].rows[0][-2:] == ("-", "-")


@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_a_narrow_terminal(width):
    for table in (TRAIN_TIME, ACCURACY, LAYERS):
        for grid in grids(table):
            for block in grid.blocks(width):
                columns = zip(block.headings, *block.rows, strict=True)
                widest = (max(len(x) for c in col for x in c.split("\n")) for col in columns)
                assert sum(w + 3 for w in widest) + 1 <= width


def test_other_tables_get_nothing():
    names = {table.name for table in paper_tables() if grids(table)}
    assert names == {"train-time", "accuracy", "layers"}
