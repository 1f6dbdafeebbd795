// The program in doubles.
#pragma once

#include <vector>

#include "program.hpp"

namespace fxpar::search {

constexpr double kInfinite = 1e25;
inline bool infinite(double cost) { return cost > kInfinite / 2; }

// Tables are there from both sides, so that the inner loops run over neighbouring entries.
struct Tables {
  explicit Tables(const Program& program);

  struct Link {
    int a, b;
    std::vector<double> forward, backward;  // [a][b] and [b][a]

    // With the rows of `v`, which is one of the ends.
    const std::vector<double>& of(int v) const { return v == a ? forward : backward; }
  };

  std::vector<std::size_t> first;  // of each variable, in arrays that have an entry per choice
  std::vector<double> costs;
  std::vector<Link> links;

  std::size_t variables() const { return first.size() - 1; }
  std::size_t choices(int v) const {
    return first[static_cast<std::size_t>(v) + 1] - first[static_cast<std::size_t>(v)];
  }
};

}  // namespace fxpar::search
