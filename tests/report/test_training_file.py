"""Our own trained networks for programs, and a file that is not one; every number is made up."""

import copy

import pytest
from made_training import content, written

from featcal import InputError
from featcal.report.paper import TrainingRuns, paper_table, paper_tables

TRAIN_TIME, ACCURACY, LAYERS = map(paper_table, ("train-time", "accuracy", "layers"))


# --- for programs ----------------------------------------------------------------------------


def test_values_are_in_percent_with_thresholds_and_arrows():
    lines = list(TrainingRuns(content()).values(TRAIN_TIME))
    assert len(lines) == 4 * len(content()["runs"])
    clip = lines[1]
    assert clip["source"] == "our cifar10 wrn16x4, 40 epochs, seed 1"
    assert (clip["row"], clip["column"]) == ("ce", "clip")
    assert clip["value"] == pytest.approx(100 * 0.0419 / 3)
    assert (clip["threshold"], clip["arrow"]) == (0.245, "down")
    assert lines[0]["low"] == pytest.approx(3.99)
    idle = next(x for x in lines if (x["row"], x["column"]) == ("label_smoothing", "clip"))
    assert (idle["threshold"], idle["arrow"]) == (float("inf"), "")
    accuracy = list(TrainingRuns(content()).values(ACCURACY))
    assert accuracy[0]["value"] == pytest.approx(93.12)


def test_values_of_layers():
    lines = list(TrainingRuns(content()).values(LAYERS))
    assert len(lines) == 10
    assert lines[2] == {
        **{"source": "our cifar10 resnet50, ce, seed 1", "row": "last layer"},
        **{"column": "ECE (c)", "value": pytest.approx(1.21), "threshold": 4.9},
    }
    assert "threshold" not in lines[0]


def test_json_is_in_fractions_and_without_curves():
    found = TrainingRuns(content()).as_json(TRAIN_TIME)["training"]
    assert found["runs"][0]["results"][0]["metrics"]["ece"] == 0.0419
    assert "curve" not in found["runs"][0]
    assert found["hardware"] == {"device": "NVIDIA H200"}
    assert found["layers"] == []
    layers = TrainingRuns(content()).as_json(LAYERS)["training"]
    assert (layers["runs"], layers["layers"]) == ([], content()["layers"])


# --- reading ---------------------------------------------------------------------------------


def test_a_written_file_is_read(tmp_path):
    assert TrainingRuns.read(written(tmp_path)).content == content()
    for table in paper_tables():
        assert TrainingRuns.none().beside(table) == []


def test_a_missing_file_is_refused_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(InputError, match=r"holds no training\.json.*train_grid\.py"):
        TrainingRuns.read(tmp_path)


def broken(change):
    made = copy.deepcopy(content())
    change(made)
    return made


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda made: made.pop("layers"), "lacks layers"),
        (lambda made: made.update(runs=None), "holds something else"),
        (lambda made: made["runs"][0].pop("recipe"), "KeyError: 'recipe'"),
        (lambda made: made["runs"][0].update(test_norm="odd"), "KeyError: 'odd'"),
        (lambda made: made["runs"][0]["results"][0].update(metrics={}), "holds something else"),
        (lambda made: made["runs"][0].update(loss=3), "holds something else"),
        (lambda made: made["layers"][0].update(rows=[{}]), "holds something else"),
        (lambda made: made["runs"].append(made["runs"][0]), "wrn16x4.*ce is in the file twice"),
    ],
)
def test_what_is_of_another_kind_is_refused(tmp_path, change, why):
    with pytest.raises(InputError, match=why):
        TrainingRuns.read(written(tmp_path, broken(change)))
