"""A model's file as one vector: order, types, mismatches named, tensors that are not averaged left alone."""

import json

import numpy as np
import pytest
from safetensors.numpy import save

from fedpool.errors import UsageError
from fedpool.federation import parameters


def file(tensors):
    return np.frombuffer(save(tensors), np.uint8)


def raw_file(header, data=b""):
    text = json.dumps(header).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text + data, np.uint8)


MODEL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}


def test_a_float32_file_is_a_view():
    mapped = file(MODEL)
    vector = parameters.gather(parameters.layout(mapped, "m"), mapped, "m")
    assert vector.base is not None and len(vector) == 8
    assert sorted(vector.tolist()) == sorted([0, 1, 2, 3, 4, 5, 1, 1])


def test_half_and_double_precision_come_as_float32_and_go_back():
    mapped = file({"h": np.array([1.5, -2.0], np.float16), "d": np.array([0.1], np.float64)})
    layout = parameters.layout(mapped, "m")
    vector = parameters.gather(layout, mapped, "m")
    out = mapped.copy()
    parameters.Values(layout, out, "m").write(0, vector * 2)
    again = parameters.gather(layout, out, "m")
    assert np.array_equal(again, (vector * 2).astype(np.float32))


def test_bf16_loads_and_is_written_back_bit_identical():
    data = bytes.fromhex("803f20c049408 07f".replace(" ", ""))
    mapped = raw_file({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}, data)
    layout = parameters.layout(mapped, "m")
    vector = parameters.gather(layout, mapped, "m")
    assert vector.tolist() == [1.0, -2.5, 3.140625, float("inf")]
    out = mapped.copy()
    parameters.Values(layout, out, "m").write(0, vector)
    assert out.tobytes() == mapped.tobytes()


def test_counters_empty_tensors_and_scalars():
    mapped = file(
        {
            "scaled_fp8": np.zeros(0, np.float32),
            "w": np.zeros((2, 0), np.float32),
            "b": np.array([1, 2], np.float32),
            "s": np.array(7, np.int64),
        }
    )
    layout = parameters.layout(mapped, "m")
    assert layout.parameters == 2
    out = mapped.copy()
    parameters.Values(layout, out, "m").write(0, np.array([3, 4], np.float32))
    shapes = {t.name: (t.shape, t.dtype) for t in parameters.layout(out, "m").tensors}
    assert shapes["s"] == ((), "I64") and shapes["w"] == ((2, 0), "F32")
    s = next(t for t in layout.tensors if t.name == "s")
    assert out[s.start : s.stop].view("<i8")[0] == 7


def test_fp8_is_refused_with_tensor_and_type():
    mapped = raw_file({"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, b"\0")
    with pytest.raises(UsageError, match="'w' has type F8_E4M3"):
        parameters.layout(mapped, "m")


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ({"w": MODEL["w"]}, "'b' is missing"),
        ({**MODEL, "old.w": np.zeros(1, np.float32)}, "'old.w' is not in the global parameters"),
        ({**MODEL, "w": MODEL["w"].T.copy()}, r"'w' has shape \[3, 2\], \[2, 3\] expected"),
        ({**MODEL, "b": np.ones(2, np.float16)}, "'b' has type F16, F32 expected"),
    ],
)
def test_mismatches_are_named_and_never_broadcast(update, says):
    mapped = file(MODEL)
    with pytest.raises(UsageError, match=says):
        parameters.gather(parameters.layout(mapped, "m"), file(update), "the update")


def test_a_value_is_named_as_people_write_it():
    layout = parameters.layout(file(MODEL), "m")
    names = {parameters.name_of(layout, i) for i in range(8)}
    assert names == {"b[0]", "b[1]"} | {f"w[{i}, {j}]" for i in range(2) for j in range(3)}


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}"[:9], b"\x02\0\0\0\0\0\0\0[]"])
def test_damaged_files_are_refused(data):
    with pytest.raises(UsageError, match="no safetensors file"):
        parameters.layout(np.frombuffer(data, np.uint8), "it")


def test_a_tensor_beyond_the_file_is_refused():
    with pytest.raises(UsageError, match="does not fit"):
        parameters.layout(raw_file({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 8), "it")
