"""What hears of a run: callbacks, and TensorBoard's event files among them."""

from __future__ import annotations

import sys

import pytest
from tensorboardX.proto.event_pb2 import Event

from dflash_jax.errors import ConfigError
from dflash_jax.training import Callback, train
from dflash_jax.training.run.log import read_metrics
from tests.training.recall import config


class Recorder(Callback):
    def __init__(self, end_at=None):
        self.heard, self.end_at = [], end_at

    def begin(self, config, directory, step):
        self.heard.append(("begin", directory.name, step))

    def metrics(self, step, kind, figures):
        self.heard.append((kind, step, dict(figures)))
        return step == self.end_at

    def saved(self, step, state):
        self.heard.append(("saved", step, int(state.step)))

    def end(self, trained):
        self.heard.append(("end", None if trained is None else trained.step))


def events(directory):
    """What the event files say: (tag, step) to value, without what a later file voids, and how often each was said."""
    found = {}
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + size]), data[12 + size + 4 :]
            if event.HasField("session_log") and event.session_log.status == 1:
                found = {key: value for key, value in found.items() if key[1] < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in found
                found[value.tag, event.step] = value.simple_value
    return found


def test_a_callback_hears_of_every_line_and_checkpoint_and_can_end_the_run(recall_data, tmp_path):
    first = Recorder(end_at=4)
    trained = train(config(tmp_path, recall_data), callbacks=[first, Callback()])
    assert not trained.finished and trained.step == 4
    assert first.heard[0] == ("begin", "run", 0) and first.heard[-1] == ("end", 4)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    told = [(kind, step, figures) for kind, step, figures in (h for h in first.heard if len(h) == 3 and h[0] in KINDS)]
    assert told == [(line.pop("kind"), line.pop("step"), line) for line in lines] and told
    assert [h[1:] for h in first.heard if h[0] == "saved"] == [(2, 2), (4, 4)]

    second = Recorder()
    assert train(config(tmp_path, recall_data), callbacks=[second]).finished
    assert second.heard[0] == ("begin", "run", 4) and second.heard[-1] == ("end", 6)


KINDS = ("train", "held_out", "engine")


def test_a_callback_hears_of_the_end_of_a_run_that_fails(recall_data, tmp_path):
    class Broken(Recorder):
        def saved(self, step, state):
            raise RuntimeError("broken")

    heard = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        train(config(tmp_path, recall_data), callbacks=[heard])
    assert heard.heard[-1] == ("end", None)


def test_event_files_have_the_figures_of_the_metrics_once_also_of_a_resumed_run(recall_data, tmp_path):
    train(config(tmp_path, recall_data, tensorboard=True), callbacks=[Recorder(end_at=4)])
    assert train(config(tmp_path, recall_data, tensorboard=True)).finished
    wanted = {}
    for line in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        for name, value in line.items():
            if isinstance(value, list):
                wanted |= {(f"{line['kind']}/{name}/{n}", line["step"]): each for n, each in enumerate(value, 1)}
            elif name not in ("kind", "step", "unix_time"):
                wanted[f"{line['kind']}/{name}", line["step"]] = value
    assert events(tmp_path / "run" / "tensorboard") == pytest.approx(wanted)


def test_without_the_package_the_run_does_not_begin(recall_data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"needs tensorboardX; install it with `pip install 'dflash_jax\[tensorboard"):
        train(config(tmp_path, recall_data, tensorboard=True))
    assert not (tmp_path / "run").exists()
