"""The demo: its report and its cleanliness."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def agents():
    """Processes of demo pools."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if b"agent.main" in line and b"ibshell-demo-" in line:
            found.append(path.parent.name)
    return found


def check_report(report):
    for measure in ("accuracy", "auc"):
        scores = report[measure]
        assert set(scores) == {"pooled", "federated", "single_mean", "single_worst", "single_best"}
        assert 0.5 < scores["single_worst"] <= scores["single_mean"] <= scores["single_best"] <= 1
        assert scores["federated"] > scores["single_mean"], "together they do better than alone"
    assert abs(report["auc"]["federated"] - report["auc"]["pooled"]) < 0.02
    assert (report["sites"], report["gpus"], report["rounds"]) == (16, 32, 24)
    assert report["dropout"]["round"] == 8 and report["dropout"]["survivors"] == 15
    assert report["dropout"]["back_in_round"] is not None
    assert report["leases_open_at_end"] == 0 and report["devices_free_at_end"] == 32
    assert report["ledger_verified"] is None
    assert report["bytes_up_per_site"] > 0 and report["bytes_down_per_site"] > 0
    assert 0 < report["seconds_per_round"] < report["seconds_total"]
    sample = report["hub_view_sample"]
    assert len(sample["hub_sees_words"]) == len(sample["true_update"]) == 8
    assert max(sample["hub_sees_words"]) > 1 << 28, "a masked word looks like any number"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_demo_its_processes_end_too(tmp_path, number):
    demo = subprocess.Popen(
        [sys.executable, "-m", "ibshell", "demo"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in demo.stderr:
        if line.startswith("round 2/"):
            break
    assert agents()
    demo.send_signal(number)
    demo.stderr.read()
    demo.stderr.close()
    assert demo.wait(timeout=30) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    deadline = time.monotonic() + 10
    while agents() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert agents() == []


def test_without_a_compiler_the_pure_reference_serves(tmp_path):
    """The wheel builds all the same, says so, and a round's arithmetic is right."""
    environment = {**os.environ, "CC": "no-such-compiler"}
    copy = tmp_path / "source"
    tree = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tree:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True, env=environment, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not compiling, a C compiler (no-such-compiler)" in done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path / "installed"),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    assert not list((tmp_path / "installed").rglob("_masks*.so"))
    code = (
        "import numpy as np\nfrom fedpool.secagg import masks\nassert not masks.is_compiled(), masks.__file__\n"
        "w = np.arange(9, dtype=np.uint32)\nmasks.apply(w, [masks.Stream(bytes(32), 1), masks.Stream(bytes(32), -1)], 4)\n"
        "assert w.tolist() == list(range(9))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path / "installed",
        env={**environment, "PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
