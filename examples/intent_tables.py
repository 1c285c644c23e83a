"""The tables of the text example, from its result file alone."""

from example_pages import made_text, named, recipe_grid

from featcal.metrics.columns import COLUMNS
from featcal.report.tables import Table

TITLES = {"linear": "linear", "mlp": "one hidden layer"}
IN_SCOPE = ("none", "temperature", "sample", "isotonic")  # beside what val chose


def parts(results):
    """The generated parts of the page by name."""
    cases = results["cases"]
    first = [case for case in cases if "bins" in case]
    wide = {case["set"]: case for case in first if case["head"] == "mlp"}
    return {
        "text sets": set_grid(results["sets"]).markdown(),
        "text heads": head_grid(first).markdown(),
        "text banking77": recipe_grid(
            wide["banking77"]["recipes"], wide["banking77"]["chosen"]
        ).markdown(),
        "text scope story": scope_story(wide["clinc150"]),
        "text scope": scope_grid([case for case in first if _has_scope(case)]).markdown(),
        "text quoted": quoted_grid(results["quoted"]).markdown(),
        "text made": f"{made_text(results)} {training_text(results)}",
    }


def set_grid(sets):
    """What the two sets hold."""
    rows = []
    for name, told in sets.items():
        sizes = (f"{told['rows'][split]:,}" for split in ("train", "val", "test"))
        outside = f"{told['out_of_scope']:,}" if told["out_of_scope"] else "none"
        rows.append(
            (name, str(told["intents"]), *sizes, outside, str(told["test_questions_in_train"]))
        )
    headings = ("set", "intents", "train", "val", "test", "out of scope", "of test also in train")
    return Table("", headings, tuple(rows))


def head_grid(cases):
    """Each head before and after what val chose for it."""
    rows = []
    for case in cases:
        before, after = case["recipes"][0], case["recipes"][case["chosen"]]
        accuracy, sure = (before["metrics"][name] for name in ("accuracy", "confidence"))
        pairs = (_pair(name, before, after) for name in ("ece", "nll"))
        shares = (f"{value:.2%}" for value in (case["train_accuracy"], accuracy, sure))
        head = f"{case['set']}, {TITLES[case['head']]}"
        rows.append((head, *shares, named(after), *pairs))
    return Table(
        "",
        (
            "head",
            "right on train",
            "right on test",
            "mean confidence",
            "val chooses",
            "ECE % on test",
            "NLL on test",
        ),
        tuple(rows),
    )


def _pair(name, before, after):
    number = COLUMNS[name].number
    return f"{number(before['metrics'][name])} → {number(after['metrics'][name])}"


def _has_scope(case):
    return "scope" in case["recipes"][0]


def scope_story(case):
    """The wide head before and after what val chose for it, in two sentences."""
    before, after = (case["recipes"][place] for place in (0, case["chosen"]))
    (was, now), sure = (row["scope"] for row in (before, after)), "0.9"
    outside, inside = (
        " to ".join(f"{scope[kind]['above'][sure]:.1%}" for scope in (was, now))
        for kind in ("out_of_scope", "in_scope")
    )
    return (
        f"With {named(after)} the share of questions out of scope that are answered with more than "
        f"{sure} goes from {outside}; in scope it goes from {inside}. "
        f"The AUROC, how well confidence tells the two kinds apart, goes from "
        f"{was['auroc']:.4f} to {now['auroc']:.4f}."
    )


def scope_grid(cases):
    """Questions out of scope: a few recipes on the wide head, and what matters on the other."""
    rows = []
    for case in sorted(cases, key=lambda case: case["head"] != "mlp"):
        for place, row in enumerate(case["recipes"]):
            shown = IN_SCOPE if case["head"] == "mlp" else ("none",)
            if place == case["chosen"] or row["recipe"] in shown:
                rows.append((TITLES[case["head"]], named(row), *_scope_cells(row["scope"])))
    headings = (
        *("head", "recipe", "AUROC", "change"),
        *("out of scope above 0.5", "above 0.9", "in scope above 0.5", "above 0.9"),
    )
    return Table("", headings, tuple(rows))


def _scope_cells(scope):
    shares = [
        f"{share:.1%}"
        for kind in ("out_of_scope", "in_scope")
        for share in scope[kind]["above"].values()
    ]
    return (f"{scope['auroc']:.4f}", _change(scope.get("change")), *shares)


def _change(change):
    if change is None:
        return ""
    low, high = change["interval"]
    return f"{change['delta']:+.4f} [{low:+.4f}, {high:+.4f}] {change['verdict']}"


def quoted_grid(found):
    """Questions nobody should answer, with the answer they got."""
    rows = []
    for place, row in enumerate(found):
        kind = row["kind"] if place == 0 or found[place - 1]["kind"] != row["kind"] else ""
        chances = (f"{row[when]:.1%}" for when in ("before", "after"))
        rows.append((kind, row["question"], f"`{row['intent']}`", *chances))
    headings = ("", "question that no intent covers", "answered as", "before", "after")
    return Table("", headings, tuple(rows))


def training_text(results):
    """How the heads were trained."""
    told, heads = results["training"], []
    for name, options in told["heads"].items():
        width = f" of {options['hidden']} units" if options["hidden"] else ""
        heads.append(f"{TITLES[name]}{width}: {options['epochs']} epochs, rate {options['rate']}")
    return (
        f"Heads are trained by Adam in batches of {told['batch']} with one cycle of the learning "
        f"rate, without weight decay ({'; '.join(heads)}), seeds "
        f"{', '.join(map(str, results['protocol']['head_seeds']))}; the tables show the first. Val "
        f"of banking77 is cut from its train by seed {told['split_seed']}."
    )
