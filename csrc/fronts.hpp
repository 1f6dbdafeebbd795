// Variable elimination with a front of points (seconds, and bytes of each row) in every entry instead of a least cost.
#pragma once

#include <cstddef>
#include <vector>

namespace fxpar {

// Entry e of a table (row-major over scope) has the points from starts[e] to starts[e + 1], each `width` numbers.
struct FrontTable {
  std::vector<int> scope;
  std::vector<int> starts;
  const double* costs;
};

// At the end: of each point its numbers, the choice of every variable, and which of its points every table gave.
struct FrontResult {
  std::vector<double> costs;
  std::vector<std::vector<int>> choices, picks;
};

// `own` has the points of each variable's choices. Of points that fall into one cell of the `grid` (bytes of each row)
// only the fastest is kept, and in all `most` points, those that cost least at the `prices`.
// Sums, comparisons and ties are those of fxpar/solver/fronts.py.
FrontResult fronts(const std::vector<int>& sizes, const std::vector<std::vector<double>>& own,
                   const std::vector<FrontTable>& tables, const std::vector<int>& order,
                   const std::vector<double>& prices, const std::vector<double>& grid, std::size_t most);

}  // namespace fxpar
