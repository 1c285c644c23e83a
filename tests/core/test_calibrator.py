"""The base class: registration, pipelines, fitted values, loading."""

import copy

import pytest
import torch
from torch import nn

from featcal import METHODS, Batch, FeatureClip, InputError, LogitMap, Pipeline, Temperature, parse
from featcal.core.calibrator import Calibrator
from featcal.core.fit import StepReport
from featcal.core.loss import brier, ece, measure
from featcal.heads.head import CalibratedHead


@pytest.fixture
def registered():
    """Forgets what a test registers."""
    before = dict(METHODS)
    yield METHODS
    METHODS.clear()
    METHODS.update(before)


def shift_class():
    class Shift(LogitMap):
        """Adds a learned value to each logit: a buffer whose shape is learned."""

        name = "shift"

        def __init__(self, *, scale: float = 1.0) -> None:
            super().__init__()
            self.scale = scale
            self.register_buffer("by", torch.zeros(()))

        def map_logits(self, logits):
            return logits + self.by

        def learn(self, problem):
            self.assign(by=torch.arange(float(problem.facts.classes)) * self.scale)
            (loss,) = measure(problem.data, problem.loss)
            return [StepReport(self.name, {}, False, loss, loss, True, "shifted")]

    return Shift


def test_a_named_subclass_is_registered_and_readable(registered):
    shift = shift_class()
    assert registered["shift"] is shift
    assert repr(parse("shift(scale=2.0) | temperature")) == "shift(scale=2.0) | temperature"


def test_a_taken_name_is_refused(registered):
    taken = METHODS["clip"]
    with pytest.raises(TypeError, match="calibrator name 'clip' is taken by FeatureClip"):
        type("Clip", (LogitMap,), {"name": "clip"})
    assert METHODS["clip"] is taken


def test_a_nameless_subclass_is_not_registered(registered):
    before = set(registered)
    type("Quiet", (Calibrator,), {})
    type("Heir", (shift_class(),), {})
    assert set(registered) == before | {"shift"}


def test_learned_shapes_come_from_the_file(registered):
    shift = shift_class()
    logits = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    labels = (logits + torch.arange(5.0)).argmax(1)
    labels[::4] = 0
    fitted = (shift(scale=0.5) | Temperature()).fit(Batch(logits, labels))
    fresh = parse(repr(fitted))
    fresh.load_state_dict(fitted.state_dict())
    assert fresh.steps[0].by.shape == (5,)
    assert torch.equal(fresh.wrap()(logits), fitted.wrap()(logits))
    inside = nn.Sequential(fresh.wrap())
    inside.load_state_dict(inside.state_dict())


def test_assign_keeps_float32_and_owns_its_values():
    calibrator = Temperature()
    value = torch.tensor(2.0, dtype=torch.float64)
    assert calibrator.assign(temperature=value) is calibrator
    value.fill_(9.0)
    assert calibrator.temperature.dtype == torch.float32
    assert calibrator.temperature == 2.0
    assert calibrator.assign(temperature=3).temperature == 3.0
    assert "temperature" in dict(calibrator.named_buffers())
    same = torch.tensor(4.0)
    calibrator.assign(temperature=same)
    same.fill_(9.0)
    assert calibrator.temperature == 4.0


def test_assign_of_an_unknown_name_fails():
    with pytest.raises(KeyError):
        Temperature().assign(temprature=2.0)


# --- pipelines --------------------------------------------------------------------------------


def test_pipelines_are_flat_however_they_are_written():
    a, b, c = FeatureClip(), Temperature(), Temperature()
    for pipeline in ((a | b) | c, a | (b | c), Pipeline(a, Pipeline(b, c)), Pipeline(a, b, c)):
        assert pipeline.steps_in_order() == [a, b, c]
        assert list(pipeline.steps) == [a, b, c]
        assert repr(pipeline) == "clip | temperature | temperature"


def test_a_pipeline_declares_what_its_steps_declare():
    both = FeatureClip() | Temperature()
    assert both.needs_features
    assert not both.keeps_accuracy
    two = Temperature() | Temperature()
    assert not two.needs_features
    assert two.keeps_accuracy


def test_the_wrong_order_is_refused_when_written_and_deep_inside():
    for make in (
        lambda: Temperature() | FeatureClip(),
        lambda: FeatureClip() | Temperature() | FeatureClip(),
        lambda: Pipeline(FeatureClip() | Temperature(), FeatureClip()),
    ):
        with pytest.raises(InputError, match=r"temperature \| clip .* write clip \| temperature"):
            make()


def test_only_calibrators_can_be_joined():
    with pytest.raises(TypeError, match="unsupported operand"):
        FeatureClip() | "temperature"
    with pytest.raises(TypeError, match="unsupported operand"):
        3 | FeatureClip()


def test_a_pipeline_of_nothing_is_refused_or_is_the_identity():
    logits = torch.randn(5, 3)
    try:
        empty = Pipeline()
    except InputError:
        return
    assert torch.equal(empty.wrap()(logits), logits)
    empty.fit(Batch(logits, logits.argmax(1)))


def test_a_pipeline_applies_its_steps_in_reading_order():
    clip, hot = FeatureClip().assign(threshold=1.0), Temperature().assign(temperature=2.0)
    features = torch.tensor([[3.0, -5.0, 0.5]])
    head = nn.Linear(3, 3, bias=False)
    nn.init.eye_(head.weight)
    with torch.no_grad():
        found = (clip | hot)(features, head)
    assert found.tolist() == [[0.5, -0.5, 0.25]]


def test_the_steps_of_a_pipeline_hold_what_was_learned(made):
    world = made(n=400, d=8, k=3, heat=2.0)
    clip, hot = FeatureClip(), Temperature()
    pipeline = clip | hot
    pipeline.fit(Batch(None, world.labels, world.features), world.head, mode="sequential")
    values = [step.values for step in pipeline.report.steps]
    assert values[0]["threshold"] == float(clip.threshold)
    assert values[1]["temperature"] == pytest.approx(float(hot.temperature), rel=1e-6)


def test_two_temperatures_are_one(made):
    world = made(n=400, d=8, k=3, heat=2.0)
    data = Batch(world.logits, world.labels)
    one = Temperature().fit(data)
    for mode in ("joint", "sequential"):
        two = parse("temperature | temperature").fit(data, mode=mode)
        product = float(two.steps[0].temperature * two.steps[1].temperature)
        assert product == pytest.approx(float(one.temperature), rel=1e-4)


def test_a_second_clip_is_refused_or_does_no_harm(made):
    world = made(n=2500, d=8, k=3, heat=1.3)
    data = Batch(None, world.labels, world.features)
    try:
        two = parse("clip | clip")
    except InputError as error:
        assert "clip | clip" in str(error)  # noqa: PT017 - either answer is fine
        return
    one = FeatureClip().fit(data, world.head)
    for mode in ("sequential", "joint"):
        two.fit(data, world.head, mode=mode)
        assert two.report.loss_after <= one.report.loss_after + 1e-6


def test_sequential_is_each_step_for_itself(made):
    world = made(n=400, d=8, k=3, heat=2.0)
    data = Batch(None, world.labels, world.features)
    clip = FeatureClip().fit(data, world.head)
    with torch.no_grad():
        clipped = clip(world.features, world.head)
    hot = Temperature().fit(Batch(clipped, world.labels))
    both = parse("clip | temperature").fit(data, world.head, mode="sequential")
    assert both.steps[0].threshold == clip.threshold
    assert float(both.steps[1].temperature) == pytest.approx(float(hot.temperature), rel=1e-6)


# --- fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["both", "", None, "Joint"])
def test_an_unknown_mode_is_refused(mode):
    data = Batch(torch.randn(9, 3), torch.randint(3, (9,)))
    with pytest.raises(InputError, match=r"mode is .*: choose one of joint, sequential"):
        Temperature().fit(data, mode=mode)


def test_the_loss_is_a_parameter(made):
    world = made(n=600, d=8, k=4, heat=3.0)
    data = Batch(world.logits, world.labels)
    found = Temperature().fit(data, loss=brier)
    assert found.report.loss == "brier"
    scaled = Batch(found.wrap()(world.logits), world.labels)
    assert found.report.loss_after == pytest.approx(measure([scaled], brier)[0], abs=1e-6)
    for factor in (0.97, 1.03):
        other = Batch(world.logits / (float(found.temperature) * factor), world.labels)
        assert measure([other], brier)[0] > found.report.loss_after
    assert Temperature().fit(data, loss=ece).report.loss == "ece"


def test_fit_works_under_grad_and_in_inference_mode():
    logits = torch.randn(50, 3)
    data = Batch(logits * 5, (logits + torch.randn(50, 3)).argmax(1))
    with torch.enable_grad():
        first = Temperature().fit(data)
    with torch.inference_mode():
        second = Temperature().fit(data)
    assert first.temperature == second.temperature
    assert not first.temperature.requires_grad


def test_str_shows_recipe_and_values():
    text = str(FeatureClip(min_accuracy=0.9).assign(threshold=0.231) | Temperature())
    assert text.startswith("clip(min_accuracy=0.9) | temperature")
    assert "threshold=0.231" in text
    assert "temperature=1" in text


def test_a_feature_calibrator_wants_a_head():
    with pytest.raises(InputError, match="clip works on features: pass head="):
        FeatureClip().fit(Batch(torch.randn(5, 2), torch.zeros(5, dtype=torch.long)))
    with pytest.raises(InputError, match="clip works on features: pass the classifier's last"):
        FeatureClip().wrap()


def test_a_calibrated_head_is_a_module_with_everything_in_its_state():
    head = nn.Linear(4, 3)
    module = CalibratedHead(head, FeatureClip() | Temperature())
    assert set(module.state_dict()) == {
        "weight",
        "bias",
        "calibrator.steps.0.threshold",
        "calibrator.steps.1.temperature",
    }
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    module(torch.randn(2, 4)).sum().backward()  # gradients pass through to the head
    assert head.weight.grad is not None
    assert copy.deepcopy(module).weight is not head.weight


def test_gradients_reach_the_features():
    features = torch.randn(6, 4, requires_grad=True)
    (FeatureClip().assign(threshold=0.5) | Temperature())(
        features, nn.Linear(4, 3)
    ).sum().backward()
    assert (features.grad[features.detach().abs() > 0.5] == 0).all()
    assert (features.grad[features.detach().abs() < 0.5] != 0).all()


@pytest.mark.parametrize("recipe", ["temperature", "vector", "clip | temperature", "matrix"])
def test_a_fit_in_inference_mode_is_the_fit_without(recipe):
    draw = torch.Generator().manual_seed(0)
    head, features = nn.Linear(4, 3), torch.randn(200, 4, generator=draw)
    with torch.no_grad():
        logits = head(features) * 3
        head.weight.mul_(3), head.bias.mul_(3)
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=draw)[:, 0]
    plain = parse(recipe).fit(Batch(logits, labels, features), head)
    with torch.inference_mode():
        batch = Batch(logits.clone(), labels.clone(), features.clone())
        found = parse(recipe).fit(batch, head)
    assert batch.logits.is_inference()
    assert not any(value.is_inference() for value in found.buffers())
    module = found.wrap(head)
    module(features).sum().backward()
    module.load_state_dict(module.state_dict())
    for mine, other in zip(found.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, other)
