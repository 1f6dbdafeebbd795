#include <algorithm>

#include "rules.hpp"

namespace fxpar::search {
namespace {

using Index = std::size_t;

// The least of a range of numbers: a table of the least of every 2^n neighbours.
class Least {
 public:
  explicit Least(std::vector<Cost> numbers) : levels_{std::move(numbers)} {
    for (Index width = 1; 2 * width <= levels_[0].size(); width *= 2) {
      const std::vector<Cost>& below = levels_.back();
      std::vector<Cost> level(below.size() - width);
      for (Index at = 0; at < level.size(); ++at) level[at] = std::min(below[at], below[at + width]);
      levels_.push_back(std::move(level));
    }
  }

  Cost of(int from, int to) const {
    Index level = 0;
    while ((Index(2) << level) <= Index(to - from)) ++level;
    return std::min(levels_[level][Index(from)], levels_[level][Index(to) - (Index(1) << level)]);
  }

 private:
  std::vector<std::vector<Cost>> levels_;
};

// The largest number, over the strategies alive, and the least.
std::pair<Cost, Cost> range(const Node& node, const std::vector<Cost>& usage) {
  Cost least = kForbidden, most = 0;
  for (Index k = 0; k < usage.size(); ++k) {
    if (!node.alive[k]) continue;
    least = std::min(least, usage[k]);
    most = std::max(most, usage[k]);
  }
  return {least, most};
}

// What is free at every moment when every node holds the least that it can; held parts become disjoint.
std::vector<Cost> spare(Working& work) {
  std::vector<Cost> free = work.moments.room(), change(free.size() + 1, 0);
  for (Node& node : work.nodes) {
    if (node.gone) continue;
    if (node.held.size() > 1) node.held = disjoint(node.held, node.costs.size());
    for (const Held& held : node.held) {
      const Cost least = range(node, held.usage).first;
      change[Index(held.from)] += least;
      change[Index(held.to)] -= least;
    }
  }
  Cost taken = 0;
  for (Index at = 0; at < free.size(); ++at) free[at] -= (taken += change[at]);
  return free;
}

// Strategies that hold more than there is room for.
bool overfill_node(Working& work, int number, const Least& free) {
  Node& node = work.nodes[Index(number)];
  bool changed = false;
  for (const Held& held : node.held) {
    if (held.from >= held.to) continue;
    const auto [least, most] = range(node, held.usage);
    const Cost room = free.of(held.from, held.to);
    if (most - least <= room) continue;
    for (Index k = 0; k < held.usage.size(); ++k) {
      if (!node.alive[k] || held.usage[k] - least <= room) continue;
      work.kill(number, k);
      ++work.out.oversized;
      changed = true;
    }
    if (!work.out.feasible) return true;
  }
  return changed;
}

// Pairs of strategies that together hold more than there is room for.
bool overfill_edge(Working& work, Edge& edge, const Least& free) {
  const Node &a = work.nodes[Index(edge.a)], &b = work.nodes[Index(edge.b)];
  bool changed = false;
  for (const Held& left : a.held) {
    for (const Held& right : b.held) {
      const int from = std::max(left.from, right.from), to = std::min(left.to, right.to);
      if (from >= to) continue;
      const auto [least_a, most_a] = range(a, left.usage);
      const auto [least_b, most_b] = range(b, right.usage);
      const Cost room = free.of(from, to) + least_a + least_b;
      if (most_a + most_b <= room) continue;
      for (Index k = 0; k < a.costs.size(); ++k) {
        if (!a.alive[k] || left.usage[k] + most_b <= room) continue;
        for (Index j = 0; j < b.costs.size(); ++j) {
          Cost& cost = edge.costs[k * b.costs.size() + j];
          if (!b.alive[j] || cost >= kForbidden || left.usage[k] + right.usage[j] <= room) continue;
          cost = kForbidden;
          changed = true;
        }
      }
    }
  }
  return changed;
}

}  // namespace

bool overfill(Working& work) {
  std::vector<Cost> free = spare(work);
  if (free.empty()) return false;
  if (*std::min_element(free.begin(), free.end()) < 0) {
    work.out.feasible = false;
    return true;
  }
  const Least least(std::move(free));
  bool changed = false;
  for (Index at = 0; at < work.nodes.size() && work.out.feasible; ++at) {
    if (work.nodes[at].gone || !overfill_node(work, static_cast<int>(at), least)) continue;
    changed = true;
    work.push(static_cast<int>(at));
    for (const int e : work.nodes[at].edges) work.push(other(work.edges[Index(e)], static_cast<int>(at)));
  }
  if (changed) return true;  // with less to choose from there is less room, and fewer pairs to look at
  for (Edge& edge : work.edges) {
    if (edge.a < 0 || !overfill_edge(work, edge, least)) continue;
    changed = true;
    for (const int end : {edge.a, edge.b}) work.push(end);
  }
  return changed;
}

}  // namespace fxpar::search
