"""Log-odds, levels and look-ups against numpy and naive loops, in every precision, exported."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal.methods.score_tables import (
    FARTHEST,
    Levels,
    class_log_odds,
    equal_mass,
    halfway,
    lines,
    locate,
    log_odds,
    odds_of,
    steps,
)

values32 = st.floats(-20, 20, width=32)
few = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=60)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, dtype=np.float64)))


def test_log_odds_are_the_plain_formula():
    logits = drawn(200, 6) * 3
    p = logits.double().softmax(1)
    every = class_log_odds(logits)
    torch.testing.assert_close(every.double(), p.log() - torch.log1p(-p), rtol=1e-5, atol=1e-5)
    assert torch.equal(log_odds(logits), every.amax(1))
    share = np.array([0.1, 0.5, 0.999])
    np.testing.assert_allclose(sigmoid(odds_of(share)), share, rtol=1e-12)


def test_a_probability_that_rounds_to_one_keeps_its_place():
    logits = torch.tensor([[30.0, 0.0], [31.0, 0.0], [90.0, 0.0]])
    assert logits.softmax(1)[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert class_log_odds(logits).T.tolist() == [[30, 31, 90], [-30, -31, -90]]


def test_huge_logits_and_one_class_end_at_the_farthest_values():
    every = class_log_odds(drawn(200, 6) * 1e30)
    assert every.half().isfinite().all()
    assert every.abs().max() == FARTHEST
    assert log_odds(drawn(3, 1)).tolist() == [FARTHEST] * 3
    assert class_log_odds(torch.zeros(0, 4)).shape == (0, 4)


@given(few, st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_levels_count_what_a_loop_counts_and_are_cut_at_numpys_quantiles(pairs, bins):
    scores, right = zip(*pairs, strict=True)
    levels = Levels.of(torch.tensor(scores, dtype=torch.float32), torch.tensor(right))
    assert levels.at.tolist() == sorted({float(score) for score in scores})
    for at, rows, hits in zip(levels.at, levels.rows, levels.hits, strict=True):
        mine = [hit for score, hit in pairs if score == at]
        assert (rows, hits) == (len(mine), sum(mine))
    cuts = equal_mass(levels, bins)
    rows, hits = levels.parts(cuts)
    assert len(rows) == len(cuts) + 1 <= bins
    assert rows.min() > 0
    assert (rows.sum(), hits.sum()) == (len(pairs), sum(right))
    # The same rows are together whether the quantile itself is the edge or a place beside it.
    edges = [float(np.quantile(np.array(scores, float), j / bins)) for j in range(1, bins)]
    theirs = np.searchsorted(np.round(edges, 9), np.round(levels.at, 9))
    ours = np.searchsorted(levels.edges(cuts), levels.at)
    joined = [np.flatnonzero(np.diff(bin_of)).tolist() for bin_of in (theirs, ours)]
    assert joined[0] == joined[1]


def test_halfway_separates_even_neighbours():
    low = np.float32([1.0, -3.0, 0.0, 16383.999])
    high = np.nextafter(low, np.float32(np.inf))
    edges = halfway(low.astype(np.float64), high.astype(np.float64))
    assert (edges == edges.astype(np.float32)).all()
    assert (low <= edges).all()
    assert (edges < high).all()


@given(st.lists(values32, min_size=1, max_size=20), st.lists(values32, max_size=9))
@settings(max_examples=60, deadline=None)
def test_locate_is_searchsorted(at, edges):
    at, edges = torch.tensor(at), torch.tensor(sorted(edges))
    expected = np.searchsorted(edges.numpy(), at.numpy())
    assert locate(at, edges).tolist() == expected.tolist()
    columns = locate(at[:, None].expand(-1, 3), edges.expand(3, -1))
    assert columns.tolist() == np.stack([expected] * 3, 1).tolist()


@pytest.mark.parametrize("columns", [False, True])
def test_lines_are_numpys(columns):
    nodes, values, at = drawn(3, 9).sort(1).values, drawn(3, 9, seed=1), drawn(100, 3, seed=2) * 2
    found = lines(at, nodes, values) if columns else lines(at, nodes[0], values[0])
    for c in range(3):
        row = c if columns else 0
        expected = np.interp(at[:, c].double(), nodes[row].double(), values[row].double())
        np.testing.assert_allclose(found[:, c], expected, atol=1e-5)


def test_equal_nodes_make_a_step_and_steps_are_closed_on_the_right():
    nodes, values = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    at = torch.tensor([0.5, 1.0, 1.0001, 2.0, 3.0])
    assert lines(at, nodes, values).tolist() == [0, 0, 1, 1, 1]
    assert lines(at, nodes, values, probable=True).tolist() == [0, 0, 1, 1, 1]
    same = torch.full((2,), 3.0)
    for probable in (False, True):
        assert lines(at, same, same, probable=probable).tolist() == [3.0] * 5
    assert steps(at, torch.tensor([1.0, 2.0]), torch.arange(3.0)).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("shift", [-60, -9, 0, 9, 14])
def test_lines_in_the_probability_are_numpys_of_probabilities(shift):
    nodes, values = drawn(9).sort().values.double() + shift, drawn(9, seed=1).double()
    at = drawn(100, seed=2).double() * 2 + shift
    found = lines(at, nodes, values, probable=True)
    nodes, at = nodes.float().double(), at.float().double()
    expected = np.interp(sigmoid(at), sigmoid(nodes), values)
    if shift > 0:  # there the complement is exact, and a line in 1 - p is a line in p
        expected = np.interp(sigmoid(-at), sigmoid(-nodes)[::-1], values.numpy()[::-1])
    np.testing.assert_allclose(found, expected, atol=2e-5)
