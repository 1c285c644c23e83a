"""What `featcal compare` is asked for, refused where the options contradict each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from featcal.cli.commands import check_recipe, check_train
from featcal.core.errors import InputError
from featcal.core.steps import Mode
from featcal.data import Pack
from featcal.report.blocks import (
    PAPER_METRICS,
    PAPER_RECIPES,
    Block,
    comparison_block,
    paper_blocks,
)
from featcal.report.columns import USUAL, Column, columns
from featcal.report.comparison import DEFAULT_RECIPES, NONE, parse_all, recipe_text
from featcal.report.rows import Comparison

FORMATS = {"table": ".txt", "markdown": ".md", "csv": ".csv", "latex": ".tex", "json": ".json"}
GIVEN = "given"  # the order in which the recipes were given


@final
@dataclass(frozen=True)
class Request:
    """The arguments and options of the command, under their own names."""

    pack_path: Path
    recipes: tuple[str, ...] = ()
    fit_split: str = "val"
    test_split: str | None = None
    train_split: str | None = None
    folds: int | None = None
    joint: bool = False
    paper: bool = False
    baseline: str | None = None
    metrics: tuple[str, ...] = ()
    sort: str | None = None
    resamples: int = 0
    seed: int = 0
    bins: int = 15
    form: str | None = None
    as_json: bool = False
    output: Path | None = None
    force: bool = False

    @property
    def mode(self) -> Mode:
        """How pipelines are fitted."""
        return "joint" if self.joint else "sequential"

    @property
    def scored_split(self) -> str:
        """The split whose rows are scored."""
        return self.fit_split if self.folds else self.test_split or "test"

    @property
    def format(self) -> str:
        """The format asked for, or the one the name of the file tells."""
        if self.as_json and self.form not in (None, "json"):
            raise InputError(f"--json and --format {self.form} contradict each other: give one")
        if self.form is not None or self.as_json:
            return self.form or "json"
        if self.output is None:
            return "table"
        for form, suffix in FORMATS.items():
            if self.output.suffix.lower() == suffix:
                return form
        raise InputError(
            f"-o {self.output}: its name does not tell the format; add --format with one of "
            f"{', '.join(FORMATS)}, or end it in {', '.join(FORMATS.values())}"
        )

    @property
    def order(self) -> str | None:
        """The metric rows are sorted by; None where they keep their order."""
        if self.sort is not None:
            return None if self.sort == GIVEN else self.sort
        return self.metrics[0] if self.metrics and not self.paper else None

    def check(self) -> None:
        """Refuses options that contradict each other, before anything is read."""
        self.format  # noqa: B018 - refused where it cannot be told
        if self.folds and self.test_split is not None:
            raise InputError(
                f"--folds {self.folds} scores the rows of --fit-split and reads no other: "
                f"leave out --test-split {self.test_split}"
            )
        if not self.folds and self.fit_split == self.scored_split:
            raise InputError(
                f"--fit-split and --test-split are both {self.fit_split!r}: never fit on test; "
                "give two splits, or cross-fit one with --folds 5"
            )
        if self.train_split is not None:
            check_train(self.train_split, self.fit_split, self.scored_split)
        if self.paper:
            self._check_paper()

    def _check_paper(self) -> None:
        if self.recipes:
            raise InputError(
                f"--paper brings its own recipes: leave out --paper, or {self.recipes[0]!r}"
            )
        for option, value in (("--baseline", self.baseline), ("--sort", self.sort)):
            if value is not None:
                raise InputError(
                    f"--paper keeps the paper's order and compares each method with itself after "
                    f"clip: leave out --paper, or {option} {value}"
                )

    def chosen_recipes(self, pack: Pack) -> tuple[str, ...]:
        """The recipes to run, each of which the pack can serve; the baseline is one of them."""
        headless = pack.manifest.head is None
        if self.paper and headless:
            raise InputError(
                f"--paper clips features and {pack.path} holds logits alone: import features with "
                "the head's weight and bias"
            )
        recipes = PAPER_RECIPES if self.paper else self.recipes
        if not recipes:
            recipes = (NONE, "temperature") if headless else DEFAULT_RECIPES
        if self.baseline is not None:
            names = [recipe_text(recipe) for recipe in recipes]
            if recipe_text(self.baseline) not in names:
                recipes = (self.baseline, *recipes)
        for calibrator in parse_all(recipes):
            if calibrator is not None:
                check_recipe(calibrator, pack, train=self.train_split is not None)
        return recipes

    def check_folds(self, rows: int) -> None:
        """Refuses more folds than there are rows to deal out."""
        if self.folds and self.folds > rows:
            raise InputError(
                f"--folds is {self.folds} and {self.fit_split} has {rows} rows: give at most {rows}"
            )

    def columns(self, otherwise: tuple[str, ...]) -> list[Column]:
        """The columns asked for, each once, or those of other names."""
        return columns(tuple(dict.fromkeys(self.metrics)) or otherwise)

    def blocks(self, found: Comparison) -> list[Block]:
        """The layout of the tables."""
        if self.paper:
            return paper_blocks(found, self.columns(PAPER_METRICS))
        return [comparison_block(found, self.columns(USUAL))]
