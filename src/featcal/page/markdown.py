"""The report for a pull request: the summary in words, the comparison, the entropies."""

from __future__ import annotations

from featcal.page import sentences, tables
from featcal.page.content import Content
from featcal.report import render

MEANING = (
    "ECE, expected calibration error: how far confidence and the share of right answers lie apart, "
    "on average over levels of confidence. NLL, negative log-likelihood: how unlikely the model "
    "thought the truth was, on average. Both: lower is better."
)


def markdown(content: Content) -> str:
    """The text, without figures and without anything that needs a browser."""
    summary, entries = content.summary, content.entries
    parts = [f"## {summary.headline}", f"**Should you trust its confidence?** {summary.trust}"]
    parts += [f"**{point.question}** {point.answer}" for point in summary.points]
    if summary.command:
        parts.append(f"```\n{summary.command}\n```")
    parts += [f"> {caution}" for caution in (*summary.cautions, *content.notes)]
    parts += [MEANING, render.markdown(content.comparison).rstrip()]
    if len(entries) > 1:
        table = tables.entropy_table(entries)
        level = content.scene.groups.confidence
        parts.append(f"### {table.caption}, of answers above {100 * level:g} % confidence")
        parts.append(tables.markdown_table(table).rstrip())
        growths = {entry.recipe: entry.entropy for entry in entries[1:]}
        parts += sentences.entropy_findings(growths)
    return "\n\n".join(parts) + "\n"
