"""What broke other people's aggregation: files as they came, with the value that is right."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedpool.client.training import Round
from fedpool.errors import UsageError
from fedpool.federation import parameters, plan
from fedpool.federation.strategies import FedAdam
from fedpool.secagg import encoding, masks, ring
from fedpool.wire.messages import Joined, NextRound


def file(header, data):
    """The bytes of a safetensors file."""
    text = json.dumps(header).encode()
    return np.frombuffer(len(text).to_bytes(8, "little") + text + data, np.uint8)


def tensor(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


FP8 = {"w": tensor("F8_E4M3", [4], 0, 4), "w_scale_inv": tensor("F32", [1, 1], 4, 8)}
FP8_DATA = bytes.fromhex("38b07e01") + np.float32(2.0).tobytes()


class Site:
    """Stands where the connection to the site's agent would."""

    def call(self, method, body, expect, timeout_s=None):
        return expect()


def offered(path, raw=None, tensors=None):
    """A round whose global parameters are these, and where its update will lie."""
    path.mkdir()
    if raw is None:
        save_file(tensors, path / "global")
    else:
        (path / "global").write_bytes(raw.tobytes())
    update = path / "update"
    return Round(Site(), Joined("zurich", "r", {}), NextRound(1, str(path / "global"), str(update))), update


def test_codes_without_their_scale_are_never_averaged():
    with pytest.raises(UsageError, match=r"'w' has type F8_E4M3.*dequantise it.*exclude = \[\"w\"\]"):
        parameters.layout(file(FP8, FP8_DATA), "the model")


def test_a_type_nobody_knows_is_named():
    unknown = file({"s": tensor("F8_E8M0", [2], 0, 2), "b": tensor("F32", [1], 2, 6)}, bytes(6))
    with pytest.raises(UsageError, match=r"'s' has type F8_E8M0"):
        parameters.layout(unknown, "the model")
    found = parameters.layout(unknown, "the model", ["s"])
    assert [(t.name, t.offset) for t in found.tensors] == [("s", -1), ("b", 0)] and found.parameters == 1


def test_excluded_codes_go_through_untouched(tmp_path):
    """The program never sees them, its update need not hold them, and the next model has their bytes."""
    raw = file(FP8, FP8_DATA)
    round_, update = offered(tmp_path / "fp8", raw)
    assert list(round_.params) == ["w_scale_inv"]
    round_.submit({"w_scale_inv": np.full((1, 1), 3, np.float32)}, 1)
    layout, out = parameters.layout(raw, "the model", ["w"]), raw.copy()
    given = np.frombuffer(update.read_bytes(), np.uint8)
    vector = parameters.gather(layout, given, "the update")
    parameters.Values(layout, out, "the model").write(0, vector)
    assert out[-8:-4].tobytes() == FP8_DATA[:4] and vector.tolist() == [3.0]


def test_empty_tensors_add_nothing_and_stay(tmp_path):
    header = {
        "scaled_fp8": tensor("F8_E4M3", [0], 0, 0), "w": tensor("F32", [2, 0], 0, 0),
        "b": tensor("F32", [2], 0, 8), "s": tensor("I64", [], 8, 16),
    }  # fmt: skip
    raw = file(header, np.array([1, 2], "<f4").tobytes() + np.int64(7).tobytes())
    layout = parameters.layout(raw, "the model")
    assert layout.parameters == 2
    updates = []
    for site in ("a", "b"):
        round_, update = offered(tmp_path / site, raw)
        round_.submit(dict(round_.params), 1)
        updates.append(parameters.gather(layout, np.frombuffer(update.read_bytes(), np.uint8), site))
    out = raw.copy()
    parameters.Values(layout, out, "the model").write(0, np.mean(updates, axis=0, dtype=np.float32))
    assert out.tobytes() == raw.tobytes(), "names, shapes, types and the counter as they were; b = [1, 2]"


def test_an_empty_tensor_that_claims_bytes_is_refused():
    with pytest.raises(UsageError, match=r"does not fit"):
        parameters.layout(file({"e": tensor("F8_E4M3", [0], 0, 4)}, bytes(4)), "the model")


def test_counters_keep_their_global_value_and_variances_are_averaged():
    """Weights 1:3, counters 100 and 301: never 250.75, never shape [0]. Variances 1 and 2: 1.75."""
    header = {"bn.num_batches_tracked": tensor("I64", [], 0, 8), "bn.running_var": tensor("F32", [1], 8, 12)}
    a, b = (
        file(header, np.int64(count).tobytes() + np.float32(variance).tobytes())
        for count, variance in ((100, 1), (301, 2))
    )
    layout = parameters.layout(a, "the model")
    fixed, r, words = encoding.fit(4.0, 3, 2), ring.of(32), ring.of(32).zeros(1)
    for raw, weight in ((a, 1), (b, 3)):
        difference = parameters.gather(layout, raw, "it") - parameters.gather(layout, a, "it")
        masks.mask(difference, None, fixed.clip, fixed.factor(weight), bytes(32), (), 0, words)
    out, mean = a.copy(), np.empty(1, np.float32)
    masks.decode(r, words, parameters.gather(layout, a, "it"), fixed.unit() / 4, mean)
    parameters.Values(layout, out, "the model").write(0, mean)
    assert mean[0] == pytest.approx(1.75, abs=1e-6)
    counter = next(t for t in parameters.layout(out, "the model").tensors if t.dtype == "I64")
    assert counter.shape == () and out[counter.start : counter.stop].view("<i8")[0] == 100


def test_a_server_s_optimiser_does_not_move_running_statistics():
    """They are told apart by name, or by the plan; what a step does to them makes a variance negative."""
    names = ("bn.running_mean", "bn.running_var", "ema.decay", "w")
    raw = file({n: tensor("F32", [1], 4 * i, 4 * i + 4) for i, n in enumerate(names)}, bytes(16))
    layout = parameters.layout(raw, "the model")
    places = parameters.buffers(layout, ["ema.*"])
    assert [(p.start, p.stop) for p in places] == [(0, 1), (1, 2), (2, 3)]
    slots = [np.zeros(1, np.float32) for _ in range(FedAdam.slots)]
    moved = FedAdam(eta=1.0).apply(np.array([0.01], np.float32), np.array([-0.005], np.float32), slots, 1)
    assert moved[0] < 0, "which is what would happen to a variance"


def test_key_sets_that_differ_are_named_and_never_met_in_the_middle():
    model = {"fc.weight": tensor("F32", [1, 2], 0, 8), "fc.bias": tensor("F32", [1], 8, 12)}
    layout = parameters.layout(file(model, bytes(12)), "the model")
    b = file({"fc.weight": model["fc.weight"]}, bytes(8))
    c = file(
        {"fc.weight": tensor("F32", [2, 1], 0, 8), "fc.bias": model["fc.bias"], "old.w": tensor("F32", [1], 12, 16)},
        bytes(16),
    )
    with pytest.raises(UsageError, match=r"'fc.bias' is missing"):
        parameters.gather(layout, b, "the update")
    with pytest.raises(UsageError) as refused:
        parameters.gather(layout, c, "the update")
    assert "'fc.weight' has shape [2, 1], [1, 2] expected" in refused.value.message
    assert "'old.w' is not in the global parameters" in refused.value.message


@pytest.mark.parametrize(
    ("levels", "weight", "sites", "needs"),
    [(8192, 60_000, 7, 32), (8192, 60_000, 10, 33), (8192, 131_072, 3, 32), (8192, 131_072, 5, 33)],
)
def test_bits_are_counted_before_the_round(levels, weight, sites, needs):
    assert (
        encoding.bits_needed(levels, weight, sites) == needs == math.ceil(math.log2((levels - 1) * weight * sites + 1))
    )
    text = 'name = "n"\ntenant = "t"\nprogram = ["p"]\ninitial = "i"\nrounds = 1\n'
    text += f"sites = {sites}\nlevels = {levels}\nmax_weight = {weight}\nminimum_cohort = 2\n"
    if needs <= 32:
        plan.parse(text)
    else:
        with pytest.raises(UsageError, match=rf"need {needs} bits; the ring has 32.*ring_bits = 64"):
            plan.parse(text)
        plan.parse(text + "ring_bits = 64\n")


@pytest.mark.parametrize("sites", [2, 3, 4, 5, 7, 10, 50])
@pytest.mark.parametrize("bits", ring.WIDTHS)
def test_the_largest_updates_of_all_never_wrap_around(sites, bits):
    """Every site at its range and at the largest weight: the mean is the range, whatever the number of sites."""
    fixed, r = encoding.fit(0.7, 60_000, sites, bits), ring.of(bits)
    for sign in (1, -1):
        words, mean = r.zeros(3), np.empty(3, np.float32)
        for site in range(sites):
            masks.mask(
                np.full(3, 9.0 * sign, np.float32), None, 0.7, fixed.factor(60_000), bytes([site]) * 32, (), 0, words
            )
        masks.decode(r, words, None, fixed.unit() / (60_000 * sites), mean)
        assert mean == pytest.approx(np.full(3, 0.7 * sign), abs=fixed.mean_error_bound(60_000 * sites) + 1e-6)


def test_any_order_in_memory_is_one_order_in_the_file(tmp_path):
    values = {"f": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)), "be": np.array([1, 2], ">f4")}
    round_, update = offered(tmp_path / "o", tensors={"f": np.zeros((2, 3), np.float32), "be": np.zeros(2, np.float32)})
    round_.submit(values, 1)
    written = load_file(update)
    assert written["f"].ravel().tolist() == [0, 1, 2, 3, 4, 5] and written["be"].tolist() == [1, 2]
    with pytest.raises(UsageError, match=r"'f' is an array of objects.*nothing is pickled"):
        round_.submit({**values, "f": np.array([{}, 1], object)}, 1)


def test_tied_weights_count_once(tmp_path):
    """The model has its storage once; a program's state names it twice, as torch's does."""
    embedding = np.arange(6, dtype=np.float32).reshape(2, 3)
    round_, update = offered(tmp_path / "t", tensors={"emb.weight": np.zeros((2, 3), np.float32)})
    round_.submit({"emb.weight": embedding, "head.weight": embedding}, 1)
    raw = np.frombuffer(update.read_bytes(), np.uint8)
    assert parameters.layout(raw, "it").parameters == 6
    for untied in (embedding.copy(), embedding.T, embedding[1]):
        round_.submit({"emb.weight": embedding, "head.weight": untied}, 1)
        reference = parameters.layout(np.frombuffer((tmp_path / "t" / "global").read_bytes(), np.uint8), "the model")
        with pytest.raises(UsageError, match=r"'head.weight' is not in the global parameters"):
            parameters.gather(reference, np.frombuffer(update.read_bytes(), np.uint8), "the update")
