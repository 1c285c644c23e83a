"""Where the panels of a figure of reliability diagrams lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

# Inches. Fixed places, not a layout engine: the two axes of a panel line up to the pixel.
SIDE, HISTOGRAM, BETWEEN, APART = 2.5, 0.85, 0.12, 0.32
LEFT, RIGHT, HEAD, FOOT, LINE = 0.78, 0.2, 0.5, 0.48, 0.18
MAX_IN_ROW = 4

Box = tuple[float, float, float, float]


@final
@dataclass(frozen=True, slots=True)
class Grid:
    """Where the panels of a figure lie, in inches from its lower left corner."""

    panels: int  # how many
    title_lines: int
    handles: int  # entries of the legend

    @property
    def columns(self) -> int:
        """How many panels stand in a row."""
        return self.panels if self.panels <= MAX_IN_ROW else -(-self.panels // 2)

    @property
    def rows(self) -> int:
        """How many rows of panels there are."""
        return -(-self.panels // self.columns)

    @property
    def legend_columns(self) -> int:
        """How many entries of the legend stand in a row."""
        return self.handles if self.columns >= MAX_IN_ROW else min(self.handles, self.columns)

    @property
    def bottom(self) -> float:
        """The height of the legend."""
        return 0.1 + LINE * -(-self.handles // self.legend_columns)

    @property
    def row_height(self) -> float:
        """A diagram, its histogram and the words around them."""
        return FOOT + HISTOGRAM + BETWEEN + SIDE + HEAD + LINE * self.title_lines

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the figure."""
        width = LEFT + self.columns * (SIDE + APART) - APART + RIGHT
        return width, self.bottom + self.rows * self.row_height

    def boxes(self, panel: int) -> tuple[Box, Box]:
        """Of the diagram and the histogram of a panel, as shares of the figure."""
        row, column = divmod(panel, self.columns)
        width, height = self.size
        x = LEFT + column * (SIDE + APART)
        y = self.bottom + (self.rows - 1 - row) * self.row_height + FOOT
        low = (x / width, y / height, SIDE / width, HISTOGRAM / height)
        above = y + HISTOGRAM + BETWEEN
        return (x / width, above / height, SIDE / width, SIDE / height), low
