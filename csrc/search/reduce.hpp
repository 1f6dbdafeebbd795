// Exact reductions of a strategy graph to a fixed point, and the way back.
#pragma once

#include <string>
#include <vector>

#include "program.hpp"

namespace fxpar::search {

// How a node that is gone follows from others that were there when it went: its strategy is
// best[choice of p * size of q + choice of q]; p and q are -1 where there are fewer than two.
struct Step {
  int node, p, q;
  std::size_t stride;
  std::vector<int> best;
};

struct Reduced {
  Program program;
  std::vector<int> node;                 // of each variable of the program
  std::vector<std::vector<int>> labels;  // of each variable: the strategy that each choice stands for
  std::vector<std::vector<int>> places;  // of each variable: the choice that stands for a strategy, or -1
  std::vector<Step> steps;
  std::size_t nodes = 0;
  bool feasible = true;  // false: some node has no strategy left
  // Statistics for the log.
  std::size_t impossible = 0, dominated = 0, oversized = 0, equal = 0, eliminated = 0;

  std::vector<int> expand(const std::vector<int>& choice) const;
};

// Entries from `forbidden` on may not be taken. With `reductions` off only those are dealt with.
Reduced reduce(const Input& input, Cost forbidden, bool reductions);

}  // namespace fxpar::search
