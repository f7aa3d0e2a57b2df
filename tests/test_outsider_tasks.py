"""What somebody new to the package wants to see, each in five lines or fewer."""

from __future__ import annotations

import ast
import inspect
import textwrap

import matplotlib
import numpy as np
import pytest

from dflash_jax.analysis import by_position, compare, finish, peek, recording, replay, rounds_of
from dflash_jax.plots import plot_comparison, plot_lattice, plot_positions, plot_survival, plot_timeline
from tests.pairs import engine, prompts

matplotlib.use("Agg")

ANSWERS = {"max_tokens": 32, "ignore_eos": True}


def lattice(served, prompts):
    served.add_request(prompts[2], ANSWERS, request_id="mine")
    served.step()
    found = peek(served, "mine")
    plot_lattice(found)
    return found


def two_drafters(first, second, prompts):
    runs = {"first": first.generate(prompts, ANSWERS), "second": second.generate(prompts, ANSWERS)}
    found = compare(runs)
    plot_comparison(found)
    return found


def acceptance_by_position(served, prompts):
    found = by_position(rounds_of(served.generate(prompts, ANSWERS)))
    plot_positions({"my drafter": found})
    plot_survival({"my drafter": found})
    return found


def replay_with_another_k(served, prompts):
    served.add_request(prompts[0], ANSWERS, request_id="mine")
    served.step()
    other = replay(served, k=3)
    return finish(served)["mine"], finish(other)["mine"]


def timeline(served, prompts):
    with recording(served) as recorder:
        served.generate(prompts, ANSWERS)
    plot_timeline(recorder.timeline)
    return recorder.timeline


TASKS = [lattice, two_drafters, acceptance_by_position, replay_with_another_k, timeline]


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_a_task_is_five_lines_or_fewer(task):
    [function] = ast.parse(textwrap.dedent(inspect.getsource(task))).body
    body = [line for line in inspect.getsource(task).splitlines()[1:] if line.strip()]
    assert isinstance(function, ast.FunctionDef) and len(body) <= 5, body


def test_the_lattice_is_that_of_the_next_round():
    served = engine("recall-dflash2")
    found = lattice(served, prompts("recall-dflash2"))
    [update] = served.step()
    assert update.token_ids == found.committed


def test_two_drafters_are_compared_on_the_same_prompts():
    found = two_drafters(engine("recall-dflash1"), engine("recall-dflash2"), prompts("recall-dflash2"))
    assert found.labels == ("first", "second") and np.isfinite(found.per_prompt).all()


def test_acceptance_by_position_falls():
    found = acceptance_by_position(engine("recall-dflash2"), prompts("recall-dflash2"))
    assert (np.diff(found.survival) <= 0).all() and len(found.rate) == 7


def test_a_replay_with_another_k_says_the_same_in_more_rounds():
    mine, other = replay_with_another_k(engine("recall-dflash2"), prompts("recall-dflash2"))
    assert mine.token_ids == other.token_ids
    assert len(mine.produced_per_round) < len(other.produced_per_round)


def test_a_timeline_has_a_row_for_each_step_of_each_request():
    found = timeline(engine("recall-dflash2", slots=2), prompts("recall-dflash2"))
    assert len(found.requests) == 5 and found.slots().shape[1] == 2
