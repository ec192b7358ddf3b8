"""The page around charts and tables: HTML and its style sheet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Literal

from simulator.report.svg import swatch

# Series: Okabe and Ito's colours, which people with any colour vision can distinguish, adapted to the
# background. Heat: one hue, from the background's brightness to its opposite.
_STYLE: Final = """
:root { color-scheme: light dark; --ground: #ffffff; --card: #f5f6f8; --text: #1b1f24; --dim: #57606a;
  --grid: #e3e6ea; --axis: #8b949e; --mark: #fff3d6;
  --s0: #0072b2; --s1: #d55e00; --s2: #00805e; --s3: #b0568f; --s4: #b07900; --s5: #3a9fd6; --s6: #3d4450;
  --s7: #8a7a00;
  --h0: #f1f4f8; --h1: #d9e5f0; --h2: #bfd5e8; --h3: #a3c4df; --h4: #84b0d5; --h5: #629ac8; --h6: #4383b7;
  --h7: #296aa0; --h8: #145084; --h9: #063461; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161b; --card: #1c2128; --text: #e6e9ed;
  --dim: #9aa4af; --grid: #2a3038; --axis: #6e7781; --mark: #3b3319;
  --s0: #58b0e8; --s1: #ff8b4d; --s2: #35c79a; --s3: #e79bca; --s4: #f0b429; --s5: #9ad7fb; --s6: #d0d7de;
  --s7: #e6dc5a;
  --h0: #1a2028; --h1: #1d2f42; --h2: #20405f; --h3: #24537d; --h4: #2a689b; --h5: #387fb8; --h6: #5598cd;
  --h7: #7bb2de; --h8: #a6cdec; --h9: #d8eaf9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 28px 24px 64px; }
h1, h2, h3 { overflow-wrap: anywhere; }
h1 { font-size: 28px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 21px; margin: 44px 0 2px; }
h3 { font-size: 17px; margin: 26px 0 2px; }
p { margin: 4px 0 12px; max-width: 76ch; }
.dim, figcaption, caption { color: var(--dim); }
figure { margin: 8px 0 20px; }
figcaption { font-size: 14.5px; margin-top: 4px; max-width: 90ch; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--text); font: 13px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
svg text.label { font-size: 14px; fill: var(--dim); }
.grid { stroke: var(--grid); } .axis { stroke: var(--axis); }
.path { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.whisker { stroke-width: 1.4; opacity: 0.75; }
.mark { stroke: var(--ground); stroke-width: 0.8; } .soft { opacity: 0.28; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px;
  margin: 20px 0; }
.card { background: var(--card); border-radius: 10px; padding: 12px 16px; }
.card b { display: block; font-size: 24px; line-height: 1.3; font-weight: 650; }
.card span { color: var(--dim); font-size: 14px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 10px 0 4px; padding: 0; list-style: none;
  font-size: 15px; }
.legend li { display: flex; align-items: center; gap: 7px; }
.legend .swatch { width: 34px; height: 14px; flex: none; }
.legend i { width: 18px; height: 14px; border-radius: 3px; flex: none; display: block; }
.ramp { display: flex; align-items: center; gap: 8px; font-size: 15px; margin: 10px 0 4px; }
.ramp i { width: 20px; height: 14px; display: block; } .ramp div { display: flex; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 10px 0 6px; font-size: 15px; font-variant-numeric: tabular-nums; }
caption { text-align: left; caption-side: bottom; font-size: 14.5px; padding-top: 6px; }
th, td { padding: 5px 10px 5px 6px; text-align: right; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th { white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 6px; }
th { font-weight: 600; vertical-align: bottom; }
td.best { font-weight: 700; } td.best, td.tied { background: var(--mark); }
td.words, th.words { text-align: left; white-space: normal; }
td.words { min-width: 8em; } td.words:nth-child(2) { min-width: 11em; }
td.words:last-child { min-width: 20em; }
tr:has(td.words) td { vertical-align: top; }
td.yes, td.partly, td.no, td.unknown { text-align: left; font-weight: 600; white-space: normal;
  min-width: 7em; }
td.yes { color: var(--s0); } td.partly { color: var(--s4); } td.no { color: var(--s1); }
td.unknown { color: var(--dim); }
td small { display: block; font-size: 12.5px; font-weight: 400; color: var(--dim); }
"""
_COLOURS: Final = "".join(
    f".s{n} {{ stroke: var(--s{n}); }} .f{n} {{ fill: var(--s{n}); }} i.f{n} {{ background: var(--s{n}); }}\n"
    for n in range(8)
) + "".join(f".h{n} {{ fill: var(--h{n}); }} i.h{n} {{ background: var(--h{n}); }}\n" for n in range(10))


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell, with a smaller line below."""

    text: str
    below: str = ""
    # "best" and "tied" are highlighted; the others are verdicts.
    standing: Literal["", "best", "tied", "yes", "partly", "no", "unknown"] = ""


def page(title: str, subtitle: str, body: Sequence[str]) -> str:
    """Return an HTML document; `title` and `subtitle` are text, `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{_COLOURS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="dim">{escape(subtitle)}</p>\n'
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def heading(text: str, lead: str = "") -> str:
    """Return a section's title with an introduction."""
    return f"<h2>{escape(text)}</h2>" + (f'<p class="dim">{escape(lead)}</p>' if lead else "")


def subheading(text: str) -> str:
    """Return a title within a section."""
    return f"<h3>{escape(text)}</h3>"


def cards(rows: Sequence[tuple[str, str]]) -> str:
    """Return the key figures, each (label, value)."""
    inner = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for label, value in rows
    )
    return f'<div class="cards">{inner}</div>'


def figure(picture: str, caption: str = "", legend: str = "") -> str:
    """Return a chart with its legend above and its caption below."""
    caption_html = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{legend}{picture}{caption_html}</figure>"


def line_legend(names: Sequence[tuple[str, int]]) -> str:
    """Return the legend of lines, each (name, series)."""
    rows = "".join(f"<li>{swatch(series)}{escape(name)}</li>" for name, series in names)
    return f'<ul class="legend">{rows}</ul>'


def colour_legend(names: Sequence[tuple[str, str]]) -> str:
    """Return the legend of areas, each (name, CSS class of its colour)."""
    rows = "".join(f'<li><i class="{kind}"></i>{escape(name)}</li>' for name, kind in names)
    return f'<ul class="legend">{rows}</ul>'


def ramp_legend(low: str, high: str) -> str:
    """Return the ten heat colours with labels for both ends."""
    steps = "".join(f'<i class="h{n}"></i>' for n in range(10))
    return f'<div class="ramp">{escape(low)}<div>{steps}</div>{escape(high)}</div>'


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    caption: str = "",
    text_columns: Collection[int] = (),
) -> str:
    """Return a table. The first column is names; `text_columns` are wrapped text, the others figures."""
    head = "".join(
        f"<th{_text_class(column in text_columns)}>{escape(words)}</th>"
        for column, words in enumerate(headings)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, column in text_columns) for column, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    words = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table>{words}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _text_class(is_text: bool) -> str:
    return ' class="words"' if is_text else ""


def _cell(cell: Cell, is_text: bool) -> str:
    kind = f' class="{cell.standing}"' if cell.standing else _text_class(is_text)
    below = f"<small>{escape(cell.below)}</small>" if cell.below else ""
    return f"<td{kind}>{escape(cell.text)}{below}</td>"
