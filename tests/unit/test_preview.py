"""What a plan's rounds will be like, said before anything is leased."""

import numpy as np
import pytest
from safetensors.numpy import save

from fedpool.federation import parameters, plan
from fedpool.federation.preview import preview
from fedpool.secagg import graph


def seen(sites, **more):
    lines = [f"{key} = {value}" for key, value in more.items()]
    text = 'name = "n"\ntenant = "t"\nprogram = ["p"]\ninitial = "i"\nrounds = 1\n'
    parsed = plan.parse("\n".join([text, f"sites = {sites}", *lines]))
    tensors = {"w": np.zeros((30, 5), np.float32), "head": np.zeros(10, np.float16), "steps": np.zeros((), np.int64)}
    file = np.frombuffer(save(tensors), np.uint8)
    return preview(parsed, parameters.layout(file, "the model", parsed.exclude)), file


def test_a_small_cohort_is_complete():
    found, file = seen(16, metrics='["loss"]')
    assert (found.graph, found.neighbours, found.share_threshold, found.threshold) == ("complete", 15, 11, 11)
    assert found.corrupted == round(5 / 16, 3), "six could have two lists of survivors signed"
    assert (found.parameters, found.kept, found.download_bytes) == (160, ("steps",), len(file))
    assert found.upload_bytes == 160 * 4 + 3 * 8
    assert found.secrecy_bits is None


@pytest.mark.parametrize("sites", [33, 100, 1000])
def test_a_large_one_is_as_sparse_as_the_bounds_allow(sites):
    found, _ = seen(sites)
    assert found.graph == "sparse" and found.neighbours < sites - 1
    tight = graph.bounds(sites, found.neighbours, found.share_threshold)
    assert min(tight.secrecy_bits, tight.connection_bits) >= 40 and tight.completeness_bits >= 20
    for threshold in range((found.neighbours - 2) // 2, found.neighbours - 1):
        less = graph.bounds(sites, found.neighbours - 2, threshold)
        assert min(less.secrecy_bits, less.connection_bits, less.completeness_bits + 20) < 40


def test_narrow_rings_cost_steps():
    wide, narrow = seen(4)[0].ranges[0], seen(4, ring_bits=16, max_weight=10)[0].ranges[0]
    assert wide.step == 2.0**-28 and narrow.step == 2.0**-12
    assert narrow.levels == 2 * 2**12 // 10 + 1
    assert narrow.error_bound == narrow.step


def test_ranges_are_shown_apart():
    found = seen(4, ranges='{"head" = 0.1}')[0]
    assert sorted((part.values, part.clip) for part in found.ranges) == [(10, 0.1), (150, 1.0)]
