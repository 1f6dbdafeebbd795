// Adds the classes for strategy graphs to the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace fxpar::search {

void bind(pybind11::module_& module);

}  // namespace fxpar::search
