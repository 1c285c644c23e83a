"""One more recipe for a page that is open: what `featcal explore` answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from featcal.analysis import ClipSweep, EntropyGrowth
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.core.spec import parse
from featcal.page import sentences, tables
from featcal.page.cautions import idle
from featcal.page.certainty import control_for, entropy_words
from featcal.page.content import Content
from featcal.page.entries import Clipped, Entry, check_train, sweep, why_no_sweep
from featcal.page.html import rows_html
from featcal.report.comparison import NONE, compare
from featcal.report.rows import Comparison, Row


@final
class Live:
    """Answers for one page.

    It remembers what was tried: the best of a column is judged among all recipes a reader sees, and
    what was fitted once is not fitted again.
    """

    def __init__(self, content: Content) -> None:
        self.content = content
        self.known = {row.recipe: row for row in content.comparison}

    def answer(self, recipe: str, beside: Sequence[str] = ()) -> dict[str, Any]:
        """Fits a recipe as the page's own were fitted, and gives all that the page shows of it.

        Args:
            recipe: its text.
            beside: the recipes the page shows already; its own ones go without saying.

        Returns:
            `entry`, as in the page's JSON; `rows`, an HTML row for each table by its name;
            `judged`, the rows of the comparison by their recipes, since a star may have moved;
            `sweep`, or None; `words`, sentences for the reader.

        Raises:
            InputError: for text that is no recipe, or one that this pack cannot serve.
        """
        name = repr(self.checked(recipe))
        with self.content.scene.calmly():
            row = self._row(name)
            entry = Entry.of(self.content.scene, row)
            swept = self._sweep(row)
        shown = self._side_by_side(row, beside)
        table = tables.comparison_table(shown, self.content.summary.seen)  # its own rows first
        judged = {row.recipe: cells for row, cells in zip(shown, table.rows, strict=True)}
        rows = {
            "comparison": judged.pop(name),
            "counts": tables.counts_row(entry),
            "entropy": tables.entropy_row(entry),
            "changed": tables.changed_row(entry),
        }
        place = [one.recipe for one in shown].index(name)
        differences = shown.as_json()["rows"][place]["differences"]
        return {
            "entry": {**entry.as_json(), "differences": differences},
            "rows": rows_html(rows),
            "judged": rows_html(judged),
            "sweep": None if swept is None else swept.as_json(),
            "words": [
                *idle([row]),
                *filter(None, [why_no_sweep(row.calibrator)]),
                entropy_words(entry.entropy, self._control(entry)),
                sentences.changed_words(entry.changed),
            ],
        }

    def _control(self, entry: Entry) -> EntropyGrowth | None:
        """What the entropies of a clip are held against."""
        growths = {known.recipe: known.entropy for known in self.content.entries}
        return control_for(entry.entropy, growths)

    def checked(self, recipe: str) -> Calibrator:
        """A fresh calibrator of the recipe, which computes nothing.

        Raises:
            InputError: see `answer`.
        """
        if recipe.strip() == NONE:
            raise InputError(
                "none is the model as it is, which the page shows already: give a recipe"
            )
        calibrator = parse(recipe)
        check_train(calibrator)
        if calibrator.needs_features and not self.content.scene.has_features:
            raise InputError(f"{calibrator!r} works on features, and this pack holds logits alone")
        return calibrator

    def _row(self, name: str) -> Row:
        if name not in self.known:
            scene, settings = self.content.scene, self.content.comparison.settings
            asked = {key: settings[key] for key in ("bins", "resamples", "seed")}
            (self.known[name],) = compare(scene.fit, scene.test, [name], scene.head, **asked)
        return self.known[name]

    def _sweep(self, row: Row) -> ClipSweep | None:
        for known in self.content.sweeps:
            if known.recipe == row.recipe:
                return known
        clipped = Clipped.of(row.calibrator)
        return None if clipped is None else sweep(self.content.scene, {row.recipe: clipped})[0]

    def _side_by_side(self, row: Row, beside: Sequence[str]) -> Comparison:
        """The page's own rows, those tried before that it shows, and this one; each once."""
        own = self.content.comparison
        tried = [self.known[name] for name in beside if name in self.known]
        rows = {one.recipe: one for one in (*own, *tried, row)}
        return replace(own, rows=tuple(rows.values()), against=(None, *(0 for _ in list(rows)[1:])))
