"""Settings and drawing shared by the learning curves of docs/results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

FOLDER = ROOT / "docs" / "results"
SETTINGS: dict[str, tuple[str, ...]] = {"rl": ("loss.opd_weight=0",), "opd": ("loss.rl_weight=0",), "hybrid": ()}
COLOURS = {"rl": "#0b6e99", "opd": "#b5541c", "hybrid": "#3d7a3d"}
GREY = "#777777"
Z_95 = 1.959964
"""Standard errors on either side of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line over `at`, and the shade between `low` and `high`."""

    label: str
    colour: str
    at: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def draw(path: Path, panels: Sequence[tuple[str, Sequence[Curve]]], x: str, y: str) -> None:
    """Draws panels of curves (title, curves) side by side, with the same scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8 if len(panels) == 1 else 4.5 * len(panels), 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True
    ):
        for curve in curves:
            axes.plot(curve.at, curve.middle, color=curve.colour, lw=2, label=curve.label)
            axes.fill_between(curve.at, curve.low, curve.high, color=curve.colour, alpha=0.15, lw=0)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=8)
        axes.grid(axis="y", alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].set_ylabel(y)
    figure.savefig(path, format="png", metadata={"Software": None})
