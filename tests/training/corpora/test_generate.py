"""Text that the target writes itself: what a conversation is, and that nothing of a corpus is lost or written twice."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import os
import re
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig, cli
from dflash_jax.checkpoints import Tokenizer, save_target
from dflash_jax.engine import Models
from dflash_jax.errors import ConfigError
from dflash_jax.progress import Bar
from dflash_jax.settings import parse
from dflash_jax.training.corpora import generate
from dflash_jax.training.corpora.config import CorpusConfig
from dflash_jax.training.corpora.conversations import Conversation, read_conversations, repair
from dflash_jax.training.corpora.generate import generate_corpus
from dflash_jax.training.corpora.packing import pack_corpus
from dflash_jax.training.data.records import SequenceSource
from dflash_jax.training.precision import rounded
from tests.checkpoints.conftest import QWEN3, random_params
from tests.checkpoints.test_tokenizer import byte_level

STOP = 257
CONFIG = dataclasses.replace(QWEN3, vocab_size=260, eos_token_ids=(STOP,))
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


@pytest.fixture(scope="module")
def engine():
    """A target that has learnt nothing, and ends what it writes once in a while."""
    sizes = EngineConfig(max_slots=4, max_model_len=256, prefill_chunk=64, rounds_per_step=8)
    return Engine(Models(random_params(CONFIG), CONFIG), sizes, tokenizer=Tokenizer(byte_level(TEMPLATE)))


def corpus(path, **changes):
    fields = {"target": {"path": "unused"}, "output": str(path), "conversations": 8, "seed": 3}
    # Hot enough that one token in 260 ends a message.
    fields |= {"question_temperature": 50.0, "question_min_p": 0.0, "question_tokens": 160}
    fields |= {"answer_tokens": 24, "answer_temperatures": (0.0, 0.7)}
    return CorpusConfig(**(fields | changes))


def abandon(engine, writing):
    """Ends the process that writes, as far as the engine and the file can tell."""
    writing.close()
    for sequence in engine.host.in_flight:
        engine.abort(sequence.id)


def test_a_conversation_is_a_message_of_the_targets_and_its_answer(engine, tmp_path):
    (tmp_path / "starters.txt").write_text("Why\n")
    config = corpus(tmp_path / "corpus.jsonl", starters=str(tmp_path / "starters.txt"))
    written = list(generate_corpus(engine, config))
    assert written
    for conversation in written:
        prompt = engine.tokenize([{"role": "user", "content": conversation.question}])
        assert conversation.question.startswith("Why")
        assert conversation.tokens[: conversation.prompt_len] == prompt
        assert conversation.temperature == (0.0, 0.7)[conversation.index % 2]
    greedy = next(c for c in written if c.temperature == 0.0)
    [answer] = engine.generate([list(greedy.tokens[: greedy.prompt_len])], {"max_tokens": 24})
    assert answer.token_ids == greedy.tokens[greedy.prompt_len :]
    assert sorted(read_conversations(config.output), key=lambda c: c.index) == sorted(written, key=lambda c: c.index)


def test_an_interrupted_corpus_goes_on_to_the_same_text(engine, tmp_path):
    whole = {c.index: c for c in generate_corpus(engine, corpus(tmp_path / "whole.jsonl"))}
    config = corpus(tmp_path / "broken.jsonl")
    interrupted = generate_corpus(engine, config)
    first = next(interrupted)
    abandon(engine, interrupted)
    with open(config.output, "a") as file:
        file.write('{"index": 99, "tok')
    rest = list(generate_corpus(engine, config))
    found = list(read_conversations(config.output))
    assert [c.index for c in found] == [first.index, *(c.index for c in rest)]
    assert {c.index: c for c in found} == whole


def test_prompts_of_a_file_are_answered_in_turn(engine, tmp_path):
    lines = [{"prompt": "one"}, {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "two"}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = corpus(tmp_path / "corpus.jsonl", prompts=str(tmp_path / "prompts.jsonl"), conversations=4)
    found = {c.index: c for c in generate_corpus(engine, config)}
    assert sorted(found) == [0, 1, 2, 3]
    assert found[0].tokens[: found[0].prompt_len] == engine.tokenize([{"role": "user", "content": "one"}])
    assert found[3].tokens[: found[3].prompt_len] == engine.tokenize(lines[1]["messages"])
    # A single message is a question that others may be asked after; what follows others is none.
    assert (found[0].question, found[3].question) == ("one", "")


def test_instructions_are_about_earlier_answers(engine, tmp_path):
    said = "".join(f"Sentence {n} of it says little. " for n in range(20)).strip()
    prompt, answer = engine.tokenize([{"role": "user", "content": "Why?"}]), engine.tokenize(said)
    before = Conversation(0, "Why?", 0.0, len(prompt), prompt + answer)
    cut_off = dataclasses.replace(before, question="How?", tokens=prompt + answer[:40])
    (tmp_path / "before.jsonl").write_text(before.to_json() + "\n" + cut_off.to_json() + "\n")
    (tmp_path / "instructions.txt").write_text("Shorten {text} please\n\nAnd then?\n")
    about = {"source_corpora": (str(tmp_path / "before.jsonl"),), "instructions": str(tmp_path / "instructions.txt")}
    larger = Engine(engine.models, engine.config.model_copy(update={"max_model_len": 512}), tokenizer=engine.tokenizer)
    config = corpus(tmp_path / "corpus.jsonl", **about)
    prompts = {c.tokens[: c.prompt_len] for c in generate_corpus(larger, config)}
    # Sixty words are ten sentences of six.
    passage = " ".join(said.split()[:60])
    alone = [{"role": "user", "content": f"Shorten {passage} please"}]
    second = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": passage},
        {"role": "user", "content": "And then?"},
    ]
    assert prompts == {engine.tokenize(alone), engine.tokenize(second)}


def test_a_corpus_belongs_to_one_process_at_a_time(engine, tmp_path):
    config = corpus(tmp_path / "corpus.jsonl")
    first = generate_corpus(engine, config)
    next(first)
    with pytest.raises(ConfigError, match=r"another process is writing the corpus .*corpus\.jsonl"):
        next(generate_corpus(engine, config))
    abandon(engine, first)
    assert list(generate_corpus(engine, config))


@pytest.mark.parametrize("made", ["pipe", "/dev/full", "/dev/zero", "directory"])
def test_what_is_no_file_is_no_output(engine, tmp_path, made):
    path = tmp_path / "corpus.jsonl"
    if made == "directory":
        path.mkdir()
    else:
        os.mkfifo(path) if made == "pipe" else path.symlink_to(made)
    with pytest.raises(ConfigError, match=r"output .*corpus\.jsonl cannot be written \(.*; it must be a file"):
        next(generate_corpus(engine, corpus(path)))


def test_a_full_disk_ends_a_corpus_in_a_sentence_and_loses_nothing(engine, tmp_path, monkeypatch):
    whole = tmp_path / "whole.jsonl"
    list(generate_corpus(engine, corpus(whole)))
    path, room, write = tmp_path / "corpus.jsonl", [600], os.write

    def limited(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= (count := write(file, data[: room[0]]))
        return count

    with monkeypatch.context() as full:
        full.setattr(generate.os, "write", limited)
        writing = generate_corpus(engine, corpus(path))
        with pytest.raises(ConfigError, match=r"output .*corpus\.jsonl cannot be written \(No space left"):
            list(writing)
        abandon(engine, writing)
    assert path.stat().st_size == 600
    list(generate_corpus(engine, corpus(path)))
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_a_corpus_is_of_one_kind_of_text(engine, tmp_path):
    (tmp_path / "starters.txt").write_text("Why\n")
    path, starters = tmp_path / "corpus.jsonl", {"starters": str(tmp_path / "starters.txt")}
    config = corpus(path, **starters, answer_tokens=4)
    written = list(generate_corpus(engine, config))
    changed = {"seed": 4}, {"target": {"path": "another"}}, {"answer_temperatures": (0.0,)}, {"starters": None}
    for change in changed:
        with pytest.raises(ConfigError, match=f"with other settings .*{next(iter(change))}.* changed"):
            next(generate_corpus(engine, corpus(path, **({**starters, "answer_tokens": 4} | change))))
    (tmp_path / "starters.txt").write_text("How\n")
    with pytest.raises(ConfigError, match=r"starters changed: starters was '4 bytes"):
        next(generate_corpus(engine, config))
    (tmp_path / "starters.txt").write_text("Why\n")
    # What no text depends on may change, and so may all where there is no text yet.
    sizes = EngineConfig(max_slots=2, max_model_len=200)
    wider = config.model_copy(update={"engine": sizes, "conversations": 9})
    assert not {c.index for c in generate_corpus(engine, wider)} & {c.index for c in written}
    path.unlink()
    next(again := generate_corpus(engine, corpus(path, seed=4)))
    abandon(engine, again)


def test_a_corpus_without_a_record_of_its_settings_gets_one(engine, tmp_path):
    config = corpus(tmp_path / "corpus.jsonl", answer_tokens=4)
    written = list(generate_corpus(engine, config))
    record = tmp_path / "corpus.jsonl.json"
    kept = record.read_bytes()
    record.unlink()
    list(generate_corpus(engine, config))
    assert record.read_bytes() == kept
    assert list(read_conversations(config.output)) == written


def test_repair_never_cuts_what_is_no_corpus(engine, tmp_path):
    path = tmp_path / "notes.txt"
    for content, says in ((b"dear diary", "ends in what is no conversation"), (b"dear\ndiary", "line 1 is no conv")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            next(generate_corpus(engine, corpus(path)))
        assert path.read_bytes() == content


def test_repair_keeps_the_file_and_what_is_whole_in_it(tmp_path, monkeypatch):
    whole = Conversation(4, "q", 0.0, 1, (1, 2)).to_json().encode() + b"\n"
    path = tmp_path / "corpus.jsonl"
    # A file that is written anew is empty for a moment.
    monkeypatch.setattr("pathlib.Path.write_bytes", None)
    for torn in (b"", b"{", b'{"index": 99, "tok', b"\0\0\0"):
        with path.open("wb") as file:
            file.write(whole + torn)
        assert repair(path) == {4}
        assert path.read_bytes() == whole


def test_an_engine_of_one_slot_writes(engine, tmp_path):
    single = Engine(engine.models, EngineConfig(max_slots=1, max_model_len=64), tokenizer=engine.tokenizer)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    config = corpus(tmp_path / "corpus.jsonl", prompts=str(tmp_path / "prompts.jsonl"), conversations=2)
    assert [c.index for c in generate_corpus(single, config)] == [0, 1]


def call(monkeypatch, capsys, engine, *arguments):
    monkeypatch.setattr("dflash_jax.training.corpora.generate.writing_engine", lambda config: engine)
    monkeypatch.setattr(sys, "argv", ["dflash-jax", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    return exit_.value.code or 0, captured.out, captured.err


def test_prompts_that_are_too_long_are_left_out_and_counted(engine, tmp_path, monkeypatch, capsys):
    lines = [{"prompt": "x" * 300}, {"prompt": "short"}, {"messages": [{"role": "user", "content": "x" * 400}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = corpus(tmp_path / "corpus.jsonl", prompts=str(tmp_path / "prompts.jsonl"), conversations=3)
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    code, out, _ = call(monkeypatch, capsys, engine, "data", "generate", tmp_path / "config.yaml")
    assert code == 0
    assert out.startswith("1 conversations with ")
    assert "2 conversations were dropped; the first: the prompt has 3" in out
    assert [c.index for c in read_conversations(config.output)] == [1]
    # Run again, it has something, and nothing more to write.
    assert call(monkeypatch, capsys, engine, "data", "generate", tmp_path / "config.yaml")[0] == 0


def test_a_corpus_that_is_stopped_says_what_it_has_and_goes_on(engine, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    config = corpus(tmp_path / "corpus.jsonl", prompts=str(tmp_path / "prompts.jsonl"), conversations=6)
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    monkeypatch.setattr(Bar, "at", lambda self, done: signal.raise_signal(signal.SIGTERM) if done == 2 else None)
    first, again = (Engine(engine.models, engine.config, tokenizer=engine.tokenizer) for _ in range(2))
    code, out, err = call(monkeypatch, capsys, first, "data", "generate", tmp_path / "config.yaml")
    assert code == 128 + signal.SIGTERM
    assert re.match(r"[2-5] conversations with \d+ tokens of answers written to", out), out
    assert err.endswith("dflash-jax: stopped by SIGTERM; run the same command again for the rest\n")
    written = len(list(read_conversations(config.output)))
    assert out.startswith(f"{written} ")
    monkeypatch.setattr(Bar, "at", lambda self, done: None)
    code, out, _ = call(monkeypatch, capsys, again, "data", "generate", tmp_path / "config.yaml")
    assert code == 0 and out.startswith(f"{6 - written} conversations")
    assert sorted(c.index for c in read_conversations(config.output)) == list(range(6))


def test_a_corpus_that_stays_empty_is_an_error_with_its_reason(engine, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x" * 300}) + "\n")
    config = corpus(tmp_path / "corpus.jsonl", prompts=str(tmp_path / "prompts.jsonl"), conversations=3)
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    code, out, err = call(monkeypatch, capsys, engine, "data", "generate", tmp_path / "config.yaml")
    assert (code, out) == (2, "")
    assert "no conversation was written to" in err and "leaves no room to answer in engine.max_model_len 256" in err
    with pytest.raises(ConfigError, match="did not end within question_tokens 1"):
        list(generate_corpus(engine, corpus(tmp_path / "mute.jsonl", question_tokens=1)))
    (tmp_path / "starters.txt").write_text("x" * 300)
    with pytest.raises(ConfigError, match="leaves no room"):
        list(generate_corpus(engine, corpus(tmp_path / "long.jsonl", starters=str(tmp_path / "starters.txt"))))


def test_an_answer_that_failed_is_not_text(engine, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    config = corpus(tmp_path / "corpus.jsonl", prompts=str(tmp_path / "prompts.jsonl"), conversations=1)
    step = engine.step

    def failing():
        return [
            dataclasses.replace(u, completion=dataclasses.replace(u.completion, finish_reason="error", error="broken"))
            if u.completion
            else u
            for u in step()
        ]

    monkeypatch.setattr(engine, "step", failing)
    with pytest.raises(ConfigError, match="broken"):
        list(generate_corpus(engine, config))
    assert (tmp_path / "corpus.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer_temperatures": [0.0, -1]}, r"'answer_temperatures\.1' is -1: .*greater than or equal to 0"),
        ({"answer_temperatures": []}, "'answer_temperatures' is .*: .*at least 1 item"),
        ({"answer_temperatures": [float("nan")]}, r"'answer_temperatures\.0' is nan: .*finite"),
        ({"answer_temperatures": [float("inf")]}, r"'answer_temperatures\.0' is inf: .*finite"),
        ({"answer_tokens": 0}, "'answer_tokens' is 0: .*greater than 0"),
        ({"question_temperature": -0.5}, "'question_temperature' is -0.5"),
        ({"question_temperature": float("nan")}, "'question_temperature' is nan"),
        ({"question_min_p": 1.5}, "'question_min_p' is 1.5: .*less than or equal to 1"),
        ({"question_tokens": -3}, "'question_tokens' is -3"),
        ({"output": "a.jsonl.gz"}, r"'output' is 'a\.jsonl\.gz': conversations are written as plain text"),
        (
            {"instructions": "r"},
            "a.yaml: `instructions` and `source_corpora` belong together: what to ask",
        ),
        ({"source_corpora": ["m"]}, "a.yaml: `instructions` and `source_corpora` belong together"),
        ({"starters": "a", "prompts": "b"}, "a.yaml: starters and prompts each say what to ask; keep one of them"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_the_name_of_its_key(change, says):
    values = {"target": {"path": "x"}, "output": "y", "conversations": 1, **change}
    with pytest.raises(ConfigError, match=says) as caught:
        parse(CorpusConfig, values, "a.yaml")
    assert "\n" not in str(caught.value) and "value error" not in str(caught.value).lower()


def test_what_to_ask_comes_from_one_place(engine, tmp_path):
    path = tmp_path / "corpus.jsonl"
    with pytest.raises(ValueError, match="starters and prompts each say what to ask"):
        corpus(path, starters="a", prompts="b")
    (tmp_path / "instructions.txt").write_text("\n")
    (tmp_path / "empty.jsonl").write_text("")
    about = {"source_corpora": (str(tmp_path / "empty.jsonl"),), "instructions": str(tmp_path / "instructions.txt")}
    with pytest.raises(ConfigError, match="without an instruction"):
        next(generate_corpus(engine, corpus(path, **about)))
    (tmp_path / "instructions.txt").write_text("Shorten {text}\n")
    with pytest.raises(ConfigError, match="no answer in `source_corpora` has a passage of 30 to 60 words"):
        next(generate_corpus(engine, corpus(path, **about)))
    with pytest.raises(ConfigError, match="no corpus at"):
        next(generate_corpus(engine, corpus(path, **(about | {"source_corpora": ("nowhere.jsonl",)}))))


def test_a_packed_corpus_has_every_conversation_once(engine, tmp_path):
    config = corpus(tmp_path / "corpus.jsonl", conversations=4)
    written = list(generate_corpus(engine, config))
    with open(config.output, "a") as file:
        file.write(dataclasses.replace(written[0], index=50).to_json() + "\n")
    assert pack_corpus([config.output, config.output], tmp_path / "shards", per_shard=2)[0] == len(written)
    packed = SequenceSource(tmp_path / "shards")
    assert {tuple(packed[i].tokens.tolist()) for i in range(len(packed))} == {c.tokens for c in written}
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress((tmp_path / "corpus.jsonl").read_bytes()))
    assert list(read_conversations(tmp_path / "corpus.jsonl.gz")) == list(read_conversations(config.output))
    with pytest.raises(ConfigError, match="holds shards already"):
        pack_corpus([config.output], tmp_path / "shards")


def test_a_target_that_cannot_chat_is_refused(engine, tmp_path):
    mute = Engine(engine.models, engine.config, tokenizer=Tokenizer(byte_level(None)))
    with pytest.raises(ConfigError, match="no chat template"):
        next(generate_corpus(mute, corpus(tmp_path / "corpus.jsonl")))


def test_a_rounded_target_says_nearly_the_same():
    params = random_params(CONFIG)
    assert rounded(params, "float32") is params
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 12)))
    from dflash_jax.models.target import lm_head
    from dflash_jax.training.data.features import run_sequences

    def logits(params):
        return np.asarray(lm_head(params, run_sequences(params, CONFIG, tokens).hidden))

    # Random weights amplify what rounding does; logits have a deviation of about 6.
    exact, near = logits(params), logits(rounded(params, "bfloat16"))
    assert 0 < np.abs(exact - near).mean() < 0.1 * np.abs(exact).mean()
    assert all(
        leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(rounded(params, "bfloat16").layers) if leaf.ndim == 2
    )


RECIPE = Path(__file__).parents[3] / "drafters" / "smollm2-dflash2" / "recipe"


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory):
    """A directory of the target and its tokenizer, and a corpus with an answer of twenty sentences."""
    directory = tmp_path_factory.mktemp("target")
    backend = byte_level(TEMPLATE)
    save_target(directory / "target", CONFIG, random_params(CONFIG), "float32")
    backend.save_pretrained(directory / "target")
    tokenizer = Tokenizer(backend)
    said = " ".join(f"Sentence {n} of it says little." for n in range(20))
    prompt = tuple(tokenizer.encode(tokenizer.chat_text([{"role": "user", "content": "Why?"}])))
    before = Conversation(0, "Why?", 0.0, len(prompt), prompt + tuple(tokenizer.encode(said)))
    (directory / "before.jsonl").write_text(before.to_json() + "\n")
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("questions", ["question_temperature=50.0", "question_min_p=0.0", "question_tokens=160"]),
        ("instructions", ["source_corpora=[{directory}/before.jsonl]"]),
    ],
)
def test_the_shipped_configs_write_with_native_code(
    native_code, saved_target, tmp_path, monkeypatch, capsys, name, changes, dtype
):
    changes = [change.format(directory=saved_target) for change in changes]
    changes += [f"target.path={saved_target / 'target'}", f"output={tmp_path / 'corpus.jsonl'}", f"dtype={dtype}"]
    changes += ["conversations=6", "answer_tokens=8", "engine.max_slots=4", "engine.max_model_len=512"]
    changes += ["seed=3", "engine.prefill_chunk=64"]
    command = ["dflash-jax", "data", "generate", str(RECIPE / f"{name}.yaml")]
    monkeypatch.setattr(sys, "argv", command + [part for change in changes for part in ("--set", change)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, capsys.readouterr().err
    assert list(read_conversations(tmp_path / "corpus.jsonl"))
