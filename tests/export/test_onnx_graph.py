"""The graph: every value has the name it should, and no other has it."""

import onnx_ir
import torch
from torch import nn

from featcal.export.inputs import LOGITS_ALONE, Inputs
from featcal.export.onnx import _keep_constants, _name, built_graph

ROWS = torch.ones(3, 4)


def built(model):
    return built_graph(model, Inputs.of(model, ROWS), LOGITS_ALONE)


def test_a_value_inside_makes_room_for_the_names_outside():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = built(model).graph
    inner = next(iter(graph)).outputs[0]
    inner.name = "logits"
    _name(graph, Inputs.of(model, ROWS), ["logits"])
    assert inner.name == "logits_inner"
    names = [value.name for node in graph for value in node.outputs]
    assert len(set(names)) == len(names)
    assert [value.name for value in graph.outputs] == ["logits"]
    assert [value.name for value in graph.inputs] == ["input"]


def test_sizes_have_one_name_everywhere():
    graph = built(nn.Linear(4, 2)).graph
    shapes = {value.name: value.shape for node in graph for value in node.outputs}
    assert [str(size) for size in shapes["logits"]] == ["batch", "2"]
    assert not any("s" in str(size) for shape in shapes.values() for size in shape)


def test_only_constants_that_are_missing_are_put_back():
    graph = built(nn.Linear(4, 2)).graph
    before = dict(graph.initializers)
    _keep_constants(graph)
    assert dict(graph.initializers) == before
    lost = onnx_ir.Value(name="lost", const_value=onnx_ir.tensor([1.0], name="lost"))
    next(iter(graph)).replace_input_with(1, lost)
    _keep_constants(graph)
    assert graph.initializers["lost"] is lost
