"""What a program may submit: any layout, any byte order, torch tensors as they are; never a pickled object."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedpool.client.training import Round
from fedpool.errors import UsageError
from fedpool.federation import parameters
from fedpool.wire.messages import Joined, NextRound


class Site:
    """Stands where the connection to the site's agent would."""

    def __init__(self):
        self.calls = []

    def call(self, method, body, expect, timeout_s=None):
        self.calls.append((method, body))
        return expect()


class Tensor:
    """As much of a torch tensor as the client touches."""

    def __init__(self, array, dtype="torch.float32"):
        self.array, self.dtype = array, dtype

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Tensor(self.array.astype(np.float32))

    def numpy(self):
        assert self.dtype != "torch.bfloat16", "numpy knows no bf16"
        return self.array


@pytest.fixture
def offered(tmp_path):
    def offer(tensors=None, raw=None):
        path = tmp_path / "global.safetensors"
        if raw is None:
            save_file(tensors, path)
        else:
            path.write_bytes(raw)
        site = Site()
        return Round(
            site, Joined("zurich", "r", {"rate": 0.5}), NextRound(3, str(path), str(tmp_path / "u" / "update"))
        ), site

    return offer


def test_parameters_are_private_to_the_program(offered, tmp_path):
    round_, _ = offered({"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    round_.params["w"][0, 0] = 99
    assert load_file(tmp_path / "global.safetensors")["w"][0, 0] == 0
    assert (round_.number, round_.site, round_.config) == (3, "zurich", {"rate": 0.5})


def test_any_layout_arrives_in_c_order(offered, tmp_path):
    round_, site = offered({"w": np.zeros((2, 3), np.float32), "n": np.array(7, np.int64)})
    value = np.arange(6, dtype=">f4").reshape(3, 2).T
    round_.submit({"w": value, "n": np.array(8, np.int64)}, weight=5, metrics={"auc": np.float32(0.5)})
    back = load_file(tmp_path / "u" / "update")
    assert np.array_equal(back["w"], [[0, 2, 4], [1, 3, 5]]) and back["n"].shape == ()
    [(method, body)] = site.calls
    assert (method, body.round, body.weight, body.metrics) == ("program.submit", 3, 5, {"auc": 0.5})
    assert round_.is_submitted


def test_torch_tensors_as_they_are(offered, tmp_path):
    round_, _ = offered({"w": np.zeros(3, np.float32)})
    round_.submit({"w": Tensor(np.array([1, 2, 3], np.float32))}, weight=1)
    assert load_file(tmp_path / "u" / "update")["w"].tolist() == [1, 2, 3]


def test_bf16_comes_as_float32_and_goes_back_as_bf16(offered, tmp_path):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    raw = len(header).to_bytes(8, "little") + header + bytes.fromhex("803f20c0")
    round_, _ = offered(raw=raw)
    assert round_.params["w"].tolist() == [1.0, -2.5]
    round_.submit({"w": Tensor(round_.params["w"], "torch.bfloat16")}, weight=1)
    written = np.frombuffer((tmp_path / "u" / "update").read_bytes(), np.uint8)
    [tensor] = parameters.layout(written, "it").tensors
    assert (tensor.dtype, written[tensor.start : tensor.stop].tobytes().hex()) == ("BF16", "803f20c0")


def test_objects_and_fractional_weights_are_refused(offered):
    round_, site = offered({"w": np.zeros(1, np.float32)})
    with pytest.raises(UsageError, match="'w' is an array of objects"):
        round_.submit({"w": np.array([{}], dtype=object)}, weight=1)
    with pytest.raises(UsageError, match="no whole number"):
        round_.submit({"w": np.zeros(1, np.float32)}, weight=1.5)
    assert site.calls == [] and not round_.is_submitted
