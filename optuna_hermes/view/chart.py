"""Charts of curves as text: braille dots, and a mark of its own for the best curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Point = tuple[float, float]
Pixel = tuple[int, int]
K = TypeVar("K", bound=Hashable)

BEST_MARK = "●"
EMPTY = "(no points to draw)"
MIN_WIDTH, MIN_HEIGHT = 20, 5

_BRAILLE = 0x2800
# The bit of each dot of a braille character: four rows of two. Braille had six dots at first.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

# The label of y, the axis of x and its labels.
_LINES_AROUND = 3


def chart(
    curves: Mapping[K, Sequence[Point]],
    *,
    width: int = 72,
    height: int = 16,
    best: K | None = None,
    x_label: str = "unit",
    y_label: str = "value",
    log: bool = False,
) -> str:
    """Draw curves with axes, without colours; ``best`` over the others, with ``BEST_MARK``.

    Args:
        curves: points (x, y) of each curve, x ascending; points that are not finite are left out.
        log: draw the logarithm of y; ignored where a y is not above zero.

    Raises:
        ValueError: ``width`` or ``height`` is too small to read.

    Example:
        >>> print(chart({"a": [(1, 1), (20, 0)]}, width=20, height=6, x_label="epoch"))
        value
          1 ┤⠉⠒⠤⢄⣀
        0.5 ┤     ⠉⠒⠢⠤⣀
          0 ┤          ⠉⠑⠒⠤⣀
            └───────────────
             1   epoch    20
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        raise ValueError(
            f"A chart needs at least {MIN_WIDTH} x {MIN_HEIGHT} characters but got "
            f"{width} x {height}."
        )
    finite = {key: points for key, points in _finite(curves) if points}
    if not finite:
        return EMPTY
    xs, ys = (_bounds(point[axis] for p in finite.values() for point in p) for axis in (0, 1))
    log = log and ys[0] > 0
    rows = height - _LINES_AROUND
    ticks = _ticks(ys, rows, log=log)
    gutter = max(map(len, ticks.values()))
    paper = _Paper(columns=width - gutter - 2, rows=rows)
    place = _placer(xs, ys, size=paper.size, log=log)
    for key in sorted(finite, key=lambda key: key == best):
        paper.draw([place(point) for point in finite[key]], marked=key == best)
    text = "\n".join(_with_axes(paper, ticks, gutter))
    below = _between(_short(xs[0]), x_label, _short(xs[1]), paper.columns)
    return f"{y_label}\n{text}\n{'':{gutter}}  {below}".rstrip()


class _Paper:
    """``columns`` x ``rows`` characters, each of two by four dots; the origin is top left."""

    def __init__(self, *, columns: int, rows: int) -> None:
        self.columns = columns
        self._bits = [[0] * columns for _ in range(rows)]
        self._marks: set[Pixel] = set()
        self.size: Pixel = (2 * columns, 4 * rows)

    def draw(self, pixels: Sequence[Pixel], *, marked: bool) -> None:
        for across, down in _path(pixels):
            column, row = across // 2, down // 4
            self._bits[row][column] |= _DOTS[down % 4][across % 2]
            if marked:
                self._marks.add((column, row))

    def lines(self) -> Iterator[str]:
        for row, line in enumerate(self._bits):
            characters = (self._character(column, row, bits) for column, bits in enumerate(line))
            yield "".join(characters).rstrip()

    def _character(self, column: int, row: int, bits: int) -> str:
        if (column, row) in self._marks:
            return BEST_MARK
        return chr(_BRAILLE + bits) if bits else " "


def _finite(curves: Mapping[K, Sequence[Point]]) -> Iterator[tuple[K, list[Point]]]:
    for key, points in curves.items():
        yield key, [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _bounds(values: Iterable[float]) -> Point:
    known = list(values)
    return min(known), max(known)


def _placer(xs: Point, ys: Point, *, size: Pixel, log: bool) -> Callable[[Point], Pixel]:
    scale = math.log if log else float
    low, high = scale(ys[0]), scale(ys[1])

    def place(point: Point) -> Pixel:
        right = _share(point[0], xs[0], xs[1])
        up = _share(scale(point[1]), low, high)
        return round(right * (size[0] - 1)), round((1 - up) * (size[1] - 1))

    return place


def _share(value: float, low: float, high: float) -> float:
    # Halved first, since the difference of diverged values may overflow to infinity.
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span > 0 else 0.5


def _path(pixels: Sequence[Pixel]) -> Iterator[Pixel]:
    yield pixels[0]
    for (x0, y0), (x1, y1) in itertools.pairwise(pixels):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(1, steps + 1):
            yield round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)


def _with_axes(paper: _Paper, ticks: Mapping[int, str], gutter: int) -> Iterator[str]:
    for row, line in enumerate(paper.lines()):
        yield f"{ticks.get(row, ''):>{gutter}} {'┤' if row in ticks else '│'}{line}"
    yield f"{'':{gutter}} └{'─' * paper.columns}"


def _ticks(ys: Point, rows: int, *, log: bool) -> dict[int, str]:
    """Labels of the y axis by row: top, bottom and, where a row is there, the middle."""
    low, high = ys
    if low == high:
        return {rows // 2: _short(low)}
    ticks = {0: _short(high), rows - 1: _short(low)}
    if rows % 2 and rows > 2:
        ticks[rows // 2] = _short(math.sqrt(low) * math.sqrt(high) if log else low / 2 + high / 2)
    return ticks


def _short(value: float) -> str:
    return f"{value:.3g}"


def _between(left: str, middle: str, right: str, columns: int) -> str:
    """``left`` and ``right`` at the ends, ``middle`` in the middle if there is room for it."""
    room = columns - len(left) - len(right)
    return left + (middle if len(middle) + 2 <= room else "").center(max(room, 1)) + right
