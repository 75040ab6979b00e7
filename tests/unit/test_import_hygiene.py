"""The listing path stays light, and the deciding parts do no input or output: shown on `sys.modules` of a fresh process."""

import subprocess
import sys

import pytest

HEAVY = ("asyncssh", "textual", "numpy", "sklearn", "cryptography")


def loaded(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_the_listing_path_loads_nothing_heavy():
    modules = loaded("import ibshell.cli, ibshell.cli.gpu, ibshell.cli.lease, ibshell.cli.site, ibshell.cli.pool")
    assert not modules & set(HEAVY)


def test_the_version_loads_no_command():
    modules = loaded("import sys; sys.argv = ['ibshell', '--version']\nfrom ibshell.__main__ import main\nmain()")
    assert not modules & {*HEAVY, "typer"}


@pytest.mark.parametrize("package", ["wire", "leasing", "placement"])
def test_what_decides_loads_no_transport(package):
    modules = loaded(
        "import importlib, pkgutil\n"
        f"for m in pkgutil.iter_modules(importlib.import_module('fedpool.{package}').__path__):\n"
        f"    importlib.import_module('fedpool.{package}.' + m.name)"
    )
    assert not modules & {"asyncssh", "sqlite3", "fedpool.transport"}
