"""Write SVG as text. Colours are classes of the page's style sheet, which has light and dark variants."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

# Shapes that distinguish lines without colour, in the order of the palette.
_MARKERS: Final = ("circle", "square", "diamond", "triangle", "cross", "plus")
_DASHES: Final = ("", "7 4", "2 3", "9 3 2 3", "12 5", "4 2")
PALETTE: Final = 8


class Drawing:
    """The elements of one picture of `width` by `height` units, which the page scales to its own width."""

    def __init__(self, width: float, height: float, label: str) -> None:
        """Start an empty picture. `label` describes it for screen readers."""
        self._parts: list[str] = []
        self._size = (width, height)
        self._label = label

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Add a straight line with a CSS class."""
        self._parts.append(f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>')

    def path(self, points: Sequence[tuple[float, float]], series: int) -> None:
        """Add a line through points in the colour and dash pattern of a series."""
        drawn = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline class="path s{series % PALETTE}"{_dash(series)} points="{drawn}"/>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """Add a filled rectangle; `title` is its tooltip."""
        geometry = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        inner = f"<title>{escape(title)}</title></rect>" if title else "</rect>"
        self._parts.append(f'<rect class="{kind}" {geometry}>{inner}')

    def text(self, x: float, y: float, content: str, kind: str = "tick", anchor: str = "start") -> None:
        """Add text at a baseline; `anchor`: start, middle or end."""
        self._parts.append(
            f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(content)}</text>'
        )

    def upright(self, x: float, y: float, content: str) -> None:
        """Add the label of a vertical axis, centred at a point."""
        self._parts.append(
            f'<text class="label" transform="translate({_n(x)} {_n(y)}) rotate(-90)" '
            f'text-anchor="middle">{escape(content)}</text>'
        )

    def marker(self, x: float, y: float, series: int, title: str) -> None:
        """Add a point in the colour and shape of a series."""
        self._parts.append(
            f'<path class="mark f{series % PALETTE}" d="{_marker(x, y, series)}">'
            f"<title>{escape(title)}</title></path>"
        )

    def render(self) -> str:
        """Return the SVG element."""
        width, height = self._size
        return (
            f'<svg viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(self._label)}">'
            + "".join(self._parts)
            + "</svg>"
        )


def swatch(series: int) -> str:
    """Return a short line with the marker of a series, for a legend."""
    drawing = Drawing(34, 14, "")
    drawing.path([(1, 7), (33, 7)], series)
    drawing.marker(17, 7, series, "")
    return drawing.render().replace("<svg ", '<svg class="swatch" aria-hidden="true" ', 1)


def _dash(series: int) -> str:
    dash = _DASHES[series % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _marker(x: float, y: float, series: int) -> str:
    match _MARKERS[series % len(_MARKERS)]:
        case "circle":
            return f"M{_n(x - 4)} {_n(y)}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0"
        case "square":
            return f"M{_n(x - 3.6)} {_n(y - 3.6)}h7.2v7.2h-7.2z"
        case "diamond":
            return f"M{_n(x)} {_n(y - 5)}l5 5l-5 5l-5 -5z"
        case "triangle":
            return f"M{_n(x)} {_n(y - 5)}l4.8 8.6h-9.6z"
        case "cross":
            arms = "l1.6 -1.6l3 3l3 -3l1.6 1.6l-3 3l3 3l-1.6 1.6l-3 -3l-3 3l-1.6 -1.6l3 -3z"
            return f"M{_n(x - 4.6)} {_n(y - 3)}{arms}"
    return f"M{_n(x - 1.2)} {_n(y - 5)}h2.4v3.8h3.8v2.4h-3.8v3.8h-2.4v-3.8h-3.8v-2.4h3.8z"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
