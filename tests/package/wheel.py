"""The wheel, built from the source distribution, alone: installed with what it declares and nothing else, it runs the demo.

`make package` runs it. It has a target of its own because installing takes as long as a sixth of all other tests.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from integration.test_demo import agents, check_report

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_wheel_alone_runs_the_demo(tmp_path):
    """Built from the source distribution, installed where no source tree is in sight."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=170, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    names = subprocess.run([sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True).stdout
    assert "fedpool/secagg/_masks" in names and "tests/" not in names and "ext/" not in names
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    done = subprocess.run([*pip, f"{wheel}[demo]"], capture_output=True, text=True, timeout=170, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    compiled = "from fedpool.secagg import masks; print(masks.is_compiled())"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    out = subprocess.run([python, "-c", compiled], capture_output=True, text=True, cwd=tmp_path, env=environment).stdout
    assert out.strip() == "True"
    done = subprocess.run(
        [home / "bin/ibshell", "demo"], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=170
    )
    assert done.returncode == 0, done.stderr
    check_report(json.loads((tmp_path / "demo-report.json").read_text()))
    assert "the federation" in done.stdout and "round 8/24: 15 sites, without hospital-06" in done.stderr
    assert agents() == []
