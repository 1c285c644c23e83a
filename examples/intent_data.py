"""Two public sets of short questions and their intents, from ../shared/data/text.

banking77 (CC-BY-4.0) has train and test; val is cut from train here, by a seed. clinc150
(CC-BY-3.0) has all three, and questions that none of its intents covers: out of scope.
"""

import csv
import json
from dataclasses import dataclass, field

import torch
from example_pages import shared_file

VAL_ROWS, SPLIT_SEED = 2000, 0  # of banking77


@dataclass(frozen=True)
class Questions:
    """Some questions and the indices of their intents."""

    texts: list[str]
    labels: torch.Tensor

    def at(self, places):
        """Some of them."""
        return Questions([self.texts[place] for place in places.tolist()], self.labels[places])


@dataclass(frozen=True)
class IntentSet:
    """A data set: which questions train, val and test hold, and those out of scope."""

    name: str
    intents: list[str]
    splits: dict[str, Questions]
    out_of_scope: list[str] = field(default_factory=list)

    def summary(self):
        """Sizes, and how many questions of test stand in train too."""
        seen = {normal(text) for text in self.splits["train"].texts}
        return {
            "intents": len(self.intents),
            "rows": {split: len(part.texts) for split, part in self.splits.items()},
            "out_of_scope": len(self.out_of_scope),
            "test_questions_in_train": sum(
                normal(text) in seen for text in self.splits["test"].texts
            ),
        }


def normal(text):
    """A question without what the tokenizer does not see either: case and blanks."""
    return " ".join(text.lower().split())


def intent_sets():
    """Both sets."""
    return [banking77(), clinc150()]


def banking77():
    parts = {}
    for split in ("train", "test"):
        with shared_file("data", "text", "banking77", f"{split}.csv").open(newline="") as file:
            parts[split] = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    intents = sorted({intent for _, intent in parts["train"]})
    train, test = (numbered(parts[split], intents) for split in ("train", "test"))
    kept, held_out = split_off(len(train.texts), VAL_ROWS, SPLIT_SEED)
    splits = {"train": train.at(kept), "val": train.at(held_out), "test": test}
    return IntentSet("banking77", intents, splits)


def clinc150():
    with shared_file("data", "text", "clinc150", "data_full.json").open() as file:
        parts = json.load(file)
    intents = sorted({intent for _, intent in parts["train"]})
    splits = {split: numbered(parts[split], intents) for split in ("train", "val", "test")}
    return IntentSet("clinc150", intents, splits, [text for text, _ in parts["oos_test"]])


def numbered(pairs, intents):
    """(text, intent) pairs with the intents as indices."""
    index = {intent: place for place, intent in enumerate(intents)}
    return Questions(
        [text for text, _ in pairs], torch.tensor([index[intent] for _, intent in pairs])
    )


def split_off(rows, held_out, seed):
    """Places of `rows` rows in two parts, the second of the size asked for; both ascend."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return order[held_out:].sort().values, order[:held_out].sort().values
