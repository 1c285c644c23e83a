"""Whether loops that should learn the same do: the table of chance in docs/benchmarks.md.

Loops that are the same differ by rounding alone, seed by seed. Two exact tests need to know no more
about it than that: the sign of a seed's difference could as well be the other, and seeds that were
made first are like those that were made later.
"""

import math
from itertools import combinations, product

import torch

from featcal.report.paper import Grid

PLANNED = range(1, 5)  # the other seeds were made after these had been looked at
TITLE = "Largest difference of any epoch in standard errors, and how often chance gives a larger:"


def chance(results):
    """Every pair of loops of the networks that have seeds beyond the planned ones."""
    rows = []
    for row in results["rows"]:
        found = row.get("curves", {})
        for pair in combinations(found, 2):
            seeds, between = differences(*(found[loop] for loop in pair))
            later = [place for place, seed in enumerate(seeds) if seed not in PLANNED]
            if len(later) > 1:
                tested = (flipped(between[later]), flipped(between), moved(seeds, between))
                rows.append((f"{row['network']}: {pair[0]} minus {pair[1]}", *tested))
    planned = f"seeds {PLANNED[0]} to {PLANNED[-1]}"
    return Grid(TITLE, ("", "later seeds", "all seeds", f"{planned} against later"), tuple(rows))


def differences(one, other):
    """The seeds that two loops share, and for each a row: its losses by epoch, subtracted."""
    known = [dict(zip(loop["seeds"], loop["losses"], strict=True)) for loop in (one, other)]
    seeds = sorted(known[0].keys() & known[1].keys())
    losses = [torch.tensor([loop[seed] for seed in seeds], dtype=torch.float64) for loop in known]
    return seeds, losses[0] - losses[1]


def flipped(between):
    """The mean difference against all patterns of signs; the first pattern is the one there is."""
    signs = torch.tensor(list(product((1.0, -1.0), repeat=len(between))), dtype=torch.float64)
    means = signs @ between / len(between)
    variances = (between.square().mean(0) - means.square()) / (len(between) - 1)
    found = in_errors(means, variances)
    epoch = int(found[0].abs().argmax())
    return f"{found[0, epoch]:+.1f} in epoch {epoch + 1}, p = {share_as_large(found):.3f}"


def moved(seeds, between):
    """The planned seeds against as many others, all choices; the first choice is the one made."""
    planned = [place for place, seed in enumerate(seeds) if seed in PLANNED]
    chosen = sorted(combinations(range(len(seeds)), len(planned)), key=lambda c: list(c) != planned)
    inside = torch.zeros(len(chosen), len(seeds), dtype=torch.float64)
    for row, places in enumerate(chosen):
        inside[row, list(places)] = 1
    sides = (inside, 1 - inside)
    counts = [len(planned), len(seeds) - len(planned)]
    means = [side @ between / count for side, count in zip(sides, counts, strict=True)]
    within = sum(
        side @ between.square() - count * mean.square()
        for side, count, mean in zip(sides, counts, means, strict=True)
    )
    variances = within / (len(seeds) - 2) * sum(1 / count for count in counts)
    return f"p = {share_as_large(in_errors(means[0] - means[1], variances)):.3f}"


def in_errors(means, variances):
    """Means in standard errors; 0 where there is neither, which division would not know."""
    found = means / variances.clamp(min=0).sqrt()
    return torch.nan_to_num(found, nan=0.0, posinf=math.inf, neginf=-math.inf)


def share_as_large(found):
    """Of all rows, those whose worst epoch is as bad as that of the first, which counts itself."""
    worst = found.abs().amax(1)
    return float((worst >= worst[0] * (1 - 1e-9)).double().mean())
