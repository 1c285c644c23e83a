"""The base class: registration, pipelines, fitted values, loading; predictions kept."""

from time import perf_counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from featcal import METHODS, Batch, FeatureClip, InputError, LogitMap, Pipeline, Temperature, parse
from featcal.core.calibrator import NUDGE, keep_prediction, with_confidence
from featcal.core.fit import StepReport, brier, confidence, ece, measure, nll, settle


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


def test_a_new_method_promises_nothing_it_does_not_say(registered):
    shift = shift_class()()
    flags = "needs_features takes_features needs_train keeps_accuracy keeps_rows jumps alone"
    assert not any(getattr(shift, flag) for flag in flags.split())
    assert shift.quick is shift.report is None
    assert FeatureClip().needs_features


def test_a_reset_is_a_fresh_calibrator_of_the_same_hyperparameters(registered):
    shift = shift_class()(scale=0.5).assign(by=torch.arange(5.0))
    assert shift.reset() is shift
    assert (shift.scale, shift.by.tolist()) == (0.5, 0.0)


def test_fitted_values_follow_a_model_up_to_more_precision_and_never_down():
    hot = Temperature().assign(temperature=1 + 2**-20)
    assert hot.half().temperature.dtype == torch.float32
    assert hot.bfloat16().temperature == 1 + 2**-20
    assert hot.double().temperature.dtype == torch.float64
    assert hot.float().temperature.dtype == torch.float32


def test_fitted_values_go_to_a_device_and_a_reset_leaves_them_there():
    both = (FeatureClip() | Temperature()).to("meta")
    assert {value.device.type for value in both.buffers()} == {"meta"}
    assert both.steps[1].reset().temperature.device.type == "meta"


def test_a_pipeline_has_a_most_of_steps():
    most = Pipeline(*(Temperature() for _ in range(16)))
    assert len(parse(repr(most)).steps_in_order()) == 16
    with pytest.raises(InputError, match="17 steps"):
        Pipeline(*most.steps, Temperature())


def test_rows_are_transformed_with_a_head_or_without():
    logits, layer = torch.randn(6, 3), nn.Linear(4, 3)
    features = torch.randn(6, 4)
    hot = Temperature().assign(temperature=2.0)
    assert torch.allclose(hot.transform(logits), logits / 2)
    assert torch.allclose(hot.transform(features, layer), layer(features) / 2)
    with pytest.raises(InputError, match="head"):
        FeatureClip().assign(threshold=1.0).transform(features)
    whole = torch.tensor([[4, 0, 2], [2**24 + 1, 3, -3]])
    torch.testing.assert_close(hot.transform(whole), whole.double() / 2, rtol=0, atol=0)
    with pytest.raises(InputError, match="rows are one number"):
        hot.transform(torch.tensor(1.0))


def test_rows_of_another_network_are_not_transformed():
    torch.manual_seed(0)
    layer, features = nn.Linear(4, 3).requires_grad_(False), torch.randn(120, 4)
    labels = torch.multinomial((layer(features) / 2).softmax(1), 1)[:, 0]
    fitted = parse("clip | temperature").fit(Batch(None, labels, features), layer)
    for width in (2, 5):
        says = f"fitted to 4 features, and these rows have {width}"
        with pytest.raises(InputError, match=says):
            fitted.transform(torch.randn(6, width), nn.Linear(width, 3))
    with pytest.raises(InputError, match="fitted to 3 classes, and these rows have 7"):
        fitted.transform(features, nn.Linear(4, 7))
    of_logits = Temperature().fit(Batch(layer(features), labels))
    with pytest.raises(InputError, match="fitted to 3 classes, and these rows have 7"):
        of_logits.transform(torch.randn(6, 7))


def test_a_notebook_shows_the_values_of_what_was_not_fitted():
    shown = parse("clip | temperature")._repr_html_()
    assert "<th>recipe</th><th>values</th>" in shown
    assert "<td><code>clip | temperature</code></td><td>threshold=inf temperature=1</td>" in shown


def test_the_only_class_stays_as_it_is():
    logits = torch.randn(5, 1)
    assert with_confidence(logits, torch.full((5,), 0.5)) is logits


def test_fresh_is_what_nobody_gave_a_value():
    assert parse("clip | temperature").fresh
    assert not parse("clip(threshold=2) | temperature").fresh
    half = parse("clip | temperature")
    half.steps[1].assign(temperature=2.0)
    assert not half.fresh
    half.reset()
    assert half.fresh
    logits = torch.eye(4)
    fitted = Temperature().fit(Batch(3 * logits, torch.arange(4)))
    assert not fitted.fresh
    assert fitted.reset().fresh


def test_what_is_a_whole_recipe_stands_alone(registered):
    shift = shift_class()
    shift.alone = True
    assert len(Pipeline(shift()).steps_in_order()) == 1
    for steps in ((shift(), Temperature()), (Temperature(), shift())):
        with pytest.raises(InputError, match="shift"):
            Pipeline(*steps)


def test_a_pipeline_needs_what_a_step_needs_and_keeps_what_all_keep():
    keeps, vector = Temperature(), parse("vector")
    assert (keeps.keeps_accuracy, vector.keeps_accuracy) == (True, False)
    assert (keeps | Temperature()).keeps_accuracy
    assert not (keeps | vector).keeps_accuracy
    assert (FeatureClip() | keeps).needs_features
    assert not (keeps | vector).needs_features
    assert not (keeps | vector).takes_features
    assert (keeps | parse("sample")).takes_features
    density = parse("density")
    assert not keeps.needs_train
    assert (keeps | density).needs_train == density.needs_train is True


def test_pipelines_are_flat_however_they_are_written():
    a, b, c = FeatureClip(), Temperature(), Temperature()
    for pipeline in ((a | b) | c, a | (b | c), Pipeline(a, Pipeline(b, c)), Pipeline(a, b, c)):
        assert pipeline.steps_in_order() == [a, b, c]
        assert list(pipeline.steps) == [a, b, c]
        assert repr(pipeline) == "clip | temperature | temperature"


def test_a_pipeline_applies_its_steps_in_reading_order():
    clip, hot = FeatureClip().assign(threshold=1.0), Temperature().assign(temperature=2.0)
    features = torch.tensor([[3.0, -5.0, 0.5]])
    head = nn.Linear(3, 3, bias=False)
    nn.init.eye_(head.weight)
    with torch.no_grad():
        found = (clip | hot)(features, head)
    assert found.tolist() == [[0.5, -0.5, 0.25]]


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


@pytest.mark.parametrize(
    ("how", "must"),
    [
        ({}, False),
        ({"criterion": nll}, False),
        ({"criterion": confidence}, True),  # which falls with the logits
        ({"left_out": 0.0}, False),
        ({"always": True}, True),
    ],
)
@pytest.mark.parametrize("heat", [0.5, 2.0])
def test_a_step_that_does_not_lower_the_loss_is_undone_unless_it_must_stay(
    registered, heat, how, must
):
    class Half(LogitMap):
        """Halves the logits, whatever the data."""

        name = "half"

        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def map_logits(self, logits):
            return logits * self.scale

        def learn(self, problem):
            self.assign(scale=0.5)
            return [settle(self, problem, {"scale": 0.5}, "halved", **how)]

    logits = 3 * torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    noise = torch.rand(300, 3, generator=torch.Generator().manual_seed(1))
    labels = (logits / heat - (-noise.log()).log()).argmax(1)
    before, after = (nn.functional.cross_entropy(z, labels).item() for z in (logits, logits / 2))
    assert (after < before) == (heat == 2)
    started = perf_counter()
    fitted = Half().fit(Batch(logits, labels))
    (step,) = fitted.report.steps
    assert 0 <= step.seconds <= fitted.report.seconds <= perf_counter() - started
    stays = must or after < before
    assert (float(fitted.scale), step.noop) == ((0.5, False) if stays else (1, True))
    assert step.values == ({"scale": 0.5} if stays else {})
    assert step.head_passes == 0  # there is none
    assert step.loss_before == pytest.approx(before)
    assert step.loss_after == pytest.approx(after if stays else before)
    assert "left_out" not in step.details or how.get("left_out") == 0
    idle = Half().fit(Batch(torch.zeros(300, 3), labels)).report.steps[0]
    assert idle.noop != how.get("always", False)


@pytest.mark.parametrize("mode", ["joint", "sequential"])
def test_the_passes_of_the_head_are_counted_step_by_step(made, mode):
    world = made(n=400, d=8, k=3, heat=2.0)
    asked = [0]

    class Counting(nn.Linear):
        def forward(self, features):
            asked[0] += len(features)
            return super().forward(features)

    head = Counting(8, 3)
    head.load_state_dict(world.head.state_dict())
    asked[0] = -64  # on which a head is tried
    data = Batch(None, world.labels, world.features)
    steps = parse("clip | temperature | temperature").fit(data, head, mode=mode).report.steps
    clip, *hot = [step.head_passes for step in steps]
    assert clip * 400 >= asked[0] - sum(hot) * 400 > (clip - 1) * 400
    assert sum(hot) <= 2
    assert [step.name for step in steps] == ["clip", "temperature", "temperature"]
    assert steps[-1].loss_after <= steps[0].loss_after <= steps[0].loss_before


@pytest.mark.parametrize("mode", ["joint", "sequential"])
def test_a_step_is_handed_the_later_ones_where_fitting_is_joint(registered, mode):
    seen = []

    class Spy(shift_class()):
        name = "spy"

        def learn(self, problem):
            seen.append(repr(problem.then))
            return super().learn(problem)

    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    data = Batch(logits, (logits + torch.arange(3.0)).argmax(1))
    Pipeline(Spy(scale=0.1), Spy(scale=0.2), shift := METHODS["shift"]()).fit(data, mode=mode)
    assert shift.by.tolist() == [0.0, 1.0, 2.0]
    later = ["spy(scale=0.2) | shift", "shift"] if mode == "joint" else ["None", "None"]
    assert seen == later


def test_a_head_of_one_output_is_met_as_two_classes():
    features = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    head = nn.Linear(4, 1)
    with torch.no_grad():
        head.weight[:], head.bias[:] = torch.tensor([5.0, 0.0, 0.0, 0.0]), 0.0
    labels = (features[:, 0] > 0).long()
    labels[::3] = 1 - labels[::3]
    found = Temperature().fit(Batch(None, labels, features), head)
    assert found.report.classes == 2
    with torch.no_grad():
        alone = Temperature().fit(Batch(head(features), labels))
    assert torch.equal(found.temperature, alone.temperature)


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


@pytest.mark.parametrize(
    "make",
    [
        Pipeline,
        lambda: Temperature() | FeatureClip(),
        lambda: Pipeline(FeatureClip() | Temperature(), FeatureClip()),
        lambda: FeatureClip() | FeatureClip(),
    ],
)
def test_pipelines_that_make_no_sense_are_refused(make):
    with pytest.raises(InputError, match=r"of 0 steps|wrong order|one clip does all"):
        make()


def test_str_shows_recipe_and_values_and_titles_default_to_names(registered):
    text = str(FeatureClip(min_accuracy=0.9).assign(threshold=0.231) | Temperature())
    assert text == "clip(min_accuracy=0.9) | temperature   threshold=0.231 temperature=1"
    shift = shift_class()
    assert (shift.title, dict(shift.symbols)) == ("shift", {})


def rows(n=200, k=5, scale=3.0, seed=0, dtype=torch.float64):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, k)) * scale, dtype=dtype)


def test_the_top_class_gets_the_confidence_and_the_others_their_shares():
    logits = rows()
    wanted = torch.linspace(0.6, 0.999, 200, dtype=torch.float64)
    probs = with_confidence(logits, wanted).exp()
    before = logits.softmax(1)
    for row in range(200):
        top = int(before[row].argmax())
        assert float(probs[row, top]) == pytest.approx(float(wanted[row]), rel=1e-12)
        for k in range(5):
            if k != top:
                share = before[row, k] / (1 - before[row, top])
                assert float(probs[row, k]) == pytest.approx(
                    float(share * (1 - wanted[row])), rel=1e-9
                )


@example(0, 0.0, torch.float64)
@example(0, 1.0, torch.float64)
@given(st.integers(0, 100), st.floats(0, 1), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=40, deadline=None)
def test_any_confidence_gives_finite_normalised_rows_of_the_same_prediction(seed, value, dtype):
    logits = rows(n=30, k=4, seed=seed, dtype=dtype)
    found = with_confidence(logits, torch.full((30,), value, dtype=dtype))
    assert found.dtype == dtype
    assert torch.isfinite(found).all()
    near = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.exp().sum(1), torch.ones(30, dtype=dtype), rtol=0, atol=near)
    assert torch.equal(found.argmax(1), logits.argmax(1))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_the_prediction_is_always_kept_and_the_other_logits_untouched(given_row, mapped_row):
    logits, mapped = torch.tensor([given_row]), torch.tensor([mapped_row])
    found = keep_prediction(mapped, logits)
    top = int(logits.argmax(1))
    assert int(found.argmax(1)) == top
    others = [k for k in range(3) if k != top]
    assert torch.equal(found[:, others], mapped[:, others])
    assert torch.isfinite(found).all()
    behind = float(mapped[0, others].max())
    if int(mapped.argmax(1)) != top:  # put just ahead, by no more than rounding needs
        assert 0 < float(found[0, top]) - behind <= 2 * NUDGE * max(abs(behind), NUDGE)


@pytest.mark.parametrize("classes", [4000, 50_257])
def test_the_prediction_stays_among_very_many_nearly_equal_classes(classes):
    logits = torch.randn(20, classes, generator=torch.Generator().manual_seed(0)) * 1e-3
    mapped = with_confidence(logits, torch.zeros(20))
    assert torch.equal(mapped.argmax(1), logits.argmax(1))
