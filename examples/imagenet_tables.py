"""The tables of the ImageNet example, from its result file alone."""

from example_pages import made_text, named, recipe_grid

from featcal.metrics.columns import COLUMNS


def parts(results):
    """The generated parts of the page by name."""
    return {
        "imagenet recipes": recipe_grid(results["recipes"], results["chosen"]).markdown(),
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
