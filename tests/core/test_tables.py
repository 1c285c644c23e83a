"""Look-ups against numpy, one table or one a column, in every precision, exported or not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from featcal.methods.score_tables import lines, locate, probable_lines, sound, stacked, steps

values32 = st.floats(-20, 20, width=32)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, dtype=np.float64)))


@given(st.lists(values32, min_size=1, max_size=20), st.lists(values32, max_size=9))
@settings(max_examples=100, deadline=None)
def test_locate_is_searchsorted(at, edges):
    at, edges = torch.tensor(at), torch.tensor(sorted(edges))
    expected = np.searchsorted(edges.numpy(), at.numpy())
    assert locate(at, edges).tolist() == expected.tolist()
    columns = locate(at[:, None].expand(-1, 3), edges.expand(3, -1))
    assert columns.tolist() == np.stack([expected] * 3, 1).tolist()


@pytest.mark.parametrize("edges", [0, 1, 2, 3, 7, 8, 9, 64])
def test_each_column_has_its_own_edges(edges):
    at, table = drawn(50, 4), drawn(4, edges, seed=1).sort(1).values
    found = locate(at, table)
    for column in range(4):
        expected = np.searchsorted(table[column].numpy(), at[:, column].numpy())
        assert found[:, column].tolist() == expected.tolist()


def test_steps_are_closed_on_the_right():
    edges, values = torch.tensor([0.0, 1.0]), torch.tensor([5.0, 6.0, 7.0])
    at = torch.tensor([-1.0, 0.0, 0.5, 1.0, 1.5])
    assert steps(at, edges, values).tolist() == [5, 5, 6, 6, 7]
    both = steps(at[:, None].expand(-1, 2), edges.expand(2, -1), torch.stack([values, -values]))
    assert both[:, 1].tolist() == [-5, -5, -6, -6, -7]


def test_lines_are_numpys():
    nodes, values = drawn(9).sort().values, drawn(9, seed=1)
    at = drawn(100, seed=2) * 2
    expected = np.interp(at.double(), nodes.double(), values.double())
    np.testing.assert_allclose(lines(at, nodes, values), expected, atol=1e-5)


def test_lines_of_columns_are_numpys():
    nodes, values = drawn(3, 9).sort(1).values, drawn(3, 9, seed=1)
    at = drawn(100, 3, seed=2) * 2
    found = lines(at, nodes, values)
    for c in range(3):
        expected = np.interp(at[:, c].double(), nodes[c].double(), values[c].double())
        np.testing.assert_allclose(found[:, c], expected, atol=1e-5)


def test_equal_nodes_make_a_step():
    nodes, values = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    at = torch.tensor([0.5, 1.0, 1.0001, 2.0, 3.0])
    assert lines(at, nodes, values).tolist() == [0, 0, 1, 1, 1]
    assert probable_lines(at, nodes, values).tolist() == [0, 0, 1, 1, 1]
    same = torch.full((2,), 3.0)
    assert lines(at, same, same).tolist() == probable_lines(at, same, same).tolist() == [3.0] * 5


@pytest.mark.parametrize("shift", [-60, -9, 0, 9, 14])
def test_lines_in_the_probability_are_numpys_of_probabilities(shift):
    nodes, values = drawn(9).sort().values.double() + shift, drawn(9, seed=1).double()
    at = drawn(100, seed=2).double() * 2 + shift
    found = probable_lines(at, nodes, values)
    nodes, at = nodes.float().double(), at.float().double()
    expected = np.interp(sigmoid(at), sigmoid(nodes), values)
    if shift > 0:  # there the complement is exact, and a line in 1 - p is a line in p
        expected = np.interp(sigmoid(-at), sigmoid(-nodes)[::-1], values.numpy()[::-1])
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("far", [1e3, 2.0**14])
def test_lines_in_the_probability_stay_finite_far_out(far):
    nodes = torch.tensor([-far, -far / 2, 0.0, far / 2, far])
    values = torch.arange(5.0)
    at = torch.linspace(-far, far, 101)
    found = probable_lines(at, nodes, values)
    assert found.isfinite().all()
    assert (found.diff() >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_tables_and_scores_of_any_precision_are_looked_up_in_float32(dtype):
    edges, values = torch.tensor([0.1, 0.2]).to(dtype), torch.tensor([1.0, 2.0, 3.0]).to(dtype)
    at = torch.tensor([0.1, 0.2], dtype=torch.float64)
    found = steps(at, edges.float(), values)
    assert found.dtype == torch.float32
    assert torch.equal(found, steps(at.float(), edges.float(), values.float()))


def test_stacked_tables_say_what_each_said():
    edges = [np.array([0.0, 1.0]), np.array([0.5]), np.array([])]
    values = [np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0]), np.array([6.0])]
    at = torch.linspace(-2, 3, 41)
    found = steps(at[:, None].expand(-1, 3), stacked(edges), stacked(values))
    for column, (edge, value) in enumerate(zip(edges, values, strict=True)):
        expected = value[np.searchsorted(edge, at.numpy())]
        assert found[:, column].tolist() == expected.tolist()
    assert stacked([np.array([]), np.array([])]).shape == (2, 0)


EMPTY, ONE, TWO, THREE = torch.empty(0), torch.ones(1), torch.arange(2.0), torch.arange(3.0)


@pytest.mark.parametrize(
    ("at", "values", "options", "expected"),
    [
        (EMPTY, EMPTY, {"more": 1}, True),
        (EMPTY, ONE, {"more": 1}, True),
        (TWO, THREE, {"more": 1}, True),
        (TWO, TWO, {"more": 0}, True),
        (TWO, TWO, {"more": 1}, False),
        (ONE, ONE, {"more": 0}, False),
        (-TWO, TWO, {"more": 0}, False),
        (TWO, TWO / 0, {"more": 0}, False),
        (TWO * torch.nan, TWO, {"more": 0}, False),
        (TWO[None], TWO[None], {"more": 0, "dims": 2}, True),
        (TWO[None], TWO[None], {"more": 0}, False),
        (torch.empty(4, 0), torch.ones(4, 1), {"more": 1, "dims": 2}, True),
        (TWO.expand(2, 2), TWO.expand(4, 2), {"more": 0, "dims": 2}, False),
        (torch.empty(0, 2), THREE.expand(4, 3), {"more": 1, "dims": 2}, False),
    ],
)
def test_sound_tables(at, values, options, expected):
    assert sound(at, values, **options) is expected


class Looked(nn.Module):
    def __init__(self, look_up, nodes, values):
        super().__init__()
        self.look_up = look_up
        self.register_buffer("nodes", nodes)
        self.register_buffer("values", values)

    def forward(self, at):
        return self.look_up(at, self.nodes, self.values)


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("look_up", [steps, lines, probable_lines])
def test_exported_with_a_free_number_of_rows(look_up, columns):
    nodes, values = drawn(3, 7).sort(1).values, drawn(3, 7 + (look_up is steps), seed=1)
    module = Looked(look_up, *((nodes, values) if columns else (nodes[0], values[0])))
    at = drawn(40, 3, seed=2)
    shapes = ({0: torch.export.Dim("n", min=2)},)
    program = torch.export.export(module, (at[:5],), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(at), module(at))


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("look_up", "columns"), [(steps, False), (lines, True), (probable_lines, False)]
)
def test_onnx_gives_the_same(look_up, columns):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    nodes, values = drawn(3, 7).sort(1).values, drawn(3, 7 + (look_up is steps), seed=1)
    module = Looked(look_up, *((nodes, values) if columns else (nodes[0], values[0])))
    at = drawn(40, 3, seed=2)
    shapes = ({0: torch.export.Dim("n", min=2)},)
    program = torch.onnx.export(
        module, (at[:5],), dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: at.numpy()})
    np.testing.assert_allclose(found, module(at), atol=1e-5)
