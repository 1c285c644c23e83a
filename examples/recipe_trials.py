"""Several recipes on one network: val chooses among them, and test scores them, never the reverse.

The choice is by the NLL of rows the fit has not seen: val is cut into folds, and each fold is
scored by what was fitted on the others.
"""

import featcal
from featcal.report import Comparison
from featcal.report.tables import fitted_text

# Recipe and way of fitting; recipes of one step are the same either way.
PLAN = (
    ("none", "sequential"),
    ("temperature", "sequential"),
    ("clip", "sequential"),
    ("clip | temperature", "sequential"),
    ("clip | temperature", "joint"),
    ("ensemble", "sequential"),
    ("parameterised", "sequential"),
    ("sample", "sequential"),
    ("auto", "sequential"),
    ("svs", "sequential"),
    ("isotonic", "sequential"),
)
FOLDS, RESAMPLES, SEED, BINS = 5, 1000, 0, 15
PROTOCOL = {
    **{"fit": "val", "choice": "lowest NLL on val, cross-fitted", "score": "test"},
    **{"folds": FOLDS, "resamples": RESAMPLES, "seed": SEED, "bins": BINS},
}
WITH_INTERVALS = ("accuracy", "ece", "nll", "brier")
KEPT = (*WITH_INTERVALS, "adaptive_ece", "confidence", "overconfidence", "auroc")


def trials(val, test, head, plan=PLAN, resamples=RESAMPLES):
    """Fits the recipes on val: what the result file keeps of each, and the rows they are from."""
    plain = {"head": head, "seed": SEED, "bins": BINS}
    scored = _rows(val, test, plan, resamples=resamples, **plain)
    unseen = _rows(val, None, plan, resamples=0, folds=FOLDS, **plain)
    both = Comparison(tuple(scored), (None, *(0 for _ in scored[1:])))  # all against the first
    told = zip(plan, both.as_json()["rows"], scored, unseen, strict=True)
    return [_entry(mode, *found) for (_, mode), *found in told], scored


def _rows(fit, test, plan, **options):
    """One row a recipe, in the order of the plan; a mode is one comparison."""
    rows = {}
    for mode in dict.fromkeys(mode for _, mode in plan):
        recipes = [recipe for recipe, its_mode in plan if its_mode == mode]
        for row in featcal.compare(fit, test, recipes, mode=mode, **options):
            rows[row.recipe, mode] = row
    return [rows[key] for key in plan]


def _entry(mode, told, row, cross):
    steps = told["fit"]["steps"] if told["fit"] else []
    return {
        **{"recipe": row.recipe, "mode": mode, "val_nll": cross.scores.metrics["nll"]},
        "metrics": {name: told["metrics"][name] for name in KEPT},
        **{key: _asked_for(told[key]) for key in ("intervals", "differences")},
        "fitted": fitted_text(row.reports),
        "noop": [step["name"] for step in steps if step["noop"]],
        "messages": [step["message"] for step in steps],
    }


def _asked_for(told):
    """Of the metrics people ask for; None where there is none."""
    return told and {name: told[name] for name in WITH_INTERVALS}


def chosen(entries):
    """The place of the recipe with the lowest cross-fitted NLL on val; the first of equals."""
    return min(range(len(entries)), key=lambda index: entries[index]["val_nll"])


def bins_json(row):
    """The sums behind a reliability diagram."""
    bins = row.scores.bins
    return {name: getattr(bins, name).tolist() for name in ("count", "confidence", "correct")}
