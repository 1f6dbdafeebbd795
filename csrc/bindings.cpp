// The Python module fxpar._native. What is passed in has been checked by fxpar/kernels.py, except what could crash.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "conversion.hpp"
#include "eliminate.hpp"
#include "search/bindings.hpp"

namespace py = pybind11;

namespace {

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;

py::array_t<double> conversion_costs(const Doubles& arcs, std::size_t most, const std::vector<int>& targets) {
  if (arcs.ndim() != 2 || arcs.shape(0) != arcs.shape(1)) throw std::invalid_argument("arcs must be a square matrix");
  const auto nodes = arcs.shape(0);
  if (targets.size() > 20) throw std::invalid_argument("there are more than 20 targets");
  for (const int target : targets) {
    if (target < 0 || target >= nodes) throw std::out_of_range("a target is not a node");
  }
  py::array_t<double> costs({nodes, py::ssize_t{1} << targets.size()});
  const double* from = arcs.data();
  double* to = costs.mutable_data();
  py::gil_scoped_release unlocked;
  fxpar::conversion_costs(from, static_cast<std::size_t>(nodes), most, targets, to);
  return costs;
}

std::pair<std::vector<int>, double> eliminate(const std::vector<int>& sizes,
                                              const std::vector<std::vector<int>>& scopes,
                                              const std::vector<Doubles>& arrays, const std::vector<int>& order) {
  if (scopes.size() != arrays.size()) throw std::invalid_argument("there must be a scope for every table");
  const auto variables = static_cast<int>(sizes.size());
  std::vector<fxpar::Table> tables;
  for (std::size_t number = 0; number < arrays.size(); ++number) {
    const auto& scope = scopes[number];
    if (static_cast<std::size_t>(arrays[number].ndim()) != scope.size()) {
      throw std::invalid_argument("a table needs an axis for every variable in its scope");
    }
    for (std::size_t axis = 0; axis < scope.size(); ++axis) {
      if (scope[axis] < 0 || scope[axis] >= variables) throw std::out_of_range("a scope has an unknown variable");
      if (arrays[number].shape(static_cast<py::ssize_t>(axis)) != sizes[static_cast<std::size_t>(scope[axis])]) {
        throw std::invalid_argument("a table's axis has not as many entries as its variable has choices");
      }
    }
    tables.push_back({scope, arrays[number].data()});
  }
  std::vector<bool> seen(sizes.size(), false);
  for (const int variable : order) {
    if (variable < 0 || variable >= variables || seen[static_cast<std::size_t>(variable)]) {
      throw std::invalid_argument("the order must list every variable once");
    }
    seen[static_cast<std::size_t>(variable)] = true;
  }
  if (order.size() != sizes.size()) throw std::invalid_argument("the order must list every variable once");
  for (const int size : sizes) {
    if (size < 1) throw std::invalid_argument("every variable needs a choice");
  }
  py::gil_scoped_release unlocked;
  return fxpar::eliminate(sizes, tables, order);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Kernels of fxpar.kernels in C++.";
  module.def("conversion_costs", &conversion_costs, py::arg("arcs"), py::arg("most"), py::arg("targets"));
  module.def("eliminate", &eliminate, py::arg("sizes"), py::arg("scopes"), py::arg("tables"), py::arg("order"));
  fxpar::search::bind(module);
}
