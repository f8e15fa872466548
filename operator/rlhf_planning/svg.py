"""A picture as SVG: shapes and texts, in pixels from the upper left corner."""

from __future__ import annotations

from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, FAINT, BAND, RULE, WHITE = "#24292f", "#6e7781", "#f3f5f8", "#b8c0c8", "#ffffff"
MARGIN = 16
HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path d="M0 0V6" stroke="{RULE}" stroke-width="1.6"/></pattern></defs>'
)
"""What `url(#hatch)` fills with."""


class Picture:
    """The shapes drawn so far. Underscores in an attribute's name stand for hyphens, the last one for nothing."""

    def __init__(self, title: str, below: str) -> None:
        self._shapes: list[str] = []
        self.text(MARGIN, 24, title, font_size=15, font_weight=600)
        self.text(MARGIN, 44, below, fill=FAINT)

    def shape(self, kind: str, hover: str = "", /, **attributes: object) -> None:
        """Add an element; `hover` is shown where it is pointed at."""
        self._add(kind, f"<title>{escape(hover)}</title>" if hover else "", attributes)

    def text(self, x: float, y: float, content: str, /, **attributes: object) -> None:
        """Add a text that begins at x on the line y."""
        self._add("text", escape(content), {"x": x, "y": y, **attributes})

    def small(self, x: float, y: float, content: str, /, **attributes: object) -> None:
        """Add a faint text in small letters."""
        self.text(x, y, content, **{"fill": FAINT, "font_size": 11, **attributes})

    def rule(self, path: str, stroke: str = RULE, **attributes: object) -> None:
        """Add a line along a path."""
        self.shape("path", d=path, stroke=stroke, **attributes)

    def svg(self, width: float, height: float) -> str:
        """The whole picture, on white."""
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="12" fill="{INK}">'
        white = f'<rect width="100%" height="100%" fill="{WHITE}"/>'
        return "\n".join([head, HATCH, white, *self._shapes, "</svg>"]) + "\n"

    def _add(self, kind: str, inner: str, attributes: dict[str, object]) -> None:
        given = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{_plain(value)}"' for name, value in attributes.items()
        )
        self._shapes.append(f"<{kind}{given}>{inner}</{kind}>" if inner else f"<{kind}{given}/>")


def _plain(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
