"""Runs tests on the native core that ``make test-native`` built with AddressSanitizer and UBSan.

    python .ci/sanitized.py FOLDER [pytest arguments]    (FOLDER has fxpar/_native*.so)

Takes the place of the installed extension in this process only. AddressSanitizer has to be loaded before Python.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest


def main(folder: str, arguments: list[str]) -> int:
    found = list(Path(folder).glob("fxpar/_native*.so"))
    if len(found) != 1:
        raise SystemExit(f"{folder} has {len(found)} builds of fxpar._native, not one")
    spec = spec_from_file_location("fxpar._native", found[0])
    if spec is None or spec.loader is None:
        raise SystemExit(f"{found[0]} is no extension module")
    native = module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["fxpar._native"] = native
    from fxpar import kernels

    if kernels.native() is not native:
        raise SystemExit("fxpar took another native core")
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
