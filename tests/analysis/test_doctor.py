"""Each cause of low acceptance that the doctor knows, produced."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models as token_models
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dflash_jax import Engine, EngineConfig, RequestError, StateError
from dflash_jax.analysis import diagnose
from dflash_jax.analysis.doctor import Told, read_told
from dflash_jax.analysis.doctor.command import examine_pair
from dflash_jax.checkpoints import Tokenizer
from dflash_jax.cli import app
from dflash_jax.models.lm_head import make_shortlist
from tests.pairs import GOLDEN, SIZES, TRAINED, cases, models, prompts, trained_files

PAIR = "recall-dflash2"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}t58{% endif %}"
)


def served(of=None, *, tokenizer=None, k=None, sizes=None, **changes) -> Engine:
    """An engine of the pair with fields of its draft's config changed; one slot, so that little is compiled."""
    of = models(PAIR) if of is None else of
    if changes:
        of = of.replace(draft_config=dataclasses.replace(of.draft_config, **changes))
    return Engine(of, EngineConfig(**{**SIZES, "max_slots": 1, **(sizes or {})}), tokenizer=tokenizer, k=k)


def found(engine, cause, **options):
    asked = options.pop("prompts", prompts(PAIR)[1:5])
    return diagnose(engine, asked, **{"max_tokens": 48, **options}).of(cause)


def is_problem(finding, *words):
    assert finding is not None and finding.level == "problem", finding
    assert all(word in finding.sentence for word in words), finding.sentence


@pytest.fixture(scope="module")
def healthy():
    return diagnose(served(), prompts(PAIR)[1:5], max_tokens=48, told=GOLDEN / PAIR)


def test_a_healthy_pair_has_no_problem(healthy):
    assert healthy.problems == ()
    fine = {finding.cause for finding in healthy.findings if finding.level == "fine"}
    assert fine >= {"acceptance", "k", "served_otherwise", "does_not_listen", "feature_layers", "mask_token"}
    assert "the draft listens" in healthy.of("does_not_listen").sentence
    assert str(healthy).splitlines()[-1].startswith(healthy.findings[-1].level)


def test_feature_layers_that_are_off_by_one_are_found_and_named():
    finding = found(served(target_layer_ids=(1, 2, 3)), "feature_layers")
    is_problem(finding, "with the states after layers [0, 1, 2]", "[1, 2, 3]")
    told = found(served(target_layer_ids=(1, 2, 3)), "feature_layers", told=GOLDEN / PAIR)
    is_problem(told, "the draft's config.json has [0, 1, 2]")


def test_another_mask_token_is_found_and_the_right_one_named():
    right = models(PAIR).draft_config.mask_token_id
    finding = found(served(mask_token_id=7), "mask_token")
    is_problem(finding, f"set draft.mask_token_id {right}")


@pytest.mark.slow
def test_another_rotary_embedding_is_found():
    of = models(PAIR)
    rope = dataclasses.replace(of.draft_config.rope, theta=40.0)
    is_problem(found(served(rope=rope), "rope"), "with the target's rotary embedding")
    is_problem(found(served(rope=rope), "rope", told=GOLDEN / PAIR), "draft.rope_scaling is", "config.json has")


@pytest.mark.slow
def test_contexts_that_are_longer_than_the_draft_knows_are_found():
    asked = [[*case["prompt"], *case["greedy_tokens"]] for case in cases(TRAINED)[:4]]
    engine = served(models(TRAINED), sizes={"max_model_len": 320})
    finding = found(engine, "rope_range", prompts=[(one * 3)[:150] for one in asked], told=Told(trained_tokens=112))
    assert finding.level in ("problem", "notice")
    assert "the draft was made for 112" in finding.sentence and "tokens a round past them" in finding.sentence
    short = found(engine, "rope_range", prompts=asked[:2], told=Told(max_positions=320), max_tokens=4)
    assert short.level == "fine"


def test_a_context_that_is_never_heard_is_found():
    of = models(PAIR)
    deaf = of.replace(draft=of.draft.replace(fc=jax.tree.map(jnp.zeros_like, of.draft.fc)))
    whole = diagnose(served(deaf), prompts(PAIR)[1:5], max_tokens=48)
    is_problem(whole.of("does_not_listen"), "the draft does not use its context")
    is_problem(whole.of("weak_draft"), "has not learned this kind of text")
    assert whole.findings[0].level == "problem", "problems come first"


class Forgetful:
    """A runner that loses the draft's context, as an engine with a defect would."""

    def __init__(self, run):
        self._run = run

    def __getattr__(self, name):
        return getattr(self._run, name)

    def __call__(self, device, plan):
        pages = jax.tree.map(jnp.zeros_like, device.draft_pages)
        return self._run(device.replace(draft_pages=pages), plan)


@pytest.mark.slow
def test_an_engine_that_drafts_from_another_context_than_training_is_found():
    engine = served()
    engine._run = Forgetful(engine._run)
    finding = found(engine, "served_otherwise")
    is_problem(finding, "serving loses what training has", "the context in the engine's pages")


@pytest.mark.slow
def test_a_shortlist_that_lacks_what_is_said_is_found():
    of = models(PAIR)
    finding = found(served(of.replace(shortlist=make_shortlist(of.target, range(30)))), "shortlist")
    is_problem(finding, "are not on draft.shortlist", "make it longer")
    everything = of.replace(shortlist=make_shortlist(of.target, range(64)))
    assert found(served(everything), "shortlist", max_tokens=8).level == "fine"


@pytest.mark.slow
def test_a_k_past_the_trained_one_is_found():
    is_problem(found(served(k=12), "k", max_tokens=8), "draft.k is 12", "trained to propose 7")
    assert found(served(k=3), "k", max_tokens=8).level == "notice"


@pytest.mark.slow
def test_what_sampling_costs_a_draft_that_cannot_sample_is_found():
    finding = found(served(models("recall-dflash1")), "sampling", sampling={"temperature": 3.0, "seed": 1})
    is_problem(finding, "at temperature 3.0", "a DFlash draft proposes its best tokens only")
    assert found(served(), "sampling", sampling={"temperature": 0.0}, max_tokens=8) is None


@pytest.mark.slow
def test_requests_that_are_not_drafted_for_are_found():
    engine = Engine(models(PAIR), EngineConfig(**{**SIZES, "max_slots": 1}), max_context=20)
    is_problem(found(engine, "fallback", max_tokens=8), "past draft.max_context 20")


@pytest.mark.slow
def test_scores_that_are_not_finite_are_found():
    of = models(PAIR)
    broken = of.replace(draft=of.draft.replace(norm=of.draft.norm.at[0].set(jnp.nan)))
    is_problem(found(served(broken), "damaged_drafts", max_tokens=8), "the draft's scores were not finite")


@pytest.mark.slow
def test_a_dtype_that_is_not_the_draft_s_is_noted():
    told = dataclasses.replace(read_told(GOLDEN / PAIR), dtype="bfloat16")
    finding = found(served(), "dtype", told=told, max_tokens=4)
    assert finding.level == "notice" and "engine computes in float32" in finding.sentence


@pytest.mark.slow
def test_another_target_than_the_trained_one_is_found():
    told = read_told(trained_files(TRAINED) / "draft")
    assert told.target_fingerprint is not None and told.trained_tokens == 112
    of = models(TRAINED)
    assert found(served(of), "other_target", told=told, max_tokens=4).level == "fine"
    other = of.replace(target=of.target.replace(norm=of.target.norm * 1.01))
    finding = found(served(other), "other_target", told=told, max_tokens=4)
    is_problem(finding, "not those that the draft was trained for")


@pytest.mark.slow
def test_text_that_is_harder_than_that_of_the_training_is_found():
    finding = found(served(), "other_text", told=Told(trained_acceptance=40.0))
    is_problem(finding, "40.00 tokens a round", "these prompts are not what it was trained on")


def words(template=TEMPLATE, size=64) -> Tokenizer:
    """A tokenizer whose tokens are the words t0, t1, ..."""
    backend = Backend(token_models.WordLevel({f"t{at}": at for at in range(size)}, unk_token="t59"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template))


def as_text(tokens):
    return " ".join(f"t{token}" for token in tokens)


def test_plain_prompts_of_a_model_with_a_chat_template_are_noted():
    text = [as_text(prompt) for prompt in prompts(PAIR)[1:3]]
    finding = found(served(tokenizer=words()), "chat_template", prompts=text, max_tokens=4)
    assert finding.level == "notice" and "2 of 2 prompts are plain text" in finding.sentence
    chats = [[{"role": "user", "content": one}] for one in text]
    assert found(served(tokenizer=words()), "chat_template", prompts=chats, max_tokens=4).level == "fine"


@pytest.mark.parametrize(
    ("card", "level"),
    [
        ("Use `enable_thinking=False` in the template.", "problem"),
        ("It was trained on non-thinking answers.", "problem"),
        ("chat_template_kwargs: {enable_thinking: true}", "fine"),
        ("A drafter.", "notice"),
    ],
)
def test_the_thinking_mode_is_compared_with_the_card(tmp_path, card, level):
    draft = tmp_path / "draft"
    shutil.copytree(GOLDEN / PAIR, draft)
    (draft / "README.md").write_text(card)
    chats = [[{"role": "user", "content": as_text(prompts(PAIR)[1])}]]
    finding = found(served(tokenizer=words()), "thinking_mode", prompts=chats, told=draft, max_tokens=4)
    assert finding.level == level and "thinking on" in finding.sentence.replace("is on", "on"), finding
    if level == "problem":
        assert "set target.chat_template_kwargs {enable_thinking: false}" in finding.sentence
        off = words().with_chat_template(None, {"enable_thinking": False})
        assert found(served(tokenizer=off), "thinking_mode", prompts=chats, told=draft, max_tokens=4).level == "fine"


def test_other_vocabularies_are_found(tmp_path):
    engine = served(tokenizer=words(template=None, size=80))
    is_problem(found(engine, "vocabulary", max_tokens=4), "the tokenizer has 80 tokens and the models 64")
    for name, vocabulary in (("target", {"a": 0, "b": 1}), ("draft", {"b": 0, "a": 1})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    told = read_told(tmp_path / "draft")
    finding = found(served(), "vocabulary", told=told, target_source=tmp_path / "target", max_tokens=4)
    is_problem(finding, "'b' is token 0 there and 1 here")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"vocab_size": 80}, "vocabulary"),
        ({"mask_token_id": 99}, "mask_token"),
        ({"target_layer_ids": (0, 9)}, "feature_layers"),
        ({"num_target_layers": 9}, "feature_layers"),
        ({"hidden_size": 256}, "pair"),
    ],
)
def test_what_makes_a_pair_impossible_is_a_finding(change, cause):
    of = models(PAIR)
    assert examine_pair(of.target_config, of.draft_config) is None
    finding = examine_pair(of.target_config, dataclasses.replace(of.draft_config, **change))
    assert (finding.cause, finding.level) == (cause, "problem")


@pytest.mark.slow
def test_what_is_told_is_read_and_what_is_broken_is_not_told(tmp_path):
    assert read_told(tmp_path) == Told()
    for name, content in (("config.json", "{"), ("README.md", "\udce9"), ("run.json", "[]"), ("tokenizer.json", "[]")):
        (tmp_path / name).write_text(content, errors="surrogateescape")
    (tmp_path.parent / "metrics.jsonl").write_text('{"step": 1, "kind": "held_out", "acceptance": 3.5}\n{"step"')
    assert read_told(tmp_path) == Told(trained_acceptance=3.5)
    told = read_told(GOLDEN / PAIR)
    assert told.config == models(PAIR).draft_config and told.thinking is None


def test_few_rounds_and_engines_that_cannot_be_examined_are_told_in_words():
    assert found(served(), "controls", max_tokens=4).level == "unknown"
    with pytest.raises(StateError, match="the engine has no draft"):
        diagnose(Engine(models(None), EngineConfig(**SIZES)), prompts(PAIR))
    with pytest.raises(RequestError, match="there are no prompts"):
        diagnose(served(), [])
    busy = served()
    busy.add_request(prompts(PAIR)[0])
    with pytest.raises(StateError, match="requests in flight"):
        diagnose(busy, prompts(PAIR))


@pytest.mark.slow
def test_the_command_says_it_in_sentences_and_in_its_exit_code(tmp_path):
    input_ = tmp_path / "prompts.jsonl"
    input_.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts(PAIR)[1:5]))
    config = tmp_path / "job.yaml"
    config.write_text(
        f"target: {{path: {GOLDEN / 'recall-target'}}}\ndraft: {{path: {GOLDEN / PAIR}, width: null}}\n"
        f"engine: {{max_slots: 1, max_model_len: 160, page_size: 16, strict: true}}\n"
        f"input: {{path: {input_}}}\noutput: {{path: {tmp_path / 'out.jsonl'}}}\n"
    )
    done = CliRunner().invoke(app, ["doctor", str(config), "--tokens", "48"])
    assert done.exit_code == 0, done.output
    assert "fine: does_not_listen:" in done.output and not (tmp_path / "out.jsonl").exists()
    done = CliRunner().invoke(app, ["doctor", str(config), "--tokens", "48", "--set", "draft.mask_token_id=7"])
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("problem: mask_token: draft.mask_token_id is 7"), done.output
