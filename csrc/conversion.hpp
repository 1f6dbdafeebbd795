// Costs of the cheapest conversion trees (directed Steiner trees) from every node to every small set of targets.
#pragma once

#include <cstddef>
#include <vector>

namespace fxpar {

// arcs[nodes * nodes] are not negative; costs[nodes * 2^targets] is written, row by node, column by set of targets.
// Sets of more than `most` targets are left infinite. Sums and minima are those of fxpar/kernels.py, bit for bit.
void conversion_costs(const double* arcs, std::size_t nodes, std::size_t most, const std::vector<int>& targets,
                      double* costs);

}  // namespace fxpar
