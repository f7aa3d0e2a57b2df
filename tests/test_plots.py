"""What the plots show: read from the artists, not from pixels."""

from __future__ import annotations

import json

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import BoundaryNorm, to_rgba

from dflash_jax import plots
from dflash_jax.analysis import by_kind, by_position, compare, heat_map, linear_cost, over_time, rounds_of, what_if
from dflash_jax.analysis.acceptance import PositionAcceptance
from dflash_jax.analysis.lattice import Lattice
from dflash_jax.analysis.timeline import RowWork, StepRecord, Timeline
from dflash_jax.plots.style import KEPT, REJECTED, UNDECIDED
from tests.analysis.test_acceptance import completion

matplotlib.use("Agg")

RUN = [
    completion([9, 1, 2, 5, 4, 8, 6, 7], [3, 1, 3], [[1, 2, 3], [3, 2, 1], [8, 6, 7]], name="a"),
    completion([9, 1, 5], [2], [[1, 2, 3]], name="b"),
]
OTHER = [
    completion([9, 1, 2, 5, 4, 8, 6, 7], [1] * 7, [[3, 3, 3]] * 7, name="a"),
    completion([9, 1, 5], [2], [[1, 2, 3]], name="b"),
]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def a_lattice(edges=True) -> Lattice:
    """Three positions: one kept, one rejected, one that the target was not asked about."""
    candidates = np.array([[5, 6], [7, 8], [9, 3]])
    return Lattice(
        position=11,
        anchor=4,
        temperature=0.0,
        drafted=np.array([5, 8, 9]),
        candidates=candidates,
        unary=np.array([[2.0, 1.0]] * 3),
        edges=np.array([[[2.0, 1.0]] * 2, [[1.0, 3.0]] * 2, [[2.0, 0.0]] * 2]) if edges else None,
        proposal=np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]),
        target=np.array([[0.9, 0.05], [0.2, 0.1], [0.3, 0.3]]),
        target_best=np.array([5, 2, 3, 1]),
        target_best_probs=np.array([0.9, 0.6, 0.5, 0.4]),
        verified=3,
        accepted=1,
        next_token=2,
        committed=(5, 2),
    )


def every_plot():
    rounds = rounds_of(RUN)
    positions = {"mine": by_position(rounds)}
    steps = (StepRecord(0.1, (RowWork(0, 1, "a", "prefill", 8),), ("b",), {}, ()),)
    return {
        "plot_lattice": (a_lattice(),),
        "plot_positions": (positions,),
        "plot_survival": (positions,),
        "plot_kinds": (by_kind(rounds, lambda token: "odd" if token % 2 else "even"),),
        "plot_heat_map": (heat_map(rounds),),
        "plot_over_time": ({"mine": over_time(rounds, window=2)},),
        "plot_timeline": (Timeline(steps),),
        "plot_comparison": (compare({"a": RUN, "b": OTHER}, times=50),),
        "plot_what_if": ({"mine": what_if(rounds, linear_cost(draft=0.1, token=0.1), most=5, times=50)},),
    }


@pytest.mark.parametrize("name", plots.__all__)
def test_a_plot_draws_where_it_is_told_and_returns_its_axes(name, tmp_path):
    figure, axes = plt.subplots()
    arguments = every_plot()[name]
    assert getattr(plots, name)(*arguments, ax=axes) is axes
    figure.savefig(tmp_path / "plot.png")
    own = getattr(plots, name)(*arguments)
    assert (own.figure is not figure and own.has_data()) or own.texts


def test_equal_curves_are_both_visible():
    same = PositionAcceptance(np.array([9, 9]), np.array([8, 7]), np.array([0.9, 0.8]), np.array([0.9, 0.72]))
    for draw in (plots.plot_positions, plots.plot_survival):
        first, second, third = draw({"a": same, "b": same, "c": same}).get_lines()
        assert first.get_linewidth() > second.get_linewidth() > third.get_linewidth()
        assert first.get_markersize() > second.get_markersize() > third.get_markersize()
        assert first.get_zorder() < second.get_zorder() < third.get_zorder()
        assert len({line.get_marker() for line in (first, second, third)}) == 3


def test_discrete_things_are_drawn_discretely():
    rounds = rounds_of(RUN)
    [survival] = plots.plot_survival({"mine": by_position(rounds)}).get_lines()
    assert survival.get_drawstyle() == "steps-mid" and survival.get_xdata().tolist() == [0, 1, 2, 3]
    axes = plots.plot_positions({"mine": by_position(rounds)})
    assert all(tick == int(tick) for tick in axes.get_xticks())
    heat = plots.plot_heat_map(heat_map(rounds), k=3)
    [mesh] = heat.collections
    assert isinstance(mesh.norm, BoundaryNorm) and len(mesh.cmap.colors) == 4, "a colour for each of 0, 1, 2, 3"
    assert np.ma.getmaskarray(mesh.get_array()).tolist() == [[False, False, False], [False, True, True]]


def test_a_lattice_shows_what_was_kept_what_was_not_and_what_the_target_says():
    axes = plots.plot_lattice(a_lattice(), name_of=lambda token: f"<{token}>")
    boxes = {text.get_text(): text.get_bbox_patch() for text in axes.texts if text.get_bbox_patch() is not None}
    assert set(boxes) == {f"<{token}>" for token in (4, 5, 6, 7, 8, 9, 3)}
    frames = {name: box.get_edgecolor() for name, box in boxes.items()}
    assert frames["<5>"] == to_rgba(KEPT) and frames["<8>"] == to_rgba(REJECTED) and frames["<9>"] == to_rgba(UNDECIDED)
    shades = {name: box.get_facecolor()[0] for name, box in boxes.items()}
    assert shades["<5>"] < shades["<7>"] < shades["<6>"], "the likelier, the darker"
    bold = [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"]
    assert bold == ["<2>\n0.60"] and "1 of 3 drafted tokens kept, then <2>" in axes.get_title()
    with_edges, without = len(axes.get_lines()), len(plots.plot_lattice(a_lattice(edges=False)).get_lines())
    assert without == 3 < with_edges


def test_a_drafted_token_is_shown_however_low_its_score():
    lattice = a_lattice(edges=False)
    axes = plots.plot_lattice(lattice, most=1)
    boxes = [text.get_text() for text in axes.texts if text.get_bbox_patch() is not None]
    assert boxes == ["4", "5", "8", "9"]


def test_a_timeline_has_a_cell_for_each_step_and_a_sign_for_each_end():
    steps = (
        StepRecord(0.1, (RowWork(0, 0, "a", "prefill", 8), RowWork(1, 1, "b", "prefill", 8)), (), {}, ()),
        StepRecord(0.2, (RowWork(0, 0, "a", "decode", 3), RowWork(1, 1, "b", "decode", 2)), (), {"a": "length"}, ()),
        StepRecord(0.3, (RowWork(0, 1, "b", "decode", 1),), (), {}, ("b",)),
    )
    axes = plots.plot_timeline(Timeline(steps))
    assert len(axes.collections) == 5 and sum(bar.get_hatch() is not None for bar in axes.collections) == 2
    signs = [(line.get_marker(), float(line.get_ydata()[0])) for line in axes.get_lines()]
    assert signs == [("x", 0.0), ("v", 1.0)]
    assert [text.get_text() for text in axes.texts] == ["a", "b"]
    rows = plots.plot_timeline(Timeline(steps), of="rows")
    assert len(rows.collections) == 3 and rows.get_ylabel() == "row"
    plots.plot_timeline(Timeline(()))


def test_a_comparison_tells_its_differences_and_every_prompt():
    found = compare({"mine": RUN, "other": OTHER}, times=100)
    axes = plots.plot_comparison(found)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[0] == "mine" and labels[1].startswith(f"other\n{found.difference[1]:+.2f} (")
    grey = [line for line in axes.get_lines() if line.get_color() == "#bbbbbb"]
    assert len(grey) == 2


def test_what_if_marks_what_is_extrapolated_and_what_is_best():
    found = what_if(rounds_of(RUN), linear_cost(draft=0.0, token=0.01), most=5, times=50)
    axes = plots.plot_what_if({"mine": found})
    hollow = [line for line in axes.get_lines() if line.get_markerfacecolor() == "none"]
    assert [line.get_xdata().tolist() for line in hollow] == [[4, 5]]
    assert [text.get_text() for text in axes.texts] == [f"best: {found.best}"]


def test_curves_of_a_training_leave_a_notebook_s_backend_alone(tmp_path):
    from dflash_jax.training import plot_metrics

    metrics = tmp_path / "metrics.jsonl"
    line = {"step": 1, "kind": "train", "loss": 2.0, "acceptance": 1.5, "chosen": [0.5, 0.25]}
    metrics.write_text(json.dumps(line) + "\n")
    matplotlib.use("svg")
    try:
        assert {file.name for file in plot_metrics(metrics, tmp_path)} == {"loss.png", "acceptance.png", "accuracy.png"}
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use("Agg")
