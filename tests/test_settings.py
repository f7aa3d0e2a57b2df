from __future__ import annotations

import importlib
import inspect
import os
import re
import time

import pytest
from pydantic import field_validator, model_validator

from dflash_jax import cli, streams
from dflash_jax.errors import ConfigError
from dflash_jax.kinds import KEYS
from dflash_jax.settings import PathText, Section, parse, read_settings, suggest


@pytest.fixture
def read(tmp_path):
    def read(text, *overrides):
        path = tmp_path / "job.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_settings(path, overrides)

    return read


def test_values_and_overrides_are_yaml(read):
    values = read("a: {b: 1}\n", "a.b=2", "a.c=[x, 1e-4]", "d.e=null", "f=true", "g=a=b")
    assert values == {"a": {"b": 2, "c": ["x", 1e-4]}, "d": {"e": None}, "f": True, "g": "a=b"}


def test_an_override_reaches_into_an_empty_section(read):
    assert read("a:\n", "a.b=1") == {"a": {"b": 1}}


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("2E3", 2e3), ("1.5e+2", 150.0), ("1e4x", "1e4x")])
def test_numbers_with_an_exponent_need_no_dot(read, text, value):
    assert read(f"a: {text}") == {"a": value}


def test_a_byte_order_mark_is_no_part_of_the_first_key(read):
    assert read(b"\xef\xbb\xbfa: 1") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", r"is not YAML \(line"),
        ("a: 1\na: 2", "'a' is given twice"),
        ("a: {<<: {b: 1}, <<: {c: 2}}", "'<<' is given twice"),
        ("{1: a, 1.0: b}", "1.0 is given twice"),
        ("a: {~: 1, ~: 2}", "None is given twice"),
        ("a: {<<: 1}", "merged must be a mapping or a list of mappings, not a scalar"),
        ("a: {<<: [[]]}", "not a sequence"),
        ("- 1", "holds a list; a config is a mapping"),
        ("", "holds nothing"),
        (b"a: \xff", "is not UTF-8"),
        ("a: !!python/object:os.system {}", "is not YAML"),
        ("? [a]\n: 1", "is not YAML"),
    ],
)
def test_a_file_that_is_no_config_is_refused(read, text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        read(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("a.b", "is not an assignment"),
        ("=1", "is not an assignment"),
        ("a..b=1", "is not an assignment"),
        ("a.b=1", "a is 1, which has no keys inside"),
        ("a=[1", "is not YAML"),
    ],
)
def test_a_malformed_override_is_refused(read, override, says):
    with pytest.raises(ConfigError, match=says):
        read("a: 1", override)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no config file"):
        read_settings(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        read_settings(tmp_path)


class Ends(Section):
    first: int
    last: int
    name: str = "x"

    @model_validator(mode="after")
    def _order(self):
        if self.first > self.last:
            raise ValueError(f"`first` {self.first} is after `last` {self.last}; keep A before B")
        return self

    @field_validator("name")
    @classmethod
    def _short(cls, name):
        if len(name) > 1:
            raise ValueError("give ONE letter")
        return name


class Outer(Section):
    ends: Ends


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"first": 2, "last": 1}, "a.yaml: ends: `first` 2 is after `last` 1; keep A before B"),
        ({"first": 1, "last": 1, "name": "ab"}, "a.yaml: 'ends.name' is 'ab': give ONE letter"),
        (3, "a.yaml: 'ends' is 3; it must be a mapping"),
        ({"first": [0] * 999, "last": 1}, "a.yaml: 'ends.first' is [0, 0, 0, 0, 0, 0, ...]: input should be a"),
    ],
)
def test_what_a_section_says_of_its_values_is_said_in_its_words(values, says):
    with pytest.raises(ConfigError) as caught:
        parse(Outer, {"ends": values}, "a.yaml")
    assert str(caught.value).startswith(says)


def test_what_a_config_says_of_several_keys_stands_alone():
    with pytest.raises(ConfigError, match=r"^a\.yaml: `first` 2 is after `last` 1; keep A before B$"):
        parse(Ends, {"first": 2, "last": 1}, "a.yaml")


def write_configs(directory, **texts):
    for name, text in texts.items():
        (directory / f"{name}.yaml").write_text(text)
    return directory / f"{next(iter(texts))}.yaml"


def test_a_config_that_extends_another_changes_what_it_names(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "base.yaml").write_text("a: {b: 1, c: [1, 2]}\nd: 4\ne: {f: 5}\n")
    top = write_configs(
        tmp_path / "below",
        top="extends: middle.yaml\na: {c: [3]}\n",
        middle="extends: ../base.yaml\na: {b: 2}\ne: null\n",
    )
    assert read_settings(top, ["a.g=6"]) == {"a": {"b": 2, "c": [3], "g": 6}, "d": 4, "e": None}


def test_a_config_that_cannot_be_extended_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no config file .*nowhere\.yaml"):
        read_settings(write_configs(tmp_path, a="extends: nowhere.yaml"))
    with pytest.raises(ConfigError, match=r"a\.yaml: 'extends' is 3; it must be the path"):
        read_settings(write_configs(tmp_path, a="extends: 3"))
    with pytest.raises(ConfigError, match=r"a\.yaml extends itself, by way of .*b\.yaml"):
        read_settings(write_configs(tmp_path, a="extends: b.yaml", b="extends: a.yaml"))


# Hostile files: each is refused within a second, in one sentence.

UNFOLDING = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
MERGING = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (UNFOLDING, r"more than 100,000 values, with aliases unfolded"),
        (MERGING, r"more than 100,000 values, with aliases unfolded"),
        ("a: &a [*a]", "an alias to itself"),
        ("a: " + "9" * 401, "a number of 401 characters"),
        ("a: 0x" + "f" * 401, "a number of 403 characters"),
        ("a: " + "1:" * 300 + "1", "a number of 601 characters"),
        ("[" * 100_000, "is not YAML"),
        ("- " * 100_000, "is not YAML"),
        ("a: !!bool x", "a tag, such as !!int, does not fit its value"),
        ("a: !!int ''", "a tag, such as !!int, does not fit its value"),
        ("a: !!timestamp x", "a tag, such as !!int, does not fit its value"),
        ('a: "\\ud800"', "is not YAML"),
        ("a: " + "x" * (1 << 18), "has more than 256 KiB"),
    ],
    ids=range(13),
)
def test_a_hostile_file_is_refused_at_once(read, text, says):
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match=says) as caught:
        read(text)
    assert time.perf_counter() - begin < 5
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("a", ["a", "abc"])
def test_of_a_key_that_is_merged_the_own_value_counts_then_the_first(read, a):
    values = read(
        f"deep: {{er: &own {{<<: &base {{{a}: 1, b: 2, c: 3}}, {a}: 4}}}}\n"
        "merged: {<<: *own, b: 5}\n"
        "own first: {<<: [*own, *base]}\n"
        "base first: {b: 6, <<: [*base, *own]}\n"
    )
    assert values == {
        "deep": {"er": {a: 4, "b": 2, "c": 3}},
        "merged": {a: 4, "b": 5, "c": 3},
        "own first": {a: 4, "b": 2, "c": 3},
        "base first": {a: 1, "b": 6, "c": 3},
    }


def test_aliases_within_reason_are_values_like_any(read):
    assert read("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}") == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "/dev/urandom"])
def test_a_device_is_no_config(device):
    with pytest.raises(ConfigError, match="it is a device"):
        read_settings(device)


def test_a_pipe_that_nobody_writes_to_is_no_config(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "PIPE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="nobody wrote to"):
        read_settings(tmp_path / "pipe")


@pytest.mark.parametrize("path", ["a\0b", "a" * 5_000_000, "\ud800"])
def test_a_path_that_no_file_can_have_is_one_sentence(path):
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert len(str(caught.value)) < 400


def test_an_override_is_cut_where_it_is_quoted(read):
    for override in ("a.b=" + "x" * 5_000_000, "x" * 5_000_000, "a.b=[" + "x" * 5_000_000):
        with pytest.raises(ConfigError) as caught:
            read("a: 1", override)
        assert len(str(caught.value)) < 600


def test_half_of_a_surrogate_pair_is_refused_wherever_it_is(read):
    # Bytes on the command line that are no UTF-8 come as these.
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        read("a: 1", "b.c=[x, {y: \udcff}]")


class Paths(Section):
    path: PathText


@pytest.mark.parametrize(("path", "says"), [("a\0b", "NUL"), ("", "at least one character")])
def test_a_path_is_one_that_a_file_can_have(path, says):
    with pytest.raises(ConfigError, match=says):
        parse(Paths, {"path": path}, "a.yaml")


def test_a_value_of_megabytes_is_cut_where_it_is_quoted():
    for value in ("x" * 5_000_000, ["x"] * 1_000_000, {"y" * 5_000_000: 1}, 10**400, 1 << 20_000):
        with pytest.raises(ConfigError) as caught:
            parse(Outer, {"ends": {"first": value, "last": 1}}, "a.yaml")
        assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError) as caught:
        parse(Outer, {"x" * 5_000_000: 1}, "a.yaml")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fist", "the nearest known one is 'first'"),
        ("logprobs", "the known ones are first, last, name"),
        ("x" * 5_000_000, "the known ones are first, last, name"),
    ],
    ids=["near", "far", "endless"],
)
def test_a_key_that_nothing_is_near_to_is_answered_with_all_there_are(name, says):
    assert suggest(name, Ends.model_fields) == says


def test_what_each_kind_of_config_may_have_is_what_its_model_has():
    from dflash_jax.jobs.config import JobConfig
    from dflash_jax.training import TrainConfig

    assert KEYS["job"] == set(JobConfig.model_fields)
    assert KEYS["training"] == set(TrainConfig.model_fields)
    assert KEYS["corpus"] == set(corpus_config().model_fields)


def corpus_config():
    # Wherever the command line has it from.
    module = re.search(r"from (\S+) import CorpusConfig", inspect.getsource(cli))
    return importlib.import_module(module.group(1)).CorpusConfig
