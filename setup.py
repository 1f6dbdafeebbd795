"""Builds the extension ``fxpar._native`` where pybind11 and a C++17 compiler are there; without it numpy is used.

``FXPAR_SANITIZE=1`` builds it with AddressSanitizer and UBSan instead (``make test-native``).
"""

import os
from glob import glob

from setuptools import setup

try:
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
except ImportError:
    setup()
else:
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1"]
    sanitize = bool(os.environ.get("FXPAR_SANITIZE"))
    # No fused multiply-add: the kernels equal their numpy reference to the last bit.
    native = Pybind11Extension(
        "fxpar._native",
        sources=sorted(glob("csrc/*.cpp") + glob("csrc/search/*.cpp")),
        depends=sorted(glob("csrc/*.hpp") + glob("csrc/search/*.hpp")),
        cxx_std=17,
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"] + ["-O1", *sanitizers] * sanitize,
        extra_link_args=sanitizers * sanitize,
    )
    native.optional = not sanitize
    ParallelCompile(default=0).install()
    setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
