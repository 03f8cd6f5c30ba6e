"""Elements of SVG as text. Every picture is a card with a background of its own, so that it can be
read on a light and on a dark page, whichever the browser asks for."""

from html import escape

WIDTH = 840  # px, what GitHub shows without scaling
SANS = '-apple-system, BlinkMacSystemFont, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
STYLE = f"""
    text {{ font-family: {SANS}; font-size: 14px; fill: #1f2328; }}
    .title {{ font-size: 17px; font-weight: 600; }}
    .bold {{ font-weight: 600; }}
    .small {{ font-size: 13px; fill: #59636e; }}
    .mono {{ font-family: {MONO}; font-size: 13px; }}
    .card {{ fill: #ffffff; stroke: #d1d9e0; }}
    .line {{ stroke: #59636e; fill: none; }}
    .grid {{ stroke: #d1d9e0; fill: none; }}
    .empty {{ fill: none; stroke: #59636e; stroke-dasharray: 4 3; }}
    .on-color {{ fill: #ffffff; font-weight: 600; }}
    .halo {{ paint-order: stroke; stroke: #ffffff; stroke-width: 5px; }}
    .blue {{ fill: #1f6feb; }}
    .orange {{ fill: #d9730d; }}
    .purple {{ fill: #8250df; }}
    .green {{ fill: #1a7f5a; }}
    .yellow {{ fill: #bf9b1f; }}
    .gray {{ fill: #848d97; }}
    .red {{ fill: #cf222e; }}
    @media (prefers-color-scheme: dark) {{
      text {{ fill: #e6edf3; }}
      .small {{ fill: #9da7b1; }}
      .card {{ fill: #0d1117; stroke: #3d444d; }}
      .line, .empty {{ stroke: #9da7b1; }}
      .grid {{ stroke: #30363d; }}
      .on-color {{ fill: #ffffff; }}
      .halo {{ stroke: #0d1117; }}
    }}
"""


def number(value: float) -> str:
    """A coordinate with at most one digit after the point."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> str:
    """A line of text. `style`: class names."""
    classes = f' class="{style}"' if style else ""
    end = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{number(x)}" y="{number(y)}"{classes}{end}>{escape(content)}</text>'


def rect(
    x: float, y: float, width: float, height: float, style: str, radius: float = 0, note: str = ""
) -> str:
    """A rectangle. `note`: shown when the pointer rests on it."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    round_corners = f' rx="{number(radius)}"' if radius else ""
    inside = f"><title>{escape(note)}</title></rect>" if note else "/>"
    return f'<rect {place}{round_corners} class="{style}"{inside}'


def line(x: float, y: float, to_x: float, to_y: float, style: str = "line", more: str = "") -> str:
    """A straight line. `more`: further attributes."""
    place = f'x1="{number(x)}" y1="{number(y)}" x2="{number(to_x)}" y2="{number(to_y)}"'
    return f'<line {place} class="{style}"{more}/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a tip at its end."""
    return line(x, y, to_x, to_y, more=' marker-end="url(#tip)"')


def picture(height: int, title: str, description: str, body: list[str], style: str = "") -> str:
    """The whole file. `description` is what a screen reader reads, with the numbers."""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc">',
        f'  <title id="title">{escape(title)}</title>',
        f'  <desc id="desc">{escape(description)}</desc>',
        f"  <style>{STYLE}{style}  </style>",
        '  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" class="gray"/></marker></defs>',
        f"  {rect(0.5, 0.5, WIDTH - 1, height - 1, 'card', radius=8)}",
        *(f"  {element}" for element in body),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
