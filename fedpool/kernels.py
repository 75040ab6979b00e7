"""Which of two twins serves: a compiled kernel of `ext/`, or its pure reference where there is none."""

import importlib
import os
from types import ModuleType


def chosen(reference: ModuleType) -> ModuleType:
    """The compiled twin of `X._name_reference`, which is `X._name`; the reference where it was not compiled or is not wanted."""
    if os.environ.get("IBSHELL_NO_EXTENSIONS") == "1":
        return reference
    try:
        return importlib.import_module(reference.__name__.removesuffix("_reference"))
    except ImportError:  # no compiler when it was installed; `ibshell doctor` says so
        return reference
