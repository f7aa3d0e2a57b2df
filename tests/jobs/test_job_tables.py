"""Tables as input: Parquet, Arrow, Hugging Face datasets on disk; columns by name, and templates."""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from dflash_jax.engine.request import SamplingParams
from dflash_jax.errors import ConfigError
from dflash_jax.jobs.config import InputFile, load_job
from dflash_jax.jobs.formats import open_input
from dflash_jax.jobs.reader import BadLine, Item, read_items
from tests.jobs.recall_job import CASES

DEFAULTS = SamplingParams(max_tokens=7)
TABLE = pa.table({"id": ["a", "b", "c"], "prompt": ["one", "two", "three"], "other": [1, 2, 3]})


def write_stream(table, path):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


WRITERS = {
    "parquet": lambda table, path: pyarrow.parquet.write_table(table, path, row_group_size=2),
    "feather": lambda table, path: pyarrow.feather.write_feather(table, str(path)),
    "arrow": write_stream,
}


def read(path, **settings):
    return list(read_items(InputFile(path=str(path), **settings), DEFAULTS))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_table_is_known_by_its_first_bytes_whatever_its_name(tmp_path, kind):
    path = tmp_path / "in.data"
    WRITERS[kind](TABLE, path)
    assert read(path) == [
        Item(n, item_id, prompt, DEFAULTS, row="row")
        for n, (item_id, prompt) in enumerate(zip("abc", ("one", "two", "three"), strict=True), start=1)
    ]
    with open_input(InputFile(path=str(path))) as reader:
        assert reader.count() == 3
        assert list(reader.rows()) == list(reader.rows())


def test_columns_are_named_in_the_config(tmp_path):
    pyarrow.parquet.write_table(pa.table({"uid": [5, 6], "text": ["x", "y"]}), tmp_path / "in.parquet")
    items = read(tmp_path / "in.parquet", columns={"id": "uid", "prompt": "text"})
    assert [(item.id, item.prompt) for item in items] == [(5, "x"), (6, "y")]


def test_a_template_makes_prompts_of_columns(tmp_path):
    table = pa.table({"text": ["x", None, "z"], "n": [1, 2, 3], "prompt": ["", "", ""]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    one, null, three = read(tmp_path / "in.parquet", template="Summarise {n} {{times}}: {text}")
    assert (one.id, one.prompt, three.prompt) == ("row-1", "Summarise 1 {times}: x", "Summarise 3 {times}: z")
    assert isinstance(null, BadLine) and null.error == "input.template names 'text', which is null"
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Tell of {text}"}]
    assert read(tmp_path / "in.parquet", template=chat)[0].prompt[1] == {"role": "user", "content": "Tell of x"}


def test_a_template_works_on_json_lines_too(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "x", "prompts": "p"}\n{"id": 2}\n')
    one, two = read(tmp_path / "in.jsonl", template="Of {text} and {prompts}")
    assert one.prompt == "Of x and p" and two.error == "input.template names 'text', which is not there"


def test_messages_token_ids_and_sampling_may_be_nested_columns_or_json(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    nested = pa.table({"messages": [chat], "sampling": [{"temperature": 0.5, "top_k": None}]})
    pyarrow.parquet.write_table(nested, tmp_path / "nested.parquet")
    text = pa.table({"messages": [json.dumps(chat), "{"], "sampling": [json.dumps({"temperature": 0.5}), None]})
    pyarrow.parquet.write_table(text, tmp_path / "text.parquet")
    [item] = read(tmp_path / "nested.parquet")
    same, bad = read(tmp_path / "text.parquet")
    assert item == same == Item(1, "row-1", chat, SamplingParams(max_tokens=7, temperature=0.5), row="row")
    assert bad.error == "messages is '{', which is not JSON"
    tokens = pa.table({"prompt_token_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32()))})
    pyarrow.parquet.write_table(tokens, tmp_path / "tokens.parquet")
    assert [item.prompt for item in read(tmp_path / "tokens.parquet")] == [[1, 2], [3]]


def test_a_value_of_the_wrong_kind_is_that_rows_error(tmp_path):
    pyarrow.parquet.write_table(pa.table({"prompt": [b"bytes", b"x"]}), tmp_path / "in.parquet")
    assert all("prompt is" in item.error and "must be a string" in item.error for item in read(tmp_path / "in.parquet"))


def write_dataset(table, directory, shards=2):
    """As `datasets.Dataset.save_to_disk` does."""
    directory.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{shards:05d}.arrow" for n in range(shards)]
    size = -(-len(table) // shards)
    for n, name in enumerate(names):
        write_stream(table.slice(n * size, size), directory / name)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": None}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")


def test_a_dataset_on_disk_is_read_with_and_without_splits(tmp_path):
    write_dataset(TABLE, tmp_path / "set")
    assert [item.prompt for item in read(tmp_path / "set")] == ["one", "two", "three"]
    write_dataset(TABLE, tmp_path / "sets" / "train")
    write_dataset(TABLE.slice(0, 1), tmp_path / "sets" / "test")
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [item.prompt for item in read(tmp_path / "sets", split="test")] == ["one"]
    with pytest.raises(ConfigError, match=r"has the splits train, test; input.split must name one of them"):
        read(tmp_path / "sets")
    with pytest.raises(ConfigError, match=r"train, test; input.split is 'dev'"):
        read(tmp_path / "sets", split="dev")


def test_a_directory_of_parquet_files_is_one_table_in_the_order_of_their_names(tmp_path):
    for n, name in enumerate(["b.parquet", "a.parquet"]):
        pyarrow.parquet.write_table(TABLE.slice(n, 1), tmp_path / name)
    (tmp_path / "_hidden.parquet").write_text("no table")
    (tmp_path / "README.md").write_text("hello")
    assert [(item.line, item.prompt) for item in read(tmp_path)] == [(1, "two"), (2, "one")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": {"prompt": "txt"}}, "has no column 'txt'; its columns are id, prompt, other"),
        ({"template": "of {txt}"}, "has no column 'txt'"),
        ({"split": "train"}, "input.split is 'train', and .* is a file"),
    ],
)
def test_what_the_table_does_not_have_is_told_before_anything_runs(tmp_path, settings, said):
    pyarrow.parquet.write_table(TABLE, tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=said):
        read(tmp_path / "in.parquet", **settings)


def test_a_table_without_prompts_is_refused_with_its_columns(tmp_path):
    pyarrow.parquet.write_table(pa.table({"text": ["x"], "label": [1]}), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=r"has the columns text, label, and none of prompt, .* input.template"):
        read(tmp_path / "in.parquet")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("of {text", "input.template is 'of {text'"),
        ("of {text!r}", r"input.template has \{text!r\}"),
        ("of {text:>5}", r"input.template has \{text:>5\}"),
        ("of {}", r"input.template has \{\}"),
        ("nothing", "names no column"),
        ([], "input.template is empty"),
        ([{"role": "user"}], "each must have role and content"),
    ],
)
def test_a_template_that_is_none_is_refused_with_the_config(job, template, said):
    job.configure(input={"path": "x", "template": template})
    with pytest.raises(ConfigError, match=said):
        load_job(job.config)


@pytest.mark.parametrize("content", [b"PAR1 broken", b"ARROW1 broken", b"\xff\xff\xff\xffbroken", b"FEA1"])
def test_a_broken_table_is_one_sentence(tmp_path, content):
    (tmp_path / "in.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"the table .* \(input.path\) cannot be read \("):
        read(tmp_path / "in.parquet")


def test_without_pyarrow_a_table_is_refused_with_what_to_install(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(TABLE, tmp_path / "in.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow; install it with `pip install 'dflash_jax\[parquet\]'`"):
        read(tmp_path / "in.parquet")


def test_a_dataset_cannot_name_files_outside_of_itself(tmp_path):
    write_dataset(TABLE, tmp_path / "set")
    (tmp_path / "set" / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(ConfigError, match="does not list _data_files"):
        read(tmp_path / "set")


def test_a_job_runs_on_a_table(job):
    tokens = pa.array([case["prompt"] for case in CASES], pa.list_(pa.int32()))
    table = pa.table({"uid": [f"case-{n}" for n in range(len(CASES))], "tokens": tokens})
    pyarrow.parquet.write_table(table, job.directory / "in.parquet")
    job.run()
    expected = {row["id"]: row["token_ids"] for row in job.rows()}
    job.output.unlink()
    (job.directory / "out.jsonl.summary.json").unlink()
    columns = {"id": "uid", "prompt_token_ids": "tokens"}
    job.configure(input={"path": str(job.directory / "in.parquet"), "columns": columns})
    job.run()
    assert {row["id"]: row["token_ids"] for row in job.rows()} == expected
