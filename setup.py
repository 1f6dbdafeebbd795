"""Builds the extension ``fxpar._native`` where pybind11 and a C++17 compiler are there; without it numpy is used."""

from glob import glob

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext
except ImportError:
    setup()
else:
    # No fused multiply-add: the kernels equal their numpy reference to the last bit.
    native = Pybind11Extension(
        "fxpar._native",
        sources=sorted(glob("csrc/*.cpp") + glob("csrc/search/*.cpp")),
        depends=sorted(glob("csrc/*.hpp") + glob("csrc/search/*.hpp")),
        cxx_std=17,
        extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
    )
    native.optional = True
    setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
