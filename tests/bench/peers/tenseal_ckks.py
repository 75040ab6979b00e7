"""Time encrypted aggregation as NVIDIA FLARE's homomorphic-encryption filter does it (TenSEAL, CKKS): a peer, side by side.

    make peers        # tenseal in a virtual environment of its own, never in the project's
    .venv-peers/tenseal/bin/python tests/bench/peers/tenseal_ckks.py --parameters 1000000 --sites 8

Prints one JSON line: seconds to encrypt at one site on the cores it may use, to add all sites' ciphertexts and to decrypt,
and bytes uploaded per parameter. Every step walks over the parameters in blocks of 4,096, so its time is proportional to them.
"""

import argparse
import json
import time

import numpy as np
import tenseal as ts

SLOTS = 4096  # of a ciphertext with polynomials of degree 8192
COEFFICIENT_BITS = [60, 40, 40]  # the filter's defaults, as is the scale of 2^40


def timed(work):
    """What the work returns, and the seconds it took."""
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--parameters", type=int, default=1_000_000)
    args.add_argument("--sites", type=int, default=8)
    args.add_argument("--threads", type=int, default=1)
    a = args.parse_args()
    context = ts.context(
        ts.SCHEME_TYPE.CKKS,
        poly_modulus_degree=2 * SLOTS,
        coeff_mod_bit_sizes=COEFFICIENT_BITS,
        n_threads=a.threads,
    )
    context.global_scale = 2**40
    model = np.random.default_rng(0).standard_normal(a.parameters)
    starts = range(0, model.size, SLOTS)
    blocks, encrypt = timed(lambda: [ts.ckks_vector(context, model[i : i + SLOTS]) for i in starts])
    uploaded = sum(len(block.serialize()) for block in blocks)

    def added():
        total = list(blocks)
        for _ in range(a.sites - 1):
            total = [x + y for x, y in zip(total, blocks, strict=True)]
        return total

    total, add = timed(added)
    out, decrypt = timed(lambda: np.concatenate([block.decrypt() for block in total]))
    if not np.allclose(out, model * a.sites, atol=1e-3):
        raise SystemExit("the decrypted sum is wrong")
    print(
        json.dumps(
            {
                "peer": "TenSEAL CKKS",
                "parameters": a.parameters,
                "encrypt_s": round(encrypt, 4),
                "add_s": round(add, 4),
                "decrypt_s": round(decrypt, 4),
                "bytes_per_parameter": round(uploaded / a.parameters, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
