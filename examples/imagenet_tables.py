"""The tables of the ImageNet example, from its result file alone."""

from example_pages import made_text, named, recipe_grid

from featcal.metrics.columns import COLUMNS
from featcal.report.tables import Table


def parts(results):
    """The generated parts of the page by name."""
    return {
        "imagenet recipes": recipe_grid(results["recipes"], results["chosen"]).markdown(),
        "imagenet photos": photo_grid(results["photos"]).markdown(),
        "imagenet checks": check_grid(results).markdown(),
        "imagenet story": story(results),
        "imagenet made": made_text(results),
    }


def story(results):
    """Before and after in two sentences."""
    before, after = (results["recipes"][place] for place in (0, results["chosen"]))
    number = {name: COLUMNS[name].text for name in COLUMNS}
    was, now = before["metrics"], after["metrics"]
    return (
        f"As it comes, the network is right on {number['accuracy'](was['accuracy'])} of the test "
        f"images and says {number['confidence'](was['confidence'])} on average. Val chooses "
        f"{named(after)} ({after['fitted']}): ECE goes from {number['ece'](was['ece'])} to "
        f"{number['ece'](now['ece'])}, NLL from {number['nll'](was['nll'])} to "
        f"{number['nll'](now['nll'])}, and the mean confidence to "
        f"{number['confidence'](now['confidence'])}."
    )


def photo_grid(photos):
    rows = []
    for photo in photos:
        for place, its in enumerate(photo["classes"]):
            name = f"`{photo['photo']}`" if place == 0 else ""
            chances = (f"{photo[when][place]:.1%}" for when in ("before", "after"))
            rows.append((name, its["name"], *chances))
    return Table("", ("photograph", "class", "before", "after"), tuple(rows))


def check_grid(results):
    head, logits, onnx = results["same_head"], results["attached"], results["onnx"]
    exact = "yes" if head["weight_is_the_networks_in_float16"] else "no"
    changed = f"{logits['predictions_changed']} of {logits['rows']:,}"
    parity = onnx["parity"]
    rows = (
        ("weights of the last layer, rounded to float16, are those of the pack", exact),
        ("largest difference before that rounding", f"{head['max_weight_difference']:.1e}"),
        ("attached network against calibrator and layer: logits", _apart(logits["from_the_layer"])),
        ("attached network against the pack's float16 layer", _apart(logits["from_the_pack"])),
        ("predictions that differ between those two", changed),
        (f"ONNX Runtime, {parity['rows']} pieces of photographs", _apart(parity["max_difference"])),
        ("predictions that differ there", str(parity["predictions_changed"])),
    )
    return Table("", ("check", "found"), rows)


def _apart(value):
    return f"at most {value:.1e}" if value else "equal bit for bit"
