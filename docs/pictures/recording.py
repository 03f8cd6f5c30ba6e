"""recording.svg: a terminal in which the commands of recording.txt and their verdicts are typed and
printed, as an animation in CSS.

A viewer without animations shows the last frame.
"""

import textwrap
from pathlib import Path

from . import svg

OUTPUT = Path(__file__).resolve().parent / "recording.txt"
COLUMNS = 100
LINE = 18  # px
TOP = 56
LEFT = 24
SECONDS_PER_KEY = 0.015
SECONDS_BEFORE_OUTPUT = 0.5
SECONDS_PER_LINE = 0.1
SECONDS_TO_READ = 1.8  # after the output of each command
CHARACTER = 7.83  # px, the width of a character that textLength asks for
STYLE = """
    .terminal { fill: #0d1117; stroke: #3d444d; }
    .bar { fill: #21262d; }
    .mono { fill: #e6edf3; white-space: pre; }
    .command { fill: #7ee787; }
    .bad { fill: #ff7b72; }
    .good { fill: #7ee787; font-weight: 600; }
    .hint { fill: #ffa657; }
    .name { fill: #9da7b1; }
    @media (prefers-reduced-motion: reduce) { * { animation: none !important; } }
"""
# Beginning of a line -> its class.
MARKED = {
    "$ ": "command",
    "It does not fit": "bad",
    "It fits": "good",
    "What fits": "hint",
    "1. ": "hint",
}
# Beginning of a line that is shown -> the lines after it that are, too. The rest is "...".
SHOWN = {"$ ": 0, "It does not fit": 1, "1. ": 2, "It fits": 1}


def shown_lines() -> list[str]:
    """The commands, and what answers the question of each; "..." for what is left out after one."""
    lines = list[str]()
    further = 0
    for line in OUTPUT.read_text().splitlines():
        start = next((start for start in SHOWN if line.startswith(start)), None)
        if start is not None or further:
            lines.append(line)
            further = further - 1 if start is None else SHOWN[start]
        elif lines[-1].startswith("$ "):
            lines.append("...")
    return lines


def read_lines() -> list[tuple[str, str]]:
    """The lines of the recording, wrapped at words, and their classes."""
    lines = []
    for line in shown_lines():
        style = next((name for start, name in MARKED.items() if line.startswith(start)), "")
        if style == "command":
            parts = textwrap.wrap(line, COLUMNS - 2, subsequent_indent="    ")
            parts[:-1] = [f"{part} \\" for part in parts[:-1]]
        else:
            indent = line[: len(line) - len(line.lstrip())]
            fits = len(line) <= COLUMNS
            parts = [line] if fits else textwrap.wrap(line, COLUMNS, subsequent_indent=indent)
        lines += [(part, style) for part in parts]
    return lines


def find_times(lines: list[tuple[str, str]]) -> tuple[list[float], float]:
    """The second at which each line begins to show, and when the recording starts again."""
    now = 0.6
    was_command = False
    times = []
    for number, (line, style) in enumerate(lines):
        is_command = style == "command"
        if was_command and not is_command:
            now += SECONDS_BEFORE_OUTPUT
        if is_command and not was_command and number:
            now += SECONDS_TO_READ
        times.append(now)
        now += SECONDS_PER_KEY * len(line) if is_command else SECONDS_PER_LINE
        was_command = is_command
    return times, now + SECONDS_TO_READ + 1


def draw() -> str:
    lines = read_lines()
    times, end = find_times(lines)
    begin = (
        end - SECONDS_TO_READ
    )  # the first frame, which a preview or a printed page shows, is complete

    def share(seconds: float) -> str:
        """Part of the recording, for keyframes."""
        return f"{100 * seconds / end:.2f}%"

    rules = []
    texts = []
    for number, ((line, style), start) in enumerate(zip(lines, times, strict=True)):
        if style == "command":
            typed = start + SECONDS_PER_KEY * len(line)
            frames = f"0%,{share(start)}{{clip-path:inset(0 100% 0 0)}}{share(typed)},100%{{clip-path:inset(0)}}"
            timing = f"steps({len(line)})"
        else:
            frames = f"0%,{share(start)}{{opacity:0}}{share(start + 0.01)},100%{{opacity:1}}"
            timing = "steps(1)"
        rules.append(f"    @keyframes l{number} {{{frames}}}")
        animation = f' style="animation:l{number} {end:.1f}s {timing} -{begin:.1f}s infinite"'
        length = f' textLength="{svg.number(CHARACTER * len(line))}"'
        element = svg.text(0, LINE * number, line, f"mono {style}".strip())
        texts.append(
            element.replace("<text ", f'<text xml:space="preserve"{animation}{length} ', 1)
        )
    height = TOP + LINE * len(lines) + 4
    bar = [
        svg.rect(0.5, 0.5, svg.WIDTH - 1, height - 1, "terminal", radius=8),
        '<path d="M1 30V9a8 8 0 0 1 8-8h822a8 8 0 0 1 8 8v21z" class="bar"/>',
        *(
            f'<circle cx="{22 + 20 * place}" cy="16" r="6" fill="{color}"/>'
            for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
        svg.text(svg.WIDTH / 2, 21, "llama-ft plan", "small name", anchor="middle"),
        f'<g transform="translate({LEFT} {TOP})">',
        *texts,
        "</g>",
    ]
    return svg.picture(
        height, "llama-ft plan in a terminal", describe(), bar, STYLE + "\n".join(rules) + "\n"
    )


def describe() -> str:
    """The commands and the lines that answer them, in words."""
    wanted = ("$ ", "It does not fit", "1. ", "It fits")
    said = [line for line in OUTPUT.read_text().splitlines() if line.startswith(wanted)]
    return "A terminal. " + " ".join(line.rstrip(".") + "." for line in said)
