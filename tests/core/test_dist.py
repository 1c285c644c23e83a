"""Reductions among three processes that share nothing but a port, beside plain sums and joins."""

import json

import pytest
import torch

from featcal.core import dist, fit
from featcal.core.batch import Batch, Through, as_data, unchecked
from featcal.core.checks import InputError
from featcal.core.fit import Counted, kept_everywhere, rows_asked, survey, together
from featcal.core.gradient import gathered, minimize
from featcal.core.sample import Folds, hashed_sample
from featcal.metrics import Bins, Ordered, ProperSums
from forked import ended, started

RANKS, COUNTS = 3, (4, 0, 3)  # rows of each rank
FEATURES = torch.arange(28.0).view(7, 4).sin()
LOGITS = torch.arange(21.0).view(7, 3).cos()
LABELS = torch.tensor([0, 1, 2, 2, 1, 0, 0])


def part(values, rank):
    return values.split(COUNTS)[rank]


def shared(own, facts, numbers):
    """What a rank fits to where so many numbers are few: worlds, types and values."""
    fit.FEW_NUMBERS = numbers
    with together([own], facts) as data:
        (batch,) = data
        parts = batch.logits, batch.labels, batch.features
        return dist.world(), [str(each.dtype) for each in parts], [each.tolist() for each in parts]


def found(rank):
    """What one rank gets to know, ready for JSON."""
    logits, labels, features = (part(each, rank) for each in (LOGITS, LABELS, FEATURES))
    own = Batch(logits, labels, features)
    facts = survey(as_data(own), None)
    counted = Counted(lambda rows: rows[:, :3])
    if len(own):
        counted(features)
    rows = Ordered.of(logits=logits.double() if rank == 2 else logits, labels=labels)
    sample = hashed_sample([own], 5, width=4, classes=3)
    view = Through([own], lambda batch: batch.logits, keep=0 if rank == 2 else 10**6)
    list(view)
    squares = minimize(lambda at, batch: ((batch.logits - at) ** 2).sum(), torch.zeros(3), [own], 7)
    folds = Folds.shuffled([own], 2, 7, seed=0, first_row=sum(COUNTS[:rank]))
    try:
        survey([unchecked(logits, labels + 3 * (rank == 0), features)], None)
        refused = ""
    except InputError as error:
        refused = str(error)
    return {
        "place": [dist.active(), dist.world(), dist.rank()],
        "total": dist.total(torch.tensor([1.0, rank])).tolist(),
        "largest": dist.largest(torch.tensor([rank, -rank])).tolist(),
        "ends": dist.ends(logits.flatten()),
        "rows": dist.gather(features).tolist(),
        "gathered": [each.tolist() for each in gathered([own], 3)],
        "facts": [facts.rows, facts.classes, facts.width],
        "no features": survey(as_data(Batch(logits, labels)), None).width,
        "refused": refused,
        "asked": rows_asked(counted),
        "kept": kept_everywhere(type("Problem", (), {"data": view})),
        "confidence": rows.reduced().confidence.tolist(),
        "wide": str(rows.reduced().confidence.dtype),
        "nll": ProperSums.of(logits=logits, labels=labels).reduced().nll,
        "ece": Bins.of(logits=logits, labels=labels).reduced().ece,
        "sample": [each.tolist() for each in (sample.features, sample.labels, sample.logits)],
        "lowest": squares.at.tolist(),
        "sizes": folds.sizes(),
        "few": shared(own, facts, 7 * (3 + 4)),
        "many": shared(own, facts, 7 * (3 + 4) - 1),
        "turns": [block.tolist() for block in dist.in_turn(logits.split(2)[: len(logits)], 3)],
    }


def on_rank(rank, folder):
    with dist.processes(gpu=False):
        (folder / f"{rank}.json").write_text(json.dumps(found(rank)))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each of three ranks found; forked, since a new interpreter takes seconds for torch."""
    folder = tmp_path_factory.mktemp("ranks")
    children = started(RANKS, lambda rank: on_rank(rank, folder), folder)
    for code, said in ended(children, folder):
        assert code == 0, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_rank_learns_of_all_rows(answers):
    whole = Ordered.of(logits=LOGITS, labels=LABELS)
    sums = ProperSums.of(logits=LOGITS, labels=LABELS)
    types, rows = ["torch.float32", "torch.int64", "torch.float32"], (LOGITS, LABELS, FEATURES)
    for rank, got in enumerate(answers):
        assert got["few"] == [1, types, [each.tolist() for each in rows]]
        assert got["many"] == [RANKS, types, [part(each, rank).tolist() for each in rows]]
        assert got["place"] == [True, RANKS, rank]
        assert got["total"] == [3.0, 3.0]
        assert got["largest"] == [2, 0]
        assert got["ends"] == [float(LOGITS.min()), float(LOGITS.max())]
        assert got["rows"] == FEATURES.tolist()
        assert got["gathered"] == [LOGITS.tolist(), LABELS.tolist()]
        assert got["facts"] == [7, 3, 4]
        assert got["no features"] == 0
        assert got["asked"] == 7
        assert got["kept"] is False  # one rank could not keep its logits
        assert got["confidence"] == pytest.approx(whole.confidence.tolist(), abs=1e-6)
        assert got["wide"] == "torch.float64"
        assert got["nll"] == pytest.approx(sums.nll)
        assert got["ece"] == pytest.approx(Bins.of(logits=LOGITS, labels=LABELS).ece)
        assert got["lowest"] == pytest.approx(LOGITS.mean(0).tolist(), abs=1e-6)
        assert got["sizes"] == [4, 3]
    in_turn = [LOGITS[rows].tolist() for rows in (slice(2), slice(4, 6), slice(2, 4), slice(6, 7))]
    assert [got["turns"] for got in answers] == [in_turn, [], []]


def test_ranks_agree_on_a_sample_and_leave_a_refusal_together(answers):
    alone = hashed_sample([Batch(LOGITS, LABELS, FEATURES)], 5, width=4, classes=3)
    expected = [each.tolist() for each in (alone.features, alone.labels, alone.logits)]
    assert [got["sample"] for got in answers] == [expected] * RANKS
    said = [got["refused"] for got in answers]
    assert "labels are outside 0..2" in said[0]
    assert said[1] == said[2] != ""
    assert "another process" in said[1]


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "3"}, (0, 1)),  # left over from a job that has ended
        ({"WORLD_SIZE": "1", "RANK": "3"}, (0, 1)),
        ({"WORLD_SIZE": "2", "RANK": "1"}, (1, 2)),
        ({"WORLD_SIZE": "2"}, (0, 2)),
    ],
)
def test_torchrun_tells_a_process_its_place(said, place, monkeypatch):
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in said.items():
        monkeypatch.setenv(key, value)
    assert dist.launched() == place


def test_a_process_that_has_joined_no_others_runs_and_speaks_for_itself(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with dist.processes(gpu=False):
        assert not dist.active()
        assert dist.speaks(RuntimeError(), 0) is True
    monkeypatch.setenv("WORLD_SIZE", "2")
    for key in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    with (
        pytest.raises(InputError, match=r"WORLD_SIZE is 2, .*: start the processes with torchrun"),
        dist.processes(gpu=False),
    ):
        pass


def test_a_process_alone_is_the_whole():
    values = torch.arange(3.0)
    assert (dist.active(), dist.world(), dist.rank()) == (False, 1, 0)
    assert dist.total(values) is dist.largest(values) is dist.gather(values) is values
    assert list(dist.in_turn([values], 1)) == [values]
    assert dist.ends(values) == (0.0, 2.0)
    assert dist.ends(values[:0]) == (float("inf"), float("-inf"))
