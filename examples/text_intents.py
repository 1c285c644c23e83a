"""Questions to a bank and to an assistant: a sentence encoder with a small head, calibrated.

    python examples/text_intents.py [--docs]

Heads are trained on banking77 and clinc150, calibrators are fitted on val and scored on test; for
clinc150 also on questions that none of its intents covers. Writes results/example-text.json, two
pictures and the tables of docs/text.md; with --docs only the last two, from the results.
"""

from dataclasses import dataclass
from itertools import islice

import torch
from example_pages import CACHE, aligned, check_packages, made, main_of, recipe_grid, say
from example_pictures import text_pictures
from intent_data import SPLIT_SEED, intent_sets
from intent_model import (
    HEADS,
    PACKAGE,
    TRAIN_BATCH,
    IntentClassifier,
    embeddings,
    loader,
    sentence_encoder,
    train_head,
)
from intent_tables import parts
from recipe_trials import PLAN, PROTOCOL, RESAMPLES, bins_json, chosen, trials
from scope import scope_entry

import featcal
from featcal import Batch
from featcal.cli.app import progress_bar
from featcal.report.scores import calibrated_logits

PACKAGES = (PACKAGE, "transformers", "tokenizers", "onnx", "onnxruntime")
SEEDS = (0, 1, 2)  # of the heads; the first is shown in full
EVERY_SEED = (
    ("none", "sequential"),
    ("temperature", "sequential"),
    ("clip | temperature", "sequential"),
    ("ensemble", "sequential"),
    ("parameterised", "sequential"),
    ("sample", "sequential"),
    ("auto", "sequential"),
)
SHOWN = ("clinc150", "mlp", SEEDS[0])  # the network that is calibrated whole
QUOTED, SURE = 4, 0.9  # questions out of scope of each kind; what it takes to be sure
CHECKED = 8  # batches of test on which the whole network is checked


# --- one head on one set --------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A classifier, and what enters its last layer for each split and out of scope."""

    model: IntentClassifier
    data: dict[str, Batch]
    outside: Batch | None

    @torch.no_grad()
    def chances(self, batch, calibrator):
        """Probabilities of the intents, calibrated or not."""
        return calibrated_logits(batch, calibrator, self.model.classifier).softmax(1)

    def confidences(self, calibrator):
        """How sure it is of test questions and of those out of scope."""
        return [
            self.chances(part, calibrator).amax(1) for part in (self.data["test"], self.outside)
        ]


def train(encoder, intents, vectors, kind, seed):
    """Trains a head of one kind on the embeddings of a set."""
    options = HEADS[kind]
    model = IntentClassifier(encoder, len(intents.intents), options["hidden"]).eval()
    labels = {split: part.labels for split, part in intents.splits.items()}
    how = {"epochs": options["epochs"], "rate": options["rate"], "seed": seed}
    train_head(model, vectors["train"], labels["train"], **how)
    with torch.no_grad():
        data = {split: Batch(None, labels[split], model.body(vectors[split])) for split in labels}
        if not intents.out_of_scope:
            return Trained(model, data, None)
        no_labels = torch.zeros(len(intents.out_of_scope), dtype=torch.int64)
        return Trained(model, data, Batch(None, no_labels, model.body(vectors["out of scope"])))


def tried(trained, *, in_full):
    """The recipes on one head: entries of the result file, and rows."""
    how = (PLAN, RESAMPLES) if in_full else (EVERY_SEED, 0)
    data, head = trained.data, trained.model.classifier
    entries, rows = trials(data["val"], data["test"], head, *how)
    if trained.outside is not None:
        before = trained.confidences(None)
        for entry, row in zip(entries, rows, strict=True):
            found = trained.confidences(row.calibrator)
            entry["scope"] = scope_entry(*found, before if in_full and row is not rows[0] else None)
    return entries, rows


def case(trained, name, kind, seed):
    """One head with its recipes, for the result file; and the row that val chose."""
    entries, rows = tried(trained, in_full=seed == SEEDS[0])
    best = chosen(entries)
    own = featcal.evaluate(trained.data["train"], None, trained.model.classifier)
    told = {
        **{"set": name, "head": kind, "seed": seed, "train_accuracy": own.metrics["accuracy"]},
        **{"recipes": entries, "chosen": best},
    }
    if seed == SEEDS[0]:
        told["bins"] = {"before": bins_json(rows[0]), "after": bins_json(rows[best])}
    return told, rows[best]


# --- the whole network ----------------------------------------------------------------------------


def whole_network(trained, tokenizer, intents, row, mode):
    """Calibrates the classifier from words to logits, and holds it against the embeddings."""
    recipe, splits = row.recipe, intents.splits
    say(f"calibrating the whole network with {recipe}")
    with progress_bar():
        val_loader = loader(tokenizer, splits["val"])
        calibrated = featcal.calibrate(trained.model, val_loader, recipe, mode=mode)
    batches = list(islice(loader(tokenizer, splits["test"]), CHECKED))
    with torch.no_grad():
        found = torch.cat([calibrated(b["input_ids"], b["attention_mask"]) for b in batches])
        known = calibrated_logits(trained.data["test"], row.calibrator, trained.model.classifier)
    known = known[: len(found)]
    return calibrated, {
        **{"recipe": recipe, "mode": mode, "rows": len(found)},
        "max_difference": float((found - known).abs().max()),
        "predictions_changed": int((found.argmax(1) != known.argmax(1)).sum()),
    }


def exported(model, tokenizer, questions):
    """The whole network as ONNX, for any number of questions of any length."""
    CACHE.mkdir(parents=True, exist_ok=True)
    (batch,) = islice(loader(tokenizer, questions), 1)
    words = {name: batch[name] for name in ("input_ids", "attention_mask")}
    path = CACHE / "intents-calibrated.onnx"
    free = {name: {0: "batch", 1: "words"} for name in words}
    written = featcal.export.onnx(model, path, words, dynamic=free, overwrite=True)
    print(f"          {written}")
    return {**written.as_json(), "path": path.name}


def quoted(trained, intents, calibrator):
    """Questions out of scope that it was sure of: the surest, and some drawn from the others."""
    before, after = (trained.chances(trained.outside, what) for what in (None, calibrator))
    order = before.amax(1).argsort(descending=True)
    others = order[QUOTED : int((before.amax(1) > SURE).sum())]
    draw = torch.Generator().manual_seed(SEEDS[0])
    drawn = others[torch.randperm(len(others), generator=draw)[:QUOTED]]
    kinds = {"the surest": order[:QUOTED], f"drawn from those above {SURE}": drawn}
    return [
        {
            "kind": kind,
            "question": intents.out_of_scope[place],
            "intent": intents.intents[int(before[place].argmax())],
            "before": float(before[place].amax()),
            "after": float(after[place].amax()),
        }
        for kind, places in kinds.items()
        for place in places.tolist()
    ]


# --- all of it ------------------------------------------------------------------------------------


def run():
    """The result file."""
    sets = intent_sets()
    check_packages(PACKAGES)
    say("reading the sentence encoder")
    encoder, tokenizer = sentence_encoder()
    results = {
        **made("text_intents.py", PACKAGES, PROTOCOL | {"head_seeds": SEEDS}),
        "training": {"batch": TRAIN_BATCH, "heads": HEADS, "split_seed": SPLIT_SEED},
        "sets": {intents.name: intents.summary() for intents in sets},
        "cases": [],
    }
    for intents in sets:
        vectors = embedded(encoder, tokenizer, intents)
        for kind in HEADS:
            for seed in SEEDS:
                say(f"{intents.name}: training the {kind} head, seed {seed}; fitting, scoring")
                with progress_bar():
                    trained = train(encoder, intents, vectors, kind, seed)
                    told, row = case(trained, intents.name, kind, seed)
                results["cases"].append(told)
                title = f"{intents.name}, {kind} head, seed {seed}: scored on test; *chosen* on val"
                print(aligned(recipe_grid(told["recipes"], told["chosen"], title)))
                if (intents.name, kind, seed) == SHOWN:
                    results |= shown(trained, tokenizer, intents, told, row)
    return results


def embedded(encoder, tokenizer, intents):
    """Embeddings of every split of a set."""
    texts = {split: part.texts for split, part in intents.splits.items()}
    if intents.out_of_scope:
        texts["out of scope"] = intents.out_of_scope
    vectors = {}
    for split, its in texts.items():
        say(f"{intents.name}: embedding {len(its):,} questions of {split}, unless they are cached")
        with progress_bar():
            vectors[split] = embeddings(encoder, tokenizer, its, f"embedding {split}")
    return vectors


def shown(trained, tokenizer, intents, told, row):
    """What one network is shown to do besides."""
    mode = told["recipes"][told["chosen"]]["mode"]
    model, checked = whole_network(trained, tokenizer, intents, row, mode)
    return {
        "whole_network": checked,
        "onnx": exported(model, tokenizer, intents.splits["test"]),
        "quoted": quoted(trained, intents, row.calibrator),
    }


def main():
    main_of("text", run, text_pictures, parts)


if __name__ == "__main__":
    main()
