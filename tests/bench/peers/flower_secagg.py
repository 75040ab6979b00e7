"""Time the masking step of Flower's SecAgg+ client on one core: the peer to beat, side by side.

    make peers        # flwr 1.42.0 in a virtual environment of its own, never in the project's
    .venv-peers/flower/bin/python tests/bench/peers/flower_secagg.py --parameters 10000000 --neighbours 8

Prints one JSON line: seconds for the client's step (scale by weight, quantise, own mask, pairwise masks, modulus),
megabytes of float32 parameters per second, and bytes uploaded per parameter.
The key agreement is left out on both sides: it costs milliseconds, whatever the model's size.
"""

import argparse
import json
import os
import time

import numpy as np
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_combine,
    parameters_addition,
    parameters_mod,
    parameters_multiply,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

CLIPPING_RANGE = 8.0  # the defaults of flwr.server.workflow.SecAggPlusWorkflow
TARGET_RANGE = 1 << 22
MOD_RANGE = 1 << 32


def mask(parameters, seeds, weight_ratio=0.5):
    """One client's masked vector as Flower computes it: own mask first, then one mask per neighbour."""
    q_ratio = round(weight_ratio * TARGET_RANGE)
    scaled = parameters_multiply(parameters, q_ratio / TARGET_RANGE)
    vector = factor_combine(q_ratio, quantize(scaled, CLIPPING_RANGE, TARGET_RANGE))
    shapes = [a.shape for a in vector]
    vector = parameters_addition(vector, pseudo_rand_gen(seeds[0], MOD_RANGE, shapes))
    for i, seed in enumerate(seeds[1:]):
        pairwise = pseudo_rand_gen(seed, MOD_RANGE, shapes)
        vector = (parameters_addition if i % 2 else parameters_subtraction)(vector, pairwise)
    return parameters_mod(vector, MOD_RANGE)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--parameters", type=int, default=10_000_000)
    args.add_argument("--neighbours", type=int, default=8)
    args.add_argument("--repeat", type=int, default=3)
    a = args.parse_args()
    model = [np.random.default_rng(0).standard_normal(a.parameters, dtype=np.float32)]
    seeds = [os.urandom(32) for _ in range(a.neighbours + 1)]
    seconds = []
    for _ in range(a.repeat):
        start = time.perf_counter()
        masked = mask(model, seeds)
        seconds.append(time.perf_counter() - start)
    best = sorted(seconds)[len(seconds) // 2]
    print(
        json.dumps(
            {
                "peer": "flower SecAgg+",
                "parameters": a.parameters,
                "neighbours": a.neighbours,
                "seconds": round(best, 4),
                "MB_per_s": round(a.parameters * 4 / best / 1e6, 2),
                "bytes_per_parameter": masked[1].dtype.itemsize,
            }
        )
    )


if __name__ == "__main__":
    main()
