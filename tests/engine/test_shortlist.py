"""A draft that proposes from a shortlist drafts other blocks and changes no token."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, EngineConfig
from dflash_jax.checkpoints.shortlist import read_shortlist, write_shortlist
from dflash_jax.errors import CheckpointError
from dflash_jax.models.lm_head import make_shortlist
from dflash_jax.training.dataset import most_frequent
from dflash_jax.training.records import TokenSequence, append_shards
from tests.pairs import GOLDEN, PAIRS, SAMPLING, SIZES, models

PROMPT = [60, 1, 2, 33, 4, 5]


def drafted(completion) -> set[int]:
    return {token for block in completion.drafted_blocks for token in block}


def complete(pair: str, tokens, **sampling):
    of = models(pair)
    if tokens is not None:
        of = of.replace(shortlist=make_shortlist(of.target, tokens))
    return Engine(of, EngineConfig(**SIZES)).generate([PROMPT], {**SAMPLING, **sampling})[0]


@pytest.mark.parametrize("pair", PAIRS)
def test_only_listed_tokens_are_drafted_and_the_output_stays(pair):
    everything = complete(pair, None)
    listed = sorted(drafted(everything))[::2] + list(range(8))
    found = complete(pair, listed)
    assert found.token_ids == everything.token_ids
    assert drafted(found) and drafted(found) <= set(listed)
    assert not drafted(everything) <= set(listed)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_list_of_all_tokens_drafts_what_no_list_does(pair):
    found = complete(pair, range(models(pair).target_config.vocab_size))
    assert found.drafted_blocks == complete(pair, None).drafted_blocks


def test_columns_of_the_head_stand_with_their_tokens():
    of = models("recall-dflash2")
    listed = make_shortlist(of.target, [9, 3, 9, 5])
    assert listed.tokens.tolist() == [3, 5, 9]
    np.testing.assert_array_equal(listed.weight.in_out, of.target.lm_head.value[:, jnp.array([3, 5, 9])])


def test_the_engine_reads_the_list_a_config_names(tmp_path):
    write_shortlist(tmp_path / "list.json", range(0, 64, 2))
    draft = {"path": str(GOLDEN / "recall-dflash2"), "shortlist": str(tmp_path / "list.json")}
    engine = Engine.from_config({"target": {"path": str(GOLDEN / "recall-target")}, "draft": draft})
    assert engine.models.shortlist is not None
    assert engine.models.shortlist.tokens.tolist() == list(range(0, 64, 2))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2", "is not JSON"),
        ('{"a": 1}', "is not an array of token ids"),
        ("[1, true, 3]", "is not an array of token ids"),
        ("[1, 64]", "has token 64, outside the target's vocabulary of 64 tokens"),
        ("[1, 1, 2]", "has 2 distinct tokens, but the draft proposes from 4 candidates"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_bad_list_is_refused_with_the_reason(content, said, tmp_path):
    file = tmp_path / "list.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CheckpointError, match=said.replace("[", r"\[")):
        read_shortlist(file, 64, 4)


def test_the_most_frequent_tokens_of_sequences(tmp_path):
    append_shards(tmp_path, [TokenSequence(np.array(tokens, np.int32), 1) for tokens in ([7, 7, 2], [7, 2, 5, 2, 2])])
    assert most_frequent(tmp_path, 2) == ([2, 7], 7 / 8)
    assert most_frequent(tmp_path, 99)[0] == [2, 7, 5]
    write_shortlist(tmp_path / "list.json", most_frequent(tmp_path, 2)[0])
    assert json.loads((tmp_path / "list.json").read_text()) == [2, 7]
