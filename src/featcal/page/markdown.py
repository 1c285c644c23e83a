"""The report for a pull request: the summary in words, the comparison, the entropies."""

from __future__ import annotations

from featcal.page import sentences, tables
from featcal.page.content import Content
from featcal.report import render


def markdown(content: Content) -> str:
    """The text, without figures and without anything that needs a browser."""
    summary, entries = content.summary, content.entries
    parts = [f"## {summary.headline}", f"**Should you trust its confidence?** {summary.trust}"]
    parts += [f"**{point.question}** {point.answer}" for point in summary.points]
    if summary.command:
        parts.append(f"```\n{summary.command}\n```")
    parts += [f"> {caution}" for caution in (*summary.cautions, *content.notes)]
    parts.append(render.markdown(content.comparison).rstrip())
    if len(entries) > 1:
        table = tables.entropy_table(entries)
        level = content.scene.groups.confidence
        parts.append(f"### {table.caption}, of answers above {100 * level:g} % confidence")
        parts.append(tables.markdown_table(table).rstrip())
        clipped = [entry for entry in entries if entry.recipe == "clip"] or entries[1:2]
        parts += [sentences.entropy_words(entry.entropy) for entry in clipped]
    return "\n\n".join(parts) + "\n"
