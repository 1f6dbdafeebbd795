#include "conversion.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace fxpar {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Cheapest paths between all pairs (Floyd and Warshall).
std::vector<double> closure(const double* arcs, std::size_t nodes) {
  std::vector<double> dist(arcs, arcs + nodes * nodes);
  for (std::size_t node = 0; node < nodes; ++node) dist[node * nodes + node] = 0.0;
  for (std::size_t k = 0; k < nodes; ++k) {
    for (std::size_t a = 0; a < nodes; ++a) {
      const double head = dist[a * nodes + k];
      for (std::size_t b = 0; b < nodes; ++b) {
        dist[a * nodes + b] = std::min(dist[a * nodes + b], head + dist[k * nodes + b]);
      }
    }
  }
  return dist;
}

std::size_t count(std::uint32_t set) {
  std::size_t bits = 0;
  for (; set != 0; set &= set - 1) ++bits;
  return bits;
}

}  // namespace

void conversion_costs(const double* arcs, std::size_t nodes, std::size_t most, const std::vector<int>& targets,
                      double* costs) {
  const std::vector<double> dist = closure(arcs, nodes);
  std::vector<double> across(nodes * nodes);  // across[end][start]: the inner loops run over starts
  for (std::size_t a = 0; a < nodes; ++a) {
    for (std::size_t b = 0; b < nodes; ++b) across[b * nodes + a] = dist[a * nodes + b];
  }
  const std::uint32_t sets = std::uint32_t{1} << targets.size();
  std::fill_n(costs, sets * nodes, kInfinite);
  for (std::size_t node = 0; node < nodes; ++node) costs[node * sets] = 0.0;
  std::vector<std::uint32_t> row(sets, 0);  // sets that are small enough get a row of `best`, one entry per node
  std::uint32_t rows = 0;
  for (std::uint32_t set = 1; set < sets; ++set) {
    if (count(set) <= most) row[set] = rows++;
  }
  std::vector<double> best(rows * nodes, kInfinite);
  std::vector<double> merged(nodes);
  for (std::uint32_t set = 1; set < sets; ++set) {
    const std::size_t size = count(set);
    if (size > most) continue;
    double* here = best.data() + row[set] * nodes;
    const std::uint32_t lowest = set & (~set + 1);
    if (size == 1) {
      std::size_t bit = 0;
      while ((set >> bit) != 1) ++bit;
      const double* paths = across.data() + static_cast<std::size_t>(targets[bit]) * nodes;
      std::copy(paths, paths + nodes, here);
      continue;
    }
    // Two trees from one node, for every way to part the set (each once: one half has the lowest target).
    std::fill(merged.begin(), merged.end(), kInfinite);
    for (std::uint32_t half = (set - 1) & set; half != 0; half = (half - 1) & set) {
      if ((half & lowest) == 0) continue;
      const double* left = best.data() + row[half] * nodes;
      const double* right = best.data() + row[set ^ half] * nodes;
      for (std::size_t node = 0; node < nodes; ++node) merged[node] = std::min(merged[node], left[node] + right[node]);
    }
    // A path to the node where they part.
    for (std::size_t parting = 0; parting < nodes; ++parting) {
      const double* paths = across.data() + parting * nodes;
      for (std::size_t node = 0; node < nodes; ++node) {
        here[node] = std::min(here[node], paths[node] + merged[parting]);
      }
    }
  }
  for (std::uint32_t set = 1; set < sets; ++set) {
    if (count(set) > most) continue;
    for (std::size_t node = 0; node < nodes; ++node) costs[node * sets + set] = best[row[set] * nodes + node];
  }
}

}  // namespace fxpar
