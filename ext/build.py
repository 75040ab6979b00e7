"""Compile every ext/**/*.pyx into the module of the same dotted name.

IBSHELL_EXT_CHECKED=1 turns all run-time checks on (a build of its own, for tests).
Where no C compiler is at hand nothing is built and every module's pure reference serves, slower: that is said, never hidden.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext as _build_ext

ROOT = Path(__file__).resolve().parent
# No -march=native: a wheel must run elsewhere. No fused multiply-add: kernel and reference agree to the bit on every CPU.
RELEASE = ["-O3", "-ffp-contract=off", "-Wall"]
CHECKED = ["-O0", "-g", "-UNDEBUG"]


def _dotted_name(source: Path) -> str:
    return ".".join(source.relative_to(ROOT).with_suffix("").parts)


def missing_for_compiling() -> str | None:
    """Name what is missing for a compiled build, or None."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"a C compiler ({compiler}); Debian and Ubuntu: apt-get install gcc"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the Python headers; Debian and Ubuntu: apt-get install python3-dev"
    return None


class build_ext(_build_ext):
    def finalize_options(self):
        missing = missing_for_compiling()
        if missing:
            print(f"ibshell: not compiling, {missing}. The pure reference serves, slower.", file=sys.stderr)
            self.distribution.ext_modules = []
            super().finalize_options()
            return
        from Cython.Build import cythonize

        checked = os.environ.get("IBSHELL_EXT_CHECKED") == "1"
        flags = CHECKED if checked else RELEASE
        sources = sorted(ROOT.rglob("*.pyx"))
        self.distribution.ext_modules = cythonize(
            [
                Extension(
                    _dotted_name(source),
                    [os.path.relpath(source)],
                    include_dirs=[os.path.relpath(source.parent)],
                    extra_compile_args=flags,
                )
                for source in sources
            ],
            include_path=[str(ROOT)],
            build_dir="build/cython-checked" if checked else "build/cython",
            force=True,  # cythonize compares times, not directives: a checked build would stay unchecked
            annotate=checked,
            compiler_directives={
                "language_level": 3,
                "boundscheck": checked,
                "wraparound": checked,
                "initializedcheck": checked,
                "cdivision": not checked,
                "freethreading_compatible": True,
            },
        )
        super().finalize_options()
        self.force = True
