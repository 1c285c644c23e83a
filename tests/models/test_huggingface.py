"""Hugging Face classifiers with tiny random configurations, through the whole path, offline."""

import pytest
import torch
from model_packages import package
from whole_path import (
    ROWS,
    batches_of,
    calibrator_of,
    logits_of,
    pictures,
    rows,
    trained,
    whole_path,
)

import featcal
from featcal import calibrate, collect, find_head

transformers = package("transformers")

K, WORDS, TOKENS = 5, 50, 10
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
GPT = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
# class of the model, its configuration, the path of its head, and what it reads
CASES = {
    "ViTForImageClassification": (
        {**TINY, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8},
        "classifier",
    ),
    "BertForSequenceClassification": ({**TINY, **TEXT}, "classifier"),
    "RobertaForSequenceClassification": ({**TINY, **TEXT}, "classifier.out_proj"),
    "GPT2ForSequenceClassification": (
        {**GPT, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
        "score",
    ),
    "ConvNextForImageClassification": (CONVNEXT, "classifier"),
}


def made(name):
    """A random model of a class; its configuration class has the same first name."""
    first = name.partition("For")[0]
    config = getattr(transformers, f"{first}Config")(num_labels=K, **CASES[name][0])
    torch.manual_seed(0)
    return trained(getattr(transformers, name)(config), inputs_for(name))


def inputs_for(name):
    if name.endswith("ImageClassification"):
        return {"pixel_values": pictures(16)}
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(2, WORDS, (ROWS, TOKENS), generator=draw)
    lengths = torch.randint(4, TOKENS + 1, (ROWS, 1), generator=draw)
    mask = (torch.arange(TOKENS) < lengths).long()
    return {"input_ids": words * mask, "attention_mask": mask}


def as_mappings(batches):
    return [{**inputs, "labels": labels} for inputs, labels in batches]


@pytest.fixture(scope="module")
def bert():
    """A Bert, its inputs, its batches of (inputs, labels), and the model calibrated on them."""
    name = "BertForSequenceClassification"
    model, inputs = made(name), inputs_for(name)
    batches = batches_of(model, inputs)
    return (
        model,
        inputs,
        batches,
        calibrate(model, batches, "clip | temperature", mode="sequential", evidence=False),
    )


@pytest.mark.no_cover  # see whole_path
@pytest.mark.parametrize("name", CASES)
def test_from_a_trained_model_to_onnx_runtime(name, tmp_path):
    model, inputs = made(name), inputs_for(name)
    head = CASES[name][1]
    assert find_head(model) == find_head(model, inputs=rows(inputs, slice(0, 4))) == head
    exports = name.startswith("GPT2")  # it stands for the others
    batches = as_mappings(batches_of(model, inputs))
    calibrated = whole_path(model, batches, tmp_path, exports=exports)
    assert calibrated.config is model.config
    assert type(calibrated(**inputs)) is type(model(**inputs))


def test_the_loss_that_a_model_gives_beside_its_logits_is_that_of_the_calibrated_ones(bert):
    model, inputs, batches, calibrated = bert
    labels = torch.cat([y for _, y in batches])
    with torch.no_grad():
        output, raw = (one(**inputs, labels=labels) for one in (calibrated, model))
    expected = torch.nn.functional.cross_entropy(output.logits, labels)
    torch.testing.assert_close(output.loss, expected)
    assert output.loss < raw.loss


def test_a_language_model_is_calibrated_at_the_token_it_keeps():
    name = "GPT2ForSequenceClassification"
    model, inputs = made(name), inputs_for(name)
    data = collect(model, batches_of(model, inputs))
    last = inputs["attention_mask"].sum(1) - 1
    with torch.no_grad():
        hidden = model.transformer(**inputs).last_hidden_state
        expected = model(**inputs).logits
    found = torch.cat([batch.features for batch in data])
    torch.testing.assert_close(found, hidden[torch.arange(ROWS), last])
    torch.testing.assert_close(torch.cat([batch.logits for batch in data]), expected)


def test_a_calibrated_model_saved_as_pretrained_reads_back(bert, tmp_path):
    """The names are the original's: the plain class reads its weights, the calibrator its own."""
    model, inputs, _, calibrated = bert
    calibrated.save_pretrained(tmp_path / "model")
    featcal.save(calibrator_of(calibrated), tmp_path / "calibrator.safetensors")
    plain = type(model).from_pretrained(tmp_path / "model").eval()
    assert torch.equal(logits_of(plain, inputs), logits_of(model, inputs))
    again = featcal.attach(plain, featcal.load(tmp_path / "calibrator.safetensors"))
    assert torch.equal(logits_of(again, inputs), logits_of(calibrated, inputs))
