"""The golden checkpoints, damaged in every way that a disk, a network or a hand can damage them."""

import json
import os
import random
import shutil
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints import (
    load_draft,
    load_target,
    restore_params,
    safetensors_io,
    save_draft,
    save_params,
    save_target,
)
from dflash_jax.checkpoints.safetensors_io import open_directory, open_file
from dflash_jax.checkpoints.tensors import all_finite
from dflash_jax.errors import CheckpointError
from tests.checkpoints.damage import refusal

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_MODELS = {"tiny-llama-rope3-tied": load_target, "tiny-qwen3-moe": load_target, "recall-dflash2": load_draft}


@pytest.fixture
def copy(golden, tmp_path):
    def make(name):
        return shutil.copytree(golden / name, tmp_path / name)

    return make


def header_of(file):
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(file, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_safetensors_cut_anywhere_are_refused_by_file(copy, name):
    directory = copy(name)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    sizes = [*range(9), *range(9, 8 + length, length // 20), 8 + length, *range(9 + length, len(data), len(data) // 10)]
    for size in [*sizes, len(data) - 1]:
        file.write_bytes(data[:size])
        said = refusal(lambda: GOLDEN_MODELS[name](directory))
        assert said is not None and str(file) in said, (size, said)


def test_safetensors_with_something_behind_are_refused(copy):
    directory = copy("tiny-llama-rope3-tied")
    with (directory / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "cannot be read as safetensors" in refusal(lambda: load_target(directory))


def short(value):
    return repr(value)[:40] if type(value) is not int else f"{value:.3g}"[:40] if value < 1e300 else "huge"


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = [
    None,
    True,
    -1,
    0,
    2.5,
    10**9,
    2**63,
    10**400,
    1e308,
    "",
    "x" * 10_000,
    "\0",
    [],
    [None],
    [[]],
    {},
    {"a": {}},
]


@pytest.mark.parametrize(
    "header",
    [
        *({"a": ENTRY | {field: value}} for field in ENTRY for value in HOSTILE),
        *({"a": value} for value in HOSTILE),
        {"a": ENTRY | {"shape": [2**32, 2**32]}},
        {"a": ENTRY | {"shape": [2, -1]}},
        {"a": ENTRY | {"data_offsets": [8, 0]}},
        {"a": ENTRY | {"data_offsets": [0, 2**63]}},
        {"a": ENTRY, "b": ENTRY},
        {"__metadata__": {"a": 1}, "a": ENTRY},
        [],
        "x",
        b"",
        b"{",
        b"\xff" * 64,
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
    ids=short,
)
def test_hostile_safetensors_headers_are_refused(tmp_path, header):
    file = tmp_path / "m.safetensors"
    with_header(file, header, bytes(8))

    def read():
        for tensor in open_file(file).values():
            tensor.read()

    assert refusal(read) is not None


@pytest.mark.parametrize("length", [0, 1, 9, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_safetensors_with_a_wrong_header_length_are_refused(tmp_path, length):
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", length) + b'{"a":{}}')
    assert "m.safetensors cannot be read as safetensors" in refusal(lambda: open_file(tmp_path / "m.safetensors"))


@given(st.data())
def test_fuzz_a_safetensors_file_with_changed_bytes_is_read_or_refused(tmp_path_factory, data):
    source = GOLDEN / "tiny-llama-rope3-tied"
    whole = bytearray((source / "model.safetensors").read_bytes())
    (length,) = struct.unpack("<Q", whole[:8])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 7 + length))
        text = st.sampled_from([b"0", b"9", b"9" * 30, b"-", b"null", b'"', b"[", b"]", b"}", b"F8_E4M3", b"1e9"])
        change = data.draw(st.one_of(st.binary(min_size=1, max_size=9), text))
        whole[at : at + len(change)] = change
    directory = tmp_path_factory.getbasetemp() / "fuzzed"
    if not directory.exists():
        shutil.copytree(source, directory)
    (directory / "model.safetensors").write_bytes(whole)
    refusal(lambda: load_target(directory))


@pytest.fixture
def sharded(models, tmp_path):
    config, params = models.targets["qwen3"], models.params(models.targets["qwen3"])
    save_target(tmp_path / "t", config, params, max_shard_bytes=4000)
    return tmp_path / "t"


NAME = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "value", [*HOSTILE, "../t/model.safetensors", "/etc/passwd", "a/b", "..", ".", "a\0b"], ids=short
)
def test_an_index_that_leads_elsewhere_is_refused(sharded, value):
    index = sharded / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    index.write_text(json.dumps(fields | {"weight_map": fields["weight_map"] | {NAME: value}}))
    said = refusal(lambda: open_directory(sharded))
    assert said is not None and "model.safetensors.index.json" in said
    index.write_text(json.dumps(fields | {"weight_map": value}))
    assert "model.safetensors.index.json" in refusal(lambda: open_directory(sharded))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", "null", "[" * 100_000, '{"a":' * 100_000, '{"weight_map": ' + "9" * 5_000 + "}", "\udcff"],
    ids=lambda text: text[:12],
)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "generation_config.json"])
def test_what_is_no_json_object_is_refused_by_file(sharded, name, text):
    (sharded / name).write_bytes(text.encode(errors="surrogateescape"))
    said = refusal(lambda: load_target(sharded))
    assert said is not None and name in said


def test_json_of_gigabytes_is_not_read(sharded):
    os.truncate(sharded / "model.safetensors.index.json", 2 << 30)
    assert "bytes, but it must have at most" in refusal(lambda: load_target(sharded))


def test_a_tensor_in_two_shards_is_refused(sharded):
    shards = sorted(sharded.glob("*.safetensors"))
    tensors = load_file(shards[1]) | load_file(shards[0])
    save_file(tensors, shards[1])
    assert "is both in" in refusal(lambda: load_target(sharded))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_refused_by_tensor(models, tmp_path, dtype, value):
    config, params = models.drafts["dflash2"], models.params(models.drafts["dflash2"])
    save_draft(tmp_path / "d", config, params, dtype)
    file = tmp_path / "d" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.1.mlp.up_proj.weight"][7, 11] = value
    save_file(tensors, file, metadata={"format": "pt"})
    for held in ("float32", "bfloat16"):
        with pytest.raises(CheckpointError, match=rf"'layers\.1\.mlp\.up_proj\.weight' .* has {value} at \[7, 11\]"):
            load_draft(tmp_path / "d", held)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_a_nan_that_traps_is_refused_without_a_warning(models, tmp_path, recwarn, held):
    config, params = models.drafts["dflash2"], models.params(models.drafts["dflash2"])
    save_draft(tmp_path / "d", config, params, "float32")
    file = tmp_path / "d" / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"].view(np.uint32)[3] = 0x7F800001
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'norm\.weight' .* has nan at \[3\]"):
        load_draft(tmp_path / "d", held)
    assert not recwarn.list


def test_weights_too_large_for_the_dtype_they_are_held_in_are_refused(models, tmp_path):
    config, params = models.targets["qwen3_moe"], models.params(models.targets["qwen3_moe"])
    save_target(tmp_path / "t", config, params)
    file = tmp_path / "t" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float64)
    tensors[name][0, 0] = 1e39
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight' .* has 1e\+39 at \[0, 0\]"):
        load_target(tmp_path / "t")


def test_the_largest_and_smallest_weights_are_finite():
    for dtype in (jnp.bfloat16, np.float32):
        info = jnp.finfo(dtype)
        kept = np.array([info.max, info.min, info.tiny, -0.0, 0.0]).astype(dtype)
        assert all_finite(kept) and all_finite(kept[:0])
        for value in (np.nan, -np.nan, np.inf, -np.inf):
            assert not all_finite(np.append(kept, np.array([value], dtype)))


def test_params_of_orbax_that_are_not_finite_are_refused(models, tmp_path):
    config, params = models.drafts["dflash1"], models.params(models.drafts["dflash1"])
    save_params(tmp_path / "p", config, params.replace(norm=params.norm.at[3].set(jnp.nan)))
    with pytest.raises(CheckpointError, match=r"params' norm in .* has values that are not finite"):
        restore_params(tmp_path / "p")


def damaged(data):
    """A file's bytes in every way that a test has time for."""
    yield b""
    yield data[: len(data) // 2]
    yield data[:-1]
    yield bytes(len(data))
    yield random.Random(0).randbytes(len(data))
    for at in (0, len(data) // 2, len(data) - 1):
        yield data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    yield data + b"\0"


def test_a_damaged_orbax_checkpoint_is_refused_by_file(models, tmp_path):
    config, params = models.drafts["dflash2"], models.params(models.drafts["dflash2"])
    save_params(tmp_path / "p", config, params)
    files = [file for file in (tmp_path / "p" / "params").rglob("*") if file.is_file()]
    assert len(files) > 5
    for file in files:
        data = file.read_bytes()
        for change in damaged(data):
            file.write_bytes(change)
            assert str(file) in refusal(lambda: restore_params(tmp_path / "p"))
        file.unlink()
        assert str(file) in refusal(lambda: restore_params(tmp_path / "p"))
        file.write_bytes(data)
    models.assert_same(restore_params(tmp_path / "p")[1], params)


@pytest.mark.parametrize("name", ["params_dtypes.json", "params_files.json"])
def test_notes_beside_orbax_params_are_checked(models, tmp_path, name):
    config, params = models.drafts["dflash1"], models.params(models.drafts["dflash1"])
    save_params(tmp_path / "p", config, params)
    fields = json.loads((tmp_path / "p" / name).read_text())
    first = next(iter(fields))
    for value in HOSTILE:
        (tmp_path / "p" / name).write_text(json.dumps(fields | {first: value}))
        assert refusal(lambda: restore_params(tmp_path / "p")) is not None
        assert refusal(lambda: load_draft(tmp_path / "p")) is not None
    (tmp_path / "p" / name).write_text(json.dumps({**fields, "params/../../x": {"bytes": 1, "sha256": ""}, "/x": {}}))
    if name == "params_files.json":
        assert "is no file of" in refusal(lambda: restore_params(tmp_path / "p"))


def replaced(fields, path=()):
    """The ways to every value inside JSON."""
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from replaced(value, (*path, key))


def put(fields, path, value):
    copied = json.loads(json.dumps(fields))
    inside = copied
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return copied


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_every_value_of_a_tensors_header_may_be_hostile(copy, name):
    directory = copy(name)
    file = directory / "model.safetensors"
    header, data = header_of(file)
    rng = random.Random(0)
    ways = list(replaced(header))
    for path in rng.sample(ways, 40):
        with_header(file, put(header, path, rng.choice(HOSTILE)), data)
        refusal(lambda: GOLDEN_MODELS[name](directory))


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling", "device"])
def test_what_is_no_file_is_not_taken_for_an_absent_one(copy, name, kind):
    """Without its generation config a model does not know where to end, and without its tokenizer it reads no text."""
    file = copy("tiny-llama-rope3-tied") / name
    file.unlink(missing_ok=True)
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("nowhere" if kind == "dangling" else "/dev/zero")
    assert refusal(lambda: load_target(file.parent)).startswith(f"{file} is a directory, a pipe, a device or a link")


def test_a_safetensors_file_that_memory_cannot_map_is_refused(copy, monkeypatch):
    directory = copy("tiny-llama-rope3-tied")

    def too_large(*_, **__):
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr(safetensors_io, "safe_open", too_large)
    with pytest.raises(CheckpointError, match=r"cannot be read as safetensors \(Cannot allocate memory"):
        load_target(directory)
