// The memory in use over time against the room there is: a segment tree with range addition and the largest excess.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "program.hpp"

namespace fxpar::search {

class Profile {
 public:
  explicit Profile(const std::vector<Cost>& room) : leaves_(1) {
    while (leaves_ < std::max<std::size_t>(room.size(), 1)) leaves_ *= 2;
    most_.assign(2 * leaves_, INT64_MIN / 4);
    sum_.assign(2 * leaves_, 0);
    if (room.empty()) most_[leaves_] = 0;
    for (std::size_t at = 0; at < room.size(); ++at) most_[leaves_ + at] = -room[at];
    for (std::size_t at = leaves_ - 1; at > 0; --at) pull(at);
  }

  void add(int from, int to, Cost usage) {
    if (usage == 0 || from >= to) return;
    std::size_t left = leaves_ + static_cast<std::size_t>(from), right = leaves_ + static_cast<std::size_t>(to);
    const std::size_t low = left, high = right - 1;
    for (; left < right; left /= 2, right /= 2) {
      if (left & 1) apply(left++, usage);
      if (right & 1) apply(--right, usage);
    }
    lift(low);
    lift(high);
  }

  // The largest usage less room; at most 0 if the limit holds at every moment.
  Cost excess() const { return most_[1]; }

  // A moment at which the excess is largest.
  int peak() const {
    std::size_t at = 1;
    while (at < leaves_) at = most_[2 * at] >= most_[2 * at + 1] ? 2 * at : 2 * at + 1;
    return static_cast<int>(at - leaves_);
  }

 private:
  void apply(std::size_t at, Cost usage) {
    most_[at] += usage;
    sum_[at] += usage;
  }
  void pull(std::size_t at) { most_[at] = std::max(most_[2 * at], most_[2 * at + 1]) + sum_[at]; }
  void lift(std::size_t at) {
    for (at /= 2; at > 0; at /= 2) pull(at);
  }

  std::size_t leaves_;
  std::vector<Cost> most_, sum_;
};

}  // namespace fxpar::search
