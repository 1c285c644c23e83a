"""Questions a classifier should not answer at all: how sure it is of them, before and after.

In scope are test questions of the classifier's own intents, out of scope those of none.
"""

import torch

from featcal.metrics.ordered import Ordered, auroc_of
from featcal.report.bootstrap import interval, marks

LEVELS = (0.5, 0.9)
STEPS = 20  # bars of a histogram of confidence
RESAMPLES, SEED = 1000, 0


def separation(inside, outside):
    """The chance that a question in scope is the surer one; ties count one half."""
    return auroc_of(Ordered(torch.cat([inside, outside]), in_scope(inside, outside)))


def in_scope(inside, outside):
    return torch.arange(len(inside) + len(outside)) < len(inside)


def scope_entry(inside, outside, before=None):
    """Confidences (n,) of both kinds in a few numbers; with those before, the paired change."""
    found = {
        "auroc": separation(inside, outside),
        "in_scope": sureness(inside),
        "out_of_scope": sureness(outside),
    }
    if before is None:
        return found
    return {**found, "change": change((inside, outside), before)}


def sureness(confidence):
    """Mean, shares above the levels, and a histogram."""
    return {
        "mean": float(confidence.double().mean()),
        "above": {str(level): float((confidence > level).double().mean()) for level in LEVELS},
        "histogram": torch.histc(confidence.float(), STEPS, 0, 1).long().tolist(),
    }


def change(after, before):
    """Difference of the AUROC and its 95 % interval: the same questions are drawn for both."""
    delta = separation(*after) - separation(*before)
    draw = torch.Generator().manual_seed(SEED)
    found = []
    for _ in range(RESAMPLES):
        places = [torch.randint(len(part), (len(part),), generator=draw) for part in after]
        pairs = [
            [part[its] for part, its in zip(pair, places, strict=True)] for pair in (after, before)
        ]
        found.append(separation(*pairs[0]) - separation(*pairs[1]))
    around = interval(delta, torch.tensor([delta, *found]))
    (word,) = marks("auroc", [(delta, around)])
    return {"delta": delta, "interval": around.as_json(), "verdict": word}
