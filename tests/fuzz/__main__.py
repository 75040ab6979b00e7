"""`make fuzz`: atheris (coverage-guided, libFuzzer) on every parser in turn, or on one: `make fuzz SECONDS=600 PARSER=plan`.

A child process a parser; one that crashes leaves `crash-…` with the input, and the target fails.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

RSS_MB_MAX = 256
INPUT_BYTES_MAX = 4096


def one(name, seconds):
    """Fuzz one parser in this process."""
    import atheris

    with atheris.instrument_imports(include=["fedpool", "ibshell"]):
        from fuzz import parsers

    corpus = Path(tempfile.mkdtemp(prefix="ibshell-fuzz-"))
    for number, seed in enumerate(parsers.SEEDS.get(name, [])):
        (corpus / str(number)).write_bytes(seed)
    limits = [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}", "-timeout=10", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], lambda data: parsers.feed(name, data))
    atheris.Fuzz()


def main(seconds, only):
    """Fuzz them all; returns how many crashed."""
    from fuzz import parsers

    failed = 0
    for name in [only] if only else parsers.PARSERS:
        done = subprocess.run([sys.executable, "-m", "fuzz", "--one", name, str(seconds)])
        print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
