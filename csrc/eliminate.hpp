// Exact minimisation of a sum of tables by variable elimination.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace fxpar {

// A table in row-major order; axis i is variable scope[i].
struct Table {
  std::vector<int> scope;
  const double* values;
};

// One choice per variable, and the least total. `order` lists every variable once.
// Sums, minima and ties are those of fxpar/kernels.py, bit for bit.
std::pair<std::vector<int>, double> eliminate(const std::vector<int>& sizes, const std::vector<Table>& tables,
                                              const std::vector<int>& order);

}  // namespace fxpar
