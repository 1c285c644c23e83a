"""The report for a pull request: the summary in words, the comparison, the entropies."""

from __future__ import annotations

from featcal.page import tables
from featcal.page.certainty import entropy_findings
from featcal.page.content import Content
from featcal.report.render import notes

MEANING = (
    "ECE, expected calibration error: how far confidence and the share of right answers lie apart, "
    "on average over levels of confidence. NLL, negative log-likelihood: how unlikely the model "
    "thought the truth was, on average. Brier score: how far its probabilities lie from the truth, "
    "squared, on average. All: lower is better."
)
BOLD = (
    "In bold: the best of its column, where no other may be as good by paired intervals; recipes "
    "that score the same on all rows share it. Gap: mean confidence minus accuracy."
)


def markdown(content: Content) -> str:
    """The text, without figures and without anything that needs a browser."""
    summary, entries = content.summary, content.entries
    parts = [f"## {summary.headline}", f"**Should you trust its confidence?** {summary.trust}"]
    parts += [f"**{point.question}** {point.answer}" for point in summary.points]
    if summary.command:
        parts.append(f"```\n{summary.command}\n```")
    parts += [f"> {caution}" for caution in (*summary.cautions, *content.notes)]
    compared = tables.comparison_table(content.comparison, summary.seen)
    parts += [MEANING, _table(compared).rstrip()]
    learned = [f"`{entry.recipe}` {entry.fitted}" for entry in entries if entry.fitted]
    told = [f"What was learned: {'; '.join(learned)}."] if learned else []
    parts.append("\n".join(f"- {note}" for note in (*notes(content.comparison), BOLD, *told)))
    if len(entries) > 1:
        table = tables.entropy_table(entries)
        level = content.scene.groups.confidence
        parts.append(f"### {table.caption}, of answers above {100 * level:g} % confidence")
        parts.append(_table(table).rstrip())
        growths = {entry.recipe: entry.entropy for entry in entries[1:]}
        parts += [f"**{one.lead}** {one.numbers}".rstrip() for one in entropy_findings(growths)]
    return "\n\n".join(parts) + "\n"


def _table(table: tables.Table) -> str:
    """The table as Markdown; bars inside code would end a cell even there."""
    rule = ["---:" if head.numeric else "---" for head in table.heads]
    lines = [[head.text for head in table.heads], rule]
    lines += [[_cell(cell) for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(cell: tables.Cell) -> str:
    text = cell.text.replace("|", "\\|")
    if cell.code:
        return f"`{text}`"
    if cell.mark == "best":
        return " ".join(filter(None, [f"**{text}**", cell.small]))
    return " ".join(filter(None, [text, cell.small, cell.mark]))
