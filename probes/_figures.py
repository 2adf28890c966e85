"""One look for every figure: 3.25 inches wide (a column of a paper), Okabe-Ito colours, markers and line
styles.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito (2008), grey for their yellow: that cannot be read as a thin line on white.
OKABE_ITO = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
    "grey": "#999999",
}
COLOURS = tuple(OKABE_ITO.values())
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = ("-", "--", "-.", ":")
WIDTH = 3.25
FONT = 8


def new_axes(ax: Axes | None, height: float = 2.5) -> Axes:
    """The given Axes, or one in a new figure of column width."""
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    ax.tick_params(labelsize=FONT - 1)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def finish(ax: Axes, xlabel: str, ylabel: str, title: str = "", legend: bool = True) -> Axes:
    ax.set_xlabel(xlabel, fontsize=FONT)
    ax.set_ylabel(ylabel, fontsize=FONT)
    if title:
        ax.set_title(title, fontsize=FONT)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=FONT - 1.5, frameon=False, handlelength=2.2, labelspacing=0.3, borderaxespad=0.2)
    return ax


def save(figure: Axes | Figure, path: str | Path, dpi: int = 300) -> tuple[Path, Path]:
    """Write `path`.pdf and `path`.png; a suffix on path is replaced. Returns both paths.

    The PDF embeds TrueType fonts (publishers refuse matplotlib's default) and no date: the same data give the
    same file.
    """
    import matplotlib as mpl

    found: Any = figure if hasattr(figure, "savefig") else figure.figure
    stem = Path(path)
    stem = stem.with_suffix("") if stem.suffix in {".pdf", ".png"} else stem
    stem.parent.mkdir(parents=True, exist_ok=True)
    pdf, png = (stem.with_name(stem.name + suffix) for suffix in (".pdf", ".png"))
    with mpl.rc_context({"pdf.fonttype": 42}):
        found.savefig(pdf, metadata={"CreationDate": None})
        found.savefig(png, dpi=dpi)
    return pdf, png


def look(i: int) -> dict[str, Any]:
    """Colour, marker and line style of the i-th series."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": STYLES[(i // len(COLOURS) + i) % len(STYLES)],
        "markersize": 3,
        "linewidth": 1.1,
    }


def line_with_band(
    ax: Axes, x: Sequence[float] | np.ndarray, values: xr.DataArray, along: str, i: int, label: str
) -> None:
    """Median over every dimension but `along`, with the 10th to 90th percentile as a band."""
    others = [dim for dim in values.dims if dim != along]
    with warnings.catch_warnings():  # a token where nothing is defined is a gap in the line
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        bands = (
            values.quantile([0.1, 0.5, 0.9], dim=others, skipna=True)
            if others
            else values.expand_dims(quantile=3)
        )
    low, mid, high = bands.transpose("quantile", along).values
    style = look(i)
    every = max(1, len(mid) // 12)
    ax.plot(x, mid, label=label, markevery=(i % every, every), **style)
    if others and values.size > len(mid):
        ax.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def reference(ax: Axes, y: Any, label: str, x: np.ndarray | None = None, color: str = "0.35") -> None:
    """A bound, chance or ceiling: a thin dashed line over the data (a curve where x is given)."""
    style: dict[str, Any] = {
        "color": color,
        "linewidth": 0.9,
        "linestyle": (0, (4, 2)),
        "label": label,
        "zorder": 3,
    }
    if x is None:
        ax.axhline(float(y), **style)
    else:
        ax.plot(x, y, **style)


def from_zero(ax: Axes) -> None:
    """The y axis from 0 on, its top still automatic: axes that share it may have higher lines to come."""
    ax.set_ylim(bottom=0, auto=None)


def median(values: xr.DataArray, *keep: str) -> xr.DataArray:
    """Median over every dimension but those to keep: sequences, heads, seeds, whatever the dataset has."""
    return values.median([dim for dim in values.dims if dim not in keep])


def legend_below(ax: Axes, columns: int, offset: float = -0.2) -> None:
    """The legend under the axis label, where it cannot hide data."""
    style: dict[str, Any] = {"frameon": False, "handlelength": 2.0, "labelspacing": 0.3, "columnspacing": 1.2}
    style |= {"loc": "upper center", "bbox_to_anchor": (0.45, offset)}
    ax.legend(fontsize=FONT - 1.5, ncols=columns, **style)


def number(value: float) -> str:
    """Three digits at most, no exponent below a million: for legends."""
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def pick(values: Sequence | np.ndarray, limit: int) -> list:
    """At most `limit` of the values, evenly spread, the first and the last among them."""
    chosen = np.unique(np.linspace(0, len(values) - 1, min(limit, len(values))).round().astype(int))
    return [values[i] for i in chosen]


def count_label(ds: xr.Dataset | xr.DataArray, *dims: str) -> str:
    """`n = 5 seeds, 64 sequences, 2 heads`: what a median or mean in the figure is taken over."""
    words = {"sample": "sequence", "head": "head", "token": "token", "seed": "seed", "trial": "trial"}
    counts = {words[dim]: ds.sizes[dim] for dim in ("seed", *dims) if dim in ds.sizes}
    shown = {word: n for i, (word, n) in enumerate(counts.items()) if n > 1 or i == 0}
    return "n = " + ", ".join(f"{n} {word}{'s' * (n > 1)}" for word, n in shown.items())
