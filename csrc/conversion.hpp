// Cheapest conversion trees: directed Steiner trees on sparse graphs of states (Dreyfus and Wagner, 1971).
#pragma once

#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

namespace fxpar {

// The arcs out of `node` are those from start[node] to start[node + 1]: to ends[arc], at costs[arc] (not negative).
struct Graph {
  std::vector<int> start, ends;
  std::vector<double> costs;

  std::size_t nodes() const { return start.size() - 1; }
};

Graph reversed(const Graph& graph);

// Lowers values[node] to the least values[other] + the arcs of a path from other to node, summed from other on.
// The least such sum does not depend on the order of work, so this equals fxpar/tree_kernels.py to the last bit.
class Spread {
 public:
  void operator()(const Graph& graph, std::vector<double>& values);

 private:
  std::vector<std::pair<double, int>> first_;
  std::deque<int> queue_;
  std::vector<char> queued_;
};

// costs[roots * sets]: of the cheapest tree from each root to all nodes of each set (ascending, not repeated).
void tree_costs(const Graph& graph, const std::vector<int>& roots, const std::vector<std::vector<int>>& sets,
                double* costs);

// The cheapest tree from one root: its cost and arcs. Among equally cheap ones the fewest arcs, then the first nodes.
// Arcs may be listed twice, or lead around; fxpar/cost/trees.py tidies them.
std::pair<double, std::vector<std::pair<int, int>>> cheapest_tree(const Graph& graph, int root,
                                                                  const std::vector<int>& targets);

}  // namespace fxpar
