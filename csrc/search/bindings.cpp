// Classes of the Python module fxpar._native for strategy graphs. Arrays have been checked by fxpar/solver.
#include "bindings.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "problem.hpp"

namespace py = pybind11;

namespace fxpar::search {
namespace {

using Longs = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;
using Bytes = py::array_t<char, py::array::c_style | py::array::forcecast>;
using Unlocked = py::call_guard<py::gil_scoped_release>;

template <class Number>
py::array_t<Number> array(const std::vector<Number>& values) {
  return py::array_t<Number>(static_cast<py::ssize_t>(values.size()), values.data());
}

std::unique_ptr<Problem> make(const Longs& first, const Longs& costs, const Longs& usages, const Longs& from,
                              const Longs& to, const Longs& tail, const Longs& head, const Longs& place,
                              const Longs& edge_costs, Cost limit, Cost forbidden, bool reductions,
                              const Bytes& allowed) {
  Input input;
  input.allowed = allowed.size() ? allowed.data() : nullptr;
  input.nodes = static_cast<std::size_t>(from.size());
  input.edges = static_cast<std::size_t>(tail.size());
  input.first = first.data();
  input.costs = costs.data();
  input.usages = usages.data();
  input.from = from.data();
  input.to = to.data();
  input.tail = tail.data();
  input.head = head.data();
  input.place = place.data();
  input.edge_costs = edge_costs.data();
  input.limit = limit;
  py::gil_scoped_release unlocked;
  return std::make_unique<Problem>(input, forbidden, reductions);
}

template <class Result, class Work>
Result unlocked(const Work& work) {
  py::gil_scoped_release unlocked;
  return work();
}

// What is left of the graph: costs, held parts, edges, room, prices, constant.
py::tuple exported(const Problem& problem) {
  const Program& program = problem.program();
  py::list variables, edges;
  for (const Variable& variable : program.variables) {
    py::list held;
    for (const Held& part : variable.held) held.append(py::make_tuple(part.from, part.to, array(part.usage)));
    variables.append(py::make_tuple(array(variable.costs), held));
  }
  for (const Edge& edge : program.edges) edges.append(py::make_tuple(edge.a, edge.b, array(edge.costs)));
  return py::make_tuple(variables, edges, array(program.room), array(problem.ascent().prices()), program.constant);
}

py::dict sizes(const Problem& problem) {
  const Program& program = problem.program();
  std::size_t strategies = 0, entries = 0;
  for (const Variable& variable : program.variables) strategies += variable.costs.size();
  for (const Edge& edge : program.edges) entries += edge.costs.size();
  const Reduced& reduced = problem.reduced();
  py::dict result;
  result["nodes"] = program.variables.size();
  result["strategies"] = strategies;
  result["edges"] = program.edges.size();
  result["entries"] = entries;
  result["moments"] = program.room.size();
  result["impossible"] = reduced.impossible;
  result["dominated"] = reduced.dominated;
  result["oversized"] = reduced.oversized;
  result["tied"] = reduced.equal;
  result["eliminated"] = reduced.eliminated;
  return result;
}

py::object choice(const Problem& problem) {
  if (problem.best().empty() && !problem.program().variables.empty()) return py::none();
  return py::cast(problem.expand(problem.best()));
}

}  // namespace

void bind(py::module_& module) {
  py::class_<Problem>(module, "Problem")
      .def(py::init(&make), py::arg("first"), py::arg("costs"), py::arg("usages"), py::arg("starts"), py::arg("ends"),
           py::arg("tails"), py::arg("heads"), py::arg("places"), py::arg("edge_costs"), py::arg("limit"),
           py::arg("forbidden"), py::arg("reductions"), py::arg("allowed"))
      .def_property_readonly("feasible", &Problem::feasible)
      .def_property_readonly("bound", [](const Problem& self) { return self.ascent().bound(); })
      .def_property_readonly("converged", [](const Problem& self) { return self.ascent().converged(); })
      .def_property("cost", &Problem::cost, &Problem::set_cost)
      .def("ascend", &Problem::ascend, py::arg("seconds"), py::arg("steps"), Unlocked())
      .def("bounds",
           [](Problem& self) { return array(unlocked<std::vector<double>>([&] { return self.bounds(); })); })
      .def("prices", [](const Problem& self) { return array(self.prices()); })
      .def("start", &Problem::start, py::arg("prices"))
      .def("allowed", [](const Problem& self, const Part& part) { return array(self.allowed(part)); }, py::arg("part"))
      .def("program", &exported)
      .def("expand", &Problem::expand, py::arg("choice"))
      .def("choice", &choice)
      .def("adopt", &Problem::adopt, py::arg("strategies"))
      .def("nodes", [](const Problem& self) { return array(self.reduced().node); })
      .def("sizes", &sizes);
  py::class_<Walk>(module, "Walk")
      .def(py::init<const Problem&, std::uint64_t>(), py::arg("problem"), py::arg("seed"), py::keep_alive<1, 2>())
      .def("run", &Walk::run, py::arg("seconds"), py::arg("moves"), py::arg("size"), py::arg("weight"),
           py::arg("temperature"), Unlocked())
      .def("offer", [](const Walk& self, Problem& problem) { problem.offer(self.best(), self.best_cost()); })
      .def_property_readonly("feasible", &Walk::feasible)
      .def_property_readonly("cost", &Walk::cost)
      .def_property_readonly("best_cost", &Walk::best_cost);
  py::class_<Part>(module, "Part").def_readonly("bound", &Part::bound);
  py::class_<Brancher>(module, "Brancher")
      .def(py::init([](const Problem& problem) {
             return std::make_unique<Brancher>(problem.program(), problem.tables(), problem.ascent());
           }),
           py::arg("problem"), py::keep_alive<1, 2>())
      .def("root", &Brancher::root)
      .def("split", &Brancher::split, py::arg("part"), py::arg("most"), Unlocked())
      .def("stop", &Brancher::stop)
      .def("offer",
           [](const Brancher& self, Problem& problem) { problem.offer(self.best(), self.best_cost()); });
}

}  // namespace fxpar::search
