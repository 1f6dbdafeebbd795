// The Python module fxpar._native. What is passed in has been checked by fxpar/kernels.py, except what could crash.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>

#include "bounds.hpp"
#include "conversion.hpp"
#include "eliminate.hpp"
#include "fronts.hpp"
#include "search/bindings.hpp"

namespace py = pybind11;

namespace {

constexpr std::size_t kMaxTargets = 12;

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;

using Ints = py::array_t<int, py::array::c_style | py::array::forcecast>;

fxpar::Graph graph_of(const Ints& start, const Ints& ends, const Doubles& costs) {
  fxpar::Graph graph{{start.data(), start.data() + start.size()},
                     {ends.data(), ends.data() + ends.size()},
                     {costs.data(), costs.data() + costs.size()}};
  if (graph.start.empty() || graph.start.front() != 0 || graph.ends.size() != graph.costs.size() ||
      graph.start.back() != static_cast<int>(graph.ends.size())) {
    throw std::invalid_argument("a graph needs a start per node and one more, and a cost per arc");
  }
  for (std::size_t node = 1; node < graph.start.size(); ++node) {
    if (graph.start[node] < graph.start[node - 1]) throw std::invalid_argument("the starts must not fall");
  }
  for (const int end : graph.ends) {
    if (end < 0 || end >= static_cast<int>(graph.nodes())) throw std::out_of_range("an arc ends at no node");
  }
  return graph;
}

void check_nodes(const fxpar::Graph& graph, const std::vector<int>& nodes) {
  for (const int node : nodes) {
    if (node < 0 || node >= static_cast<int>(graph.nodes())) throw std::out_of_range("a state is not a node");
  }
}

py::array_t<double> tree_costs(const Ints& start, const Ints& ends, const Doubles& costs, const std::vector<int>& roots,
                               const std::vector<std::vector<int>>& sets) {
  const fxpar::Graph graph = graph_of(start, ends, costs);
  check_nodes(graph, roots);
  for (const auto& set : sets) {
    check_nodes(graph, set);
    if (set.size() > kMaxTargets) throw std::invalid_argument("a set has too many targets");
  }
  py::array_t<double> result({roots.size(), sets.size()});
  double* to = result.mutable_data();
  py::gil_scoped_release unlocked;
  fxpar::tree_costs(graph, roots, sets, to);
  return result;
}

std::pair<double, std::vector<std::pair<int, int>>> cheapest_tree(const Ints& start, const Ints& ends,
                                                                  const Doubles& costs, int root,
                                                                  const std::vector<int>& targets) {
  const fxpar::Graph graph = graph_of(start, ends, costs);
  check_nodes(graph, {root});
  check_nodes(graph, targets);
  if (targets.size() > kMaxTargets) throw std::invalid_argument("there are too many targets");
  py::gil_scoped_release unlocked;
  return fxpar::cheapest_tree(graph, root, targets);
}

std::pair<std::vector<std::vector<int>>, std::vector<std::vector<int>>> fronts(
    const std::vector<int>& sizes, const std::vector<Doubles>& own, const std::vector<std::vector<int>>& scopes,
    const std::vector<Ints>& starts, const std::vector<Doubles>& costs, const std::vector<int>& order,
    const std::vector<double>& prices, const std::vector<double>& grid, std::size_t most) {
  const std::size_t width = prices.size() + 1;
  if (own.size() != sizes.size() || starts.size() != scopes.size() || costs.size() != scopes.size() || grid.size() != prices.size()) {
    throw std::invalid_argument("there must be points for every variable and every table");
  }
  const auto check = [&](int variable) {
    if (variable < 0 || variable >= static_cast<int>(sizes.size())) throw std::out_of_range("an unknown variable");
  };
  std::vector<std::vector<double>> points;
  for (std::size_t variable = 0; variable < sizes.size(); ++variable) {
    if (static_cast<std::size_t>(own[variable].size()) != static_cast<std::size_t>(sizes[variable]) * width) {
      throw std::invalid_argument("a variable needs a point for each choice");
    }
    points.emplace_back(own[variable].data(), own[variable].data() + own[variable].size());
  }
  std::vector<fxpar::FrontTable> tables;
  for (std::size_t number = 0; number < scopes.size(); ++number) {
    std::size_t entries = 1;
    for (const int variable : scopes[number]) {
      check(variable);
      entries *= static_cast<std::size_t>(sizes[static_cast<std::size_t>(variable)]);
    }
    std::vector<int> begin(starts[number].data(), starts[number].data() + starts[number].size());
    if (begin.size() != entries + 1 || begin.front() != 0 || !std::is_sorted(begin.begin(), begin.end()) ||
        static_cast<std::size_t>(begin.back()) * width != static_cast<std::size_t>(costs[number].size())) {
      throw std::invalid_argument("a table needs points for each entry");
    }
    tables.push_back({scopes[number], std::move(begin), costs[number].data()});
  }
  std::vector<bool> seen(sizes.size(), false);
  for (const int variable : order) {
    check(variable);
    seen[static_cast<std::size_t>(variable)] = true;
  }
  if (order.size() != sizes.size() || std::find(seen.begin(), seen.end(), false) != seen.end()) {
    throw std::invalid_argument("the order must list every variable once");
  }
  py::gil_scoped_release unlocked;
  fxpar::FrontResult result = fxpar::fronts(sizes, points, tables, order, prices, grid, most);
  return {std::move(result.choices), std::move(result.picks)};
}

// fxpar::Bounds, with what is passed in checked.
class Bounds {
 public:
  explicit Bounds(const std::vector<std::vector<double>>& costs) : bounds_(costs) {
    for (const auto& row : costs) choices_.push_back(row.size());
  }

  int add_graph(const Ints& start, const Ints& ends, const Doubles& costs) {
    fxpar::Graph graph = graph_of(start, ends, costs);
    shapes_.emplace_back(graph.nodes(), graph.ends.size());
    return bounds_.add_graph(std::move(graph));
  }

  void set_costs(int graph, const std::vector<double>& costs) {
    if (costs.size() != shapes_.at(static_cast<std::size_t>(graph)).second) throw std::invalid_argument("a cost per arc");
    bounds_.set_costs(graph, costs);
  }

  void add_tree(int graph, const std::vector<int>& variables, const std::vector<std::vector<int>>& states) {
    const auto nodes = static_cast<int>(shapes_.at(static_cast<std::size_t>(graph)).first);
    std::vector<fxpar::Leaf> leaves = leaves_of(variables);
    if (states.size() != leaves.size() || leaves.empty() || leaves.size() > kMaxTargets) {
      throw std::invalid_argument("a tree needs a root, and states for each leaf");
    }
    for (std::size_t leaf = 0; leaf < leaves.size(); ++leaf) {
      if (states[leaf].size() != choices_[static_cast<std::size_t>(variables[leaf])]) {
        throw std::invalid_argument("a leaf needs a state for each choice");
      }
      for (const int state : states[leaf]) {
        if (state < 0 || state >= nodes) throw std::out_of_range("a state is not a node");
      }
      leaves[leaf].states = states[leaf];
    }
    bounds_.add_tree(graph, std::move(leaves));
  }

  void add_table(const std::vector<int>& variables, const Doubles& values) {
    std::vector<fxpar::Leaf> leaves = leaves_of(variables);
    std::size_t entries = 1;
    for (const int variable : variables) entries *= choices_[static_cast<std::size_t>(variable)];
    if (static_cast<std::size_t>(values.size()) != entries) throw std::invalid_argument("a table has another shape");
    bounds_.add_table(std::move(leaves), {values.data(), values.data() + values.size()});
  }

  void add_costs(int variable, const std::vector<double>& more) {
    if (more.size() != choices_.at(static_cast<std::size_t>(variable))) throw std::invalid_argument("a cost per choice");
    bounds_.add_costs(variable, more);
  }

  double sweep(double limit, bool backwards) {
    py::gil_scoped_release unlocked;
    return bounds_.sweep(limit, backwards);
  }

  std::vector<Doubles> excess() {
    std::vector<Doubles> result;
    for (const auto& row : bounds_.excess()) result.emplace_back(static_cast<py::ssize_t>(row.size()), row.data());
    return result;
  }

 private:
  std::vector<fxpar::Leaf> leaves_of(const std::vector<int>& variables) const {
    std::vector<fxpar::Leaf> leaves;
    for (const int variable : variables) {
      if (variable < 0 || variable >= static_cast<int>(choices_.size())) throw std::out_of_range("an unknown variable");
      leaves.push_back({variable, {}, {}});
    }
    return leaves;
  }

  fxpar::Bounds bounds_;
  std::vector<std::size_t> choices_;
  std::vector<std::pair<std::size_t, std::size_t>> shapes_;
};

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
  module.def("tree_costs", &tree_costs);
  module.def("cheapest_tree", &cheapest_tree);
  module.def("fronts", &fronts);
  py::class_<Bounds>(module, "Bounds")
      .def(py::init<const std::vector<std::vector<double>>&>())
      .def("add_graph", &Bounds::add_graph)
      .def("set_costs", &Bounds::set_costs)
      .def("add_tree", &Bounds::add_tree)
      .def("add_table", &Bounds::add_table)
      .def("add_costs", &Bounds::add_costs)
      .def("sweep", &Bounds::sweep)
      .def("excess", &Bounds::excess);
  module.def("eliminate", &eliminate, py::arg("sizes"), py::arg("scopes"), py::arg("tables"), py::arg("order"));
  fxpar::search::bind(module);
}
