// A lower bound of a priced program, and of what each choice adds to it: costs are moved between variables, tables and
// conversion trees so that the sum of their least costs grows (block coordinate ascent on the dual of the local
// polytope, in the manner of sequential reweighted message passing; Kolmogorov, 2015).
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "conversion.hpp"

namespace fxpar {

// What a variable has to do with a table (axis by axis) or a tree (leaf 0 is the root): `shift` is the cost that the
// table or tree has taken over from each choice; in a tree `states` are the choices' nodes.
struct Leaf {
  int variable;
  std::vector<int> states;
  std::vector<double> shift;
  std::size_t seen = 0;  // the version of the table or tree whose costs have been taken from it through this leaf
};

class Bounds {
 public:
  explicit Bounds(const std::vector<std::vector<double>>& costs);

  int add_graph(Graph graph);
  void set_costs(int graph, const std::vector<double>& arcs);
  void add_tree(int graph, std::vector<Leaf> leaves);
  void add_table(std::vector<Leaf> leaves, std::vector<double> values);

  // Adds to the costs of a variable's choices.
  void add_costs(int variable, const std::vector<double>& more);

  // Visits every variable, in order or backwards; drops choices with which no total below `limit` is possible.
  // Returns the lower bound: infinite if some variable has no choice left.
  double sweep(double limit, bool backwards);

  // Of each choice, about how much more than the bound a total must be that has it, as its variable was last visited;
  // infinite for a choice that was dropped.
  std::vector<std::vector<double>> excess();

 private:
  struct Part {
    int graph = -1;  // -1: a table
    std::vector<Leaf> leaves;
    std::vector<double> values;
    double least = 0.0;
    std::size_t version = 1;  // counts the changes of shifts
  };
  struct Place {
    std::size_t part, leaf;
  };

  void add(Part part);
  void find_trees();
  bool visit(int variable, double limit, bool backwards);
  std::vector<double> marginal(const Part& part, std::size_t leaf);
  std::vector<double> table_marginal(const Part& part, std::size_t leaf) const;
  std::vector<double> tree_marginal(const Part& part, std::size_t leaf);
  std::vector<double> entry(const Part& part, std::size_t leaf) const;
  double total() const;

  std::vector<std::vector<double>> own_, excess_;
  std::vector<std::vector<char>> alive_;
  std::vector<double> least_;
  std::vector<std::vector<Place>> places_;
  std::vector<Graph> forward_, back_;
  std::vector<Part> parts_;
  std::vector<std::size_t> toward_;
  std::vector<std::size_t> hanging_;  // the variables that have a part in toward_, outermost first
  Spread spread_;
};

}  // namespace fxpar
