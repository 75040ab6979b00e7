#!/bin/sh
# Say exactly what is missing before a long installation fails half-way. A compiler is a wish, not a need.
python="${1:-python3}"
stop() { echo "ibshell: $1" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 || stop "python3 is missing. Debian and Ubuntu: apt-get install python3 python3-venv python3-dev"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  stop "$("$python" --version) is too old; 3.11 or newer is needed. Name another one with make PYTHON=/path/to/python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  stop "the venv module is missing. Debian and Ubuntu: apt-get install python3-venv"
"$python" - <<'END'
import os, shutil, sys, sysconfig
compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
missing = []
if shutil.which(compiler) is None:
    missing.append("gcc")
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    missing.append("python3-dev")
if missing:
    print(f"ibshell: no compiled kernels without {' and '.join(missing)}: the pure reference serves, slower. "
          f"Debian and Ubuntu: apt-get install {' '.join(missing)}, then make clean", file=sys.stderr)
END
