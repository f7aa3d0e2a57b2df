"""Training curves, drawn from a run's metrics."""

from __future__ import annotations

from pathlib import Path

from dflash_jax.training.run.log import read_metrics


def plot_metrics(metrics: Path, directory: Path) -> list[Path]:
    """Draws `loss.png`, `accuracy.png` and `acceptance.png` of what the metrics have.

    Args:
      metrics: a run's `metrics.jsonl`.
      directory: where to.

    Returns:
      The files.
    """
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    if not lines:
        return []
    kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "held_out", "engine")}
    files = []

    def draw(name: str, label: str, curves) -> None:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for steps, values, title, style in curves:
            if len(steps):
                axes.plot(steps, values, style, label=title)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend()
        files.append(directory / f"{name}.png")
        figure.savefig(files[-1], dpi=120)

    def curve(kind: str, field: str, style: str, title: str):
        chosen = [line for line in kinds[kind] if field in line]
        return [line["step"] for line in chosen], [line[field] for line in chosen], title, style

    draw(
        "loss", "cross-entropy", [curve("train", "loss", "-", "training"), curve("held_out", "loss", "o-", "held out")]
    )
    draw(
        "acceptance",
        "mean acceptance length",
        [
            curve("train", "acceptance", "-", "training, teacher forced"),
            curve("held_out", "acceptance", "o-", "held out, teacher forced"),
            curve("engine", "mean_acceptance_length", "s-", "held out, engine"),
        ],
    )
    held_out = kinds["held_out"] or kinds["train"]
    steps = [line["step"] for line in held_out]
    places = range(len(held_out[0]["chosen"])) if held_out else []
    draw(
        "accuracy",
        "accuracy, teacher forced",
        [(steps, [line["chosen"][place] for line in held_out], f"position {place + 1}", "-") for place in places],
    )
    return files
