import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.checkpoints import load_target
from dflash_jax.checkpoints.gguf_io import open_gguf
from dflash_jax.checkpoints.gguf_tokenizer import read_tokenizer
from dflash_jax.errors import CheckpointError
from tests.checkpoints.damage import refusal

Kind = gguf.GGUFValueType
STRING, ARRAY, UINT8, UINT32, BOOL = Kind.STRING, Kind.ARRAY, Kind.UINT8, Kind.UINT32, Kind.BOOL


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key, kind, value):
    return string(key) + struct.pack("<I", kind) + value


def tensor(name="t", shape=(4,), kind=0, offset=0, axes=None):
    """A tensor's entry; `shape` is innermost axis first, as the format has it."""
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return string(name) + struct.pack("<I", axes or len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def header(pairs=(), tensors=(), *, magic=b"GGUF", version=3, counts=None, data=bytes(64), alignment=32):
    found = (len(tensors), len(pairs)) if counts is None else counts
    text = magic + struct.pack("<IQQ", version, *found) + b"".join(pairs) + b"".join(tensors)
    return text + bytes(-len(text) % alignment) + data


def opened(tmp_path, data):
    (tmp_path / "m.gguf").write_bytes(data)
    return open_gguf(tmp_path / "m.gguf")


HUGE = [2**31, 2**40, 2**60, 2**63, 2**64 - 1]
LARGE = (1 << 32) // 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes, fewer than any header"),
        (b"GGUF", "has 4 bytes"),
        (header(magic=b"GGML"), "does not begin with the letters GGUF"),
        (header(version=1), "of version 1"),
        (header(version=4), "of version 4"),
        (header(version=3 << 24), "big-endian"),
        (header([pair("a", UINT32, bytes(4))] * 2), r"metadata key 'a' is there twice"),
        (header([pair(b"\xff\xfe", UINT32, bytes(4))]), "metadata key 1 of 1 is not UTF-8"),
        (header([pair("a", STRING, string(b"\xff"))]), r"metadata key 'a' is not UTF-8"),
        (header([pair("a", 13, bytes(4))]), r"metadata key 'a' has the unknown type 13"),
        (header([pair("a", 2**32 - 1, bytes(4))]), "unknown type 4294967295"),
        (header([pair("a", BOOL, b"\x02")]), "truth value of 2"),
        (header([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", UINT8, 0))]), "array of arrays"),
        (header([pair("a", ARRAY, struct.pack("<IQ", 99, 0))]), "the elements of .* has the unknown type 99"),
        (header([pair("general.alignment", UINT32, bytes(4))]), "general.alignment is 0, but it must be a power"),
        (header([pair("general.alignment", UINT32, struct.pack("<I", 24))]), "general.alignment is 24"),
        (header([pair("general.alignment", UINT32, struct.pack("<I", 1 << 31))]), "general.alignment is 2147483648"),
        (header([pair("general.alignment", STRING, string("32"))]), "general.alignment is '32'"),
        (header([], [tensor(shape=())]), "tensor 't' has 0 axes, but it must have 1 to 4"),
        (header([], [tensor(axes=2**32 - 1)]), "has 4294967295 axes"),
        (header([], [tensor(shape=(0,))]), r"tensor 't' has shape \[0\], but every axis must be at least 1"),
        (header([], [tensor(shape=(4, 0, 2))]), r"has shape \[2, 0, 4\]"),
        (header([], [tensor(shape=(2**32, 2**32))]), "ends at byte .*, but the file has"),
        (header([], [tensor(shape=(2**62, 2**62, 2**62, 2**62))]), "ends at byte .*, but the file has"),
        (header([], [tensor(shape=(17,))]), r"tensor 't' of shape \[17\] ends at byte 132, but the file has 128"),
        (header([], [tensor(kind=4)]), "unknown quantisation 4"),
        (header([], [tensor(kind=2**32 - 1)]), "unknown quantisation 4294967295"),
        (header([], [tensor(kind=8)]), "has rows of 4 values, but Q8_0 must have a multiple of 32"),
        (header([], [tensor(offset=2**63)]), "ends at byte 9223372036854775"),
        (header([], [tensor(offset=64)]), "ends at byte"),
        (header([], [tensor(offset=4)]), "begins at offset 4, but it must be a multiple of general.alignment"),
        (header([], [tensor("a"), tensor("a", offset=32)]), "tensor 'a' is there twice"),
        (header([], [tensor("a", (9,)), tensor("b", offset=32)]), "tensors 'a' and 'b' lie on the same bytes"),
        *((header(counts=(count, 0)), f"counts {count} tensors, but the") for count in HUGE),
        *((header(counts=(0, count)), f"counts {count} metadata keys, but the") for count in HUGE),
        *((header([pair("a", STRING, struct.pack("<Q", size))]), f"'a' takes {size} bytes") for size in HUGE),
        *((header([struct.pack("<Q", size)]), f"metadata key 1 of 1 takes {size} bytes") for size in HUGE),
        *(
            (header([pair("a", ARRAY, struct.pack("<IQ", kind, size))]), f"counts {size} elements of .*'a', but")
            for size in HUGE
            for kind in (STRING, UINT8, BOOL, Kind.FLOAT64)
        ),
    ],
)
def test_damaged_gguf_headers_are_refused_by_field(tmp_path, data, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        opened(tmp_path, data)
    assert "m.gguf cannot be read as GGUF" in str(raised.value)
    assert refusal(lambda: opened(tmp_path, data)) == str(raised.value)


@pytest.mark.parametrize("count", [1 << 25, LARGE])
@pytest.mark.parametrize("kind", [UINT8, STRING])
def test_large_files_of_nothing_do_not_fill_memory(tmp_path, count, kind):
    """A sparse file takes no room on the disk, and as much memory as a careless reader makes of it."""
    start = header([pair("a", ARRAY, struct.pack("<IQ", kind, count))], data=b"")
    with (tmp_path / "m.gguf").open("wb") as file:
        file.write(start)
        file.truncate(len(start) + count * 8)
    assert "more than any model's" in refusal(lambda: open_gguf(tmp_path / "m.gguf"))


def test_a_text_of_gigabytes_is_not_read(tmp_path):
    start = header([pair("a", STRING, struct.pack("<Q", 1 << 30))], data=b"")
    with (tmp_path / "m.gguf").open("wb") as file:
        file.write(start)
        file.truncate(2 << 30)
    assert "more than any model's" in refusal(lambda: open_gguf(tmp_path / "m.gguf"))


def test_what_the_package_writes_is_read_as_it_reads_it(model):
    """The reader of the `gguf` package is the measure, wherever a file is whole."""
    theirs = gguf.GGUFReader(model)
    metadata, tensors = open_gguf(model)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert metadata == fields
    assert list(tensors) == [entry.name for entry in theirs.tensors]
    for entry in theirs.tensors:
        found = tensors[entry.name]
        assert found.shape == tuple(reversed(entry.shape.tolist()))
        np.testing.assert_array_equal(found.read(), gguf.quants.dequantize(entry.data, entry.tensor_type))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A whole target with a tokenizer, every kind of metadata, and two quantisations."""
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "W", "W"]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 5 + [-1.0, -2.0, -3.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for kind in ("uint8", "int8", "uint16", "int16", "int32", "uint64", "int64", "float64"):
        getattr(writer, f"add_{kind}")(f"some.{kind}", 7)
    writer.add_bool("some.bool", True)
    writer.add_array("some.bools", [True, False])
    writer.add_array("some.floats", [1.5, -2.5])
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (8, 32), "output_norm": (32,), "output": (8, 32)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
    for name, shape in shapes.items():
        data = rng.normal(size=shape).astype(np.float32)
        if name.startswith("blk.0.ffn_") and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    load_target(file)
    return file


def weights_start(model):
    return min(tensor.data_offset for tensor in gguf.GGUFReader(model).tensors)


def test_a_gguf_cut_anywhere_is_refused(model, tmp_path):
    data, end = model.read_bytes(), weights_start(model)
    for size in [*range(0, end, 3), *range(end, len(data), 997), len(data) - 1]:
        (tmp_path / "m.gguf").write_bytes(data[:size])
        assert refusal(lambda: open_gguf(tmp_path / "m.gguf")), f"{size} of {len(data)} bytes were accepted"


def test_a_gguf_with_zeros_for_its_header_is_refused(model, tmp_path):
    data = model.read_bytes()
    for start in range(0, weights_start(model), 64):
        (tmp_path / "m.gguf").write_bytes(data[:start] + bytes(64) + data[start + 64 :])
        refusal(lambda: load_target(tmp_path / "m.gguf"))


@given(st.data())
def test_fuzz_a_gguf_with_changed_bytes_is_read_or_refused(model, tmp_path_factory, data):
    whole = bytearray(model.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, weights_start(model) - 1))
        change = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=9),
                st.sampled_from([struct.pack("<Q", size) for size in [0, 1, *HUGE]]),
                st.sampled_from([b"\xff" * 4, bytes(8), b"\x09\0\0\0", b"\x08\0\0\0"]),
            )
        )
        whole[at : at + len(change)] = change
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole))) :]
    file = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    file.write_bytes(whole)
    refusal(lambda: load_target(file))


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from([10**9, -1, 2**63])
    ),
    lambda inner: st.lists(inner, max_size=9),
    max_leaves=20,
)
KEYS = ["tokens", "scores", "token_type", "merges", "model", "pre", "bos_token_id", "eos_token_id", "padding_token_id"]
KEYS += ["unknown_token_id", "add_bos_token", "add_space_prefix"]


@given(st.sampled_from(["gpt2", "llama"]), st.dictionaries(st.sampled_from(KEYS), values, max_size=3), values)
def test_fuzz_a_tokenizers_metadata_is_read_or_refused(kind, changes, template):
    fields = {"model": kind, "pre": "gpt-2", "tokens": ["a", "b", "ab", "W", "W", ""], "scores": [0.0] * 6}
    fields |= {"merges": ["a b"], "token_type": [1, 1, 1, 1, 3, 4], "bos_token_id": 4, "eos_token_id": 3}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items()}
    metadata["tokenizer.chat_template"] = template
    refusal(lambda: read_tokenizer(metadata, "m.gguf"))
