"""One self-contained page about one pack: the verdict in plain words, tables, figures, an explorer.

`Content.of(pack)` computes everything once, `render(content)` writes it down. Not imported by
`import featcal`.
"""

from featcal.page.content import Content
from featcal.page.html import markdown, render

__all__ = ["Content", "markdown", "render"]
