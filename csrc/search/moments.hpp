// Time: only the moments at which memory can bind are kept.
#pragma once

#include <utility>
#include <vector>

#include "program.hpp"

namespace fxpar::search {

// Parts that may overlap, as parts that do not and say the same.
std::vector<Held> disjoint(const std::vector<Held>& parts, std::size_t choices);

class Moments {
 public:
  // Of all moments between two starts only the last before something ends matters: there the most is held.
  explicit Moments(const Input& input);

  // A node's life in kept moments, half-open.
  std::pair<int, int> span(std::size_t node) const { return spans_[node]; }

  // A usage that no choice changes any more.
  void take(int from, int to, Cost usage);

  // What is left of the limit at each kept moment.
  std::vector<Cost> room() const;

  // Makes the held parts of every variable disjoint and least 0, drops moments that cannot bind, and sets `room`.
  void finish(Program& program);

 private:
  std::vector<std::pair<int, int>> spans_;
  std::vector<Cost> change_;  // of the usage taken, from moment to moment
  Cost limit_;
};

}  // namespace fxpar::search
