// Classes of the Python module fxpar._native for strategy graphs. Arrays have been checked by fxpar/solver.
#include "bindings.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <stdexcept>

#include "ascent.hpp"
#include "descent.hpp"
#include "reduce.hpp"

namespace py = pybind11;

namespace fxpar::search {
namespace {

using Longs = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A reduced strategy graph with its prices and bounds. Choices go in and out as strategies of the nodes.
class Problem {
 public:
  Problem(const Longs& first, const Longs& costs, const Longs& usages, const Longs& from, const Longs& to,
          const Longs& tail, const Longs& head, const Longs& place, const Longs& edge_costs, Cost limit,
          Cost forbidden, bool reductions, const py::array_t<char>& allowed)
      : first_(first.data(), first.data() + first.size()) {
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
    reduced_ = reduce(input, forbidden, reductions);
    for (const Cost room : reduced_.program.room) reduced_.feasible = reduced_.feasible && room >= 0;
    if (!reduced_.feasible) return;
    tables_ = std::make_unique<Tables>(reduced_.program);
    ascent_ = std::make_unique<Ascent>(reduced_.program, *tables_);
  }

  // Improves the bound until the time or the steps are spent. Returns how many steps were made.
  long ascend(double seconds, long steps) {
    const auto start = Clock::now();
    py::gil_scoped_release unlocked;
    long made = 0;
    while (made < steps && !ascent_->converged() && (made == 0 || since(start) < seconds)) {
      ascent_->step(best_cost_);
      ++made;
      if (ascent_->excess() < least_excess_) {
        least_excess_ = ascent_->excess();
        nearest_ = ascent_->choice();
      }
      if (ascent_->feasible() && ascent_->cost() < best_cost_) {
        best_cost_ = ascent_->cost();
        best_ = ascent_->choice();
      }
    }
    return made;
  }

  // For every strategy of the graph, whether a choice with it may still cost at most `most`.
  py::array_t<char> promising(double most) {
    py::array_t<char> result(static_cast<py::ssize_t>(first_.back()));
    char* marks = result.mutable_data();
    py::gil_scoped_release unlocked;
    std::fill(marks, marks + first_.back(), 1);
    const std::vector<double> bounds = ascent_->bounds();
    for (std::size_t v = 0; v < reduced_.node.size(); ++v) {
      char* own = marks + first_[static_cast<std::size_t>(reduced_.node[v])];
      const std::size_t size = reduced_.program.variables[v].costs.size();
      std::fill(own, marks + first_[static_cast<std::size_t>(reduced_.node[v]) + 1], 0);
      for (std::size_t k = 0; k < size; ++k) {
        own[reduced_.labels[v][k]] = bounds[tables_->first[v] + k] <= most;
      }
    }
    return result;
  }

  // What is left of the graph: costs, held parts, edges, room, prices, constant.
  py::tuple program() const {
    const Program& program = reduced_.program;
    py::list variables, edges;
    for (const Variable& variable : program.variables) {
      py::list held;
      for (const Held& part : variable.held) held.append(py::make_tuple(part.from, part.to, part.usage));
      variables.append(py::make_tuple(variable.costs, held));
    }
    for (const Edge& edge : program.edges) edges.append(py::make_tuple(edge.a, edge.b, edge.costs));
    return py::make_tuple(variables, edges, program.room, ascent_->prices(), program.constant);
  }

  std::vector<int> expand(const std::vector<int>& choice) const {
    if (choice.size() != reduced_.node.size()) throw std::invalid_argument("a choice per variable is needed");
    for (std::size_t v = 0; v < choice.size(); ++v) {
      if (choice[v] < 0 || static_cast<std::size_t>(choice[v]) >= reduced_.labels[v].size()) {
        throw std::out_of_range("there is no such choice");
      }
    }
    return reduced_.expand(choice);
  }

  bool offer(const std::vector<int>& choice, double cost) {
    if (cost >= best_cost_) return false;
    best_cost_ = cost;
    best_ = choice;
    return true;
  }

  py::object choice() const {
    if (best_.empty() && !reduced_.node.empty()) return py::none();
    return py::cast(reduced_.expand(best_));
  }

  py::dict sizes() const {
    py::dict result;
    const Program& program = reduced_.program;
    std::size_t strategies = 0, entries = 0;
    for (const Variable& variable : program.variables) strategies += variable.costs.size();
    for (const Edge& edge : program.edges) entries += edge.costs.size();
    result["nodes"] = program.variables.size();
    result["strategies"] = strategies;
    result["edges"] = program.edges.size();
    result["entries"] = entries;
    result["moments"] = program.room.size();
    result["impossible"] = reduced_.impossible;
    result["dominated"] = reduced_.dominated;
    result["tied"] = reduced_.equal;
    result["eliminated"] = reduced_.eliminated;
    return result;
  }

  std::vector<std::int64_t> first_;
  Reduced reduced_;
  std::unique_ptr<Tables> tables_;
  std::unique_ptr<Ascent> ascent_;
  std::vector<int> best_;
  double best_cost_ = kInfinite;
  std::vector<int> nearest_;  // the choice that came nearest to the limit
  double least_excess_ = kInfinite;
};

// One thread's search from the problem's best choice.
class Walk {
 public:
  Walk(const Problem& problem, std::uint64_t seed) : problem_(problem), random_(seed ^ 0x5851f42d4c957f2du) {
    descent_ = std::make_unique<Descent>(problem.reduced_.program, *problem.tables_, seed);
  }

  // Takes the problem's best choice, or the one nearest to the limit, and its prices; not while another thread changes
  // them.
  void start() {
    const std::vector<int>& from = problem_.best_.empty() ? problem_.nearest_ : problem_.best_;
    if (from.size() != problem_.reduced_.node.size()) throw std::invalid_argument("there is no choice to start from");
    descent_->start(from);
    descent_->set_prices(problem_.ascent_->prices());
    best_ = problem_.best_;
    best_cost_ = problem_.best_cost_;
  }

  // Moves of trees of up to `size` variables until the time or the moves are spent; returns how many were made.
  long run(double seconds, long moves, std::size_t size, double weight, double temperature) {
    const auto start = Clock::now();
    py::gil_scoped_release unlocked;
    long made = 0;
    while (made < moves && ((made & 15) != 0 || made == 0 || since(start) < seconds)) {
      descent_->move(1 + random_.below(size), weight, temperature);
      ++made;
      if (descent_->cost() < best_cost_ && descent_->feasible()) {
        best_cost_ = descent_->cost();
        best_ = descent_->choice();
      }
    }
    return made;
  }

  double cost() const { return descent_->cost(); }
  double best_cost() const { return best_cost_; }
  const std::vector<int>& best() const { return best_; }

  std::unique_ptr<Descent> descent_;

 private:
  const Problem& problem_;
  Random random_;
  std::vector<int> best_;
  double best_cost_ = kInfinite;
};

}  // namespace

void bind(py::module_& module) {
  py::class_<Problem>(module, "Problem")
      .def(py::init<const Longs&, const Longs&, const Longs&, const Longs&, const Longs&, const Longs&, const Longs&,
                    const Longs&, const Longs&, Cost, Cost, bool, const py::array_t<char>&>(),
           py::arg("first"), py::arg("costs"), py::arg("usages"), py::arg("starts"), py::arg("ends"), py::arg("tails"),
           py::arg("heads"), py::arg("places"), py::arg("edge_costs"), py::arg("limit"), py::arg("forbidden"),
           py::arg("reductions"), py::arg("allowed"))
      .def_property_readonly("feasible", [](const Problem& self) { return self.reduced_.feasible; })
      .def_property_readonly("bound", [](const Problem& self) { return self.ascent_->bound(); })
      .def_property_readonly("converged", [](const Problem& self) { return self.ascent_->converged(); })
      .def_property("cost", [](const Problem& self) { return self.best_cost_; },
                    [](Problem& self, double cost) { self.best_cost_ = cost; })
      .def_property_readonly("core", [](const Problem& self) { return self.ascent_->core(); })
      .def("ascend", &Problem::ascend, py::arg("seconds"), py::arg("steps"))
      .def("promising", &Problem::promising, py::arg("most"))
      .def("program", &Problem::program)
      .def("expand", &Problem::expand, py::arg("choice"))
      .def("choice", &Problem::choice)
      .def("sizes", &Problem::sizes);
  py::class_<Walk>(module, "Walk")
      .def(py::init<const Problem&, std::uint64_t>(), py::arg("problem"), py::arg("seed"), py::keep_alive<1, 2>())
      .def("start", &Walk::start)
      .def("run", &Walk::run, py::arg("seconds"), py::arg("moves"), py::arg("size"), py::arg("weight"),
           py::arg("temperature"))
      .def("offer", [](const Walk& self, Problem& problem) { return !infinite(self.best_cost()) && problem.offer(self.best(), self.best_cost()); })
      .def_property_readonly("feasible", [](const Walk& self) { return self.descent_->feasible(); })
      .def_property_readonly("cost", &Walk::cost)
      .def_property_readonly("best_cost", &Walk::best_cost);
}

}  // namespace fxpar::search
