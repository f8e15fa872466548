"""Pictures of docs/why.md from the records: `python -m tests.trainer.why.story` writes docs/images/why-*.svg."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt

from tests.trainer.why.plants import FIGURES, HEALTHY, PLANTS, ROOT, read

STORIES = {
    "kl-sign": ("reward/mean", "evaluation/rule", "kl/reference"),
    "mixed-groups": ("reward/mean", "evaluation/right", "groups/with_signal"),
    "value-head": ("reward/mean", "evaluation/rule", "explained_variance/value"),
}
"""Plant -> the metrics of its picture, each beside that of the healthy job with the same seed."""
SEED = FIGURES[0]


def draw(plant: str, names: tuple[str, ...]) -> None:
    healthy = next(name for name, job in HEALTHY.items() if job == PLANTS[plant].job)
    runs = {"healthy": (read(healthy)[SEED], "#9aa3b0"), plant: (read(plant)[SEED], "#c2478b")}
    figure, axes = plt.subplots(1, len(names), figsize=(9.0, 2.3), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for label, (seen, colour) in runs.items():
            series = seen.series(name)
            axis.plot(series.steps, series.values, color=colour, label=label, linewidth=1.6)
        axis.set_title(name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    axes[1].set_xlabel("step", fontsize=8)
    figure.savefig(ROOT / "docs" / "images" / f"why-{plant}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "why", "svg.fonttype": "none"}
    for plant, names in STORIES.items():
        draw(plant, names)
