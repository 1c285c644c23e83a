"""One self-contained page about one pack: the verdict in plain words, tables, figures, an explorer.

`Content.of(pack)` computes everything once, `render(content)` writes it down. Not imported by
`import featcal`.
"""

from featcal.page.content import Content
from featcal.page.html import markdown, render
from featcal.page.write import write_report

__all__ = ["Content", "markdown", "render", "write_report"]
