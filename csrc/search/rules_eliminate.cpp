#include "rules.hpp"

#include <algorithm>

namespace fxpar::search {
namespace {

using Index = std::size_t;

// Whether taking `good` in place of `bad` never costs and never holds more, whatever the neighbours choose.
bool better(const Working& work, int number, Index good, Index bad) {
  const Node& node = work.nodes[Index(number)];
  Cost spare = node.costs[bad] - node.costs[good];
  if (spare < 0) return false;
  for (const Held& held : node.held) {
    if (held.usage[good] > held.usage[bad]) return false;
  }
  for (const int e : node.edges) {
    const Edge& edge = work.edges[Index(e)];
    const Node& next = work.nodes[Index(other(edge, number))];
    Cost least = kForbidden;  // of what `bad` costs more than `good`
    for (Index j = 0; j < next.costs.size(); ++j) {
      if (!next.alive[j]) continue;
      const Cost worse = work.at(edge, number, bad, j);
      if (worse >= kForbidden) continue;
      least = std::min(least, worse - work.at(edge, number, good, j));
      if (least < -spare) return false;
    }
    if (least < kForbidden) spare = add(spare, least);
    if (spare < 0) return false;
  }
  return true;
}

}  // namespace

bool idle(const Working& work, int number) {
  const Node& node = work.nodes[Index(number)];
  if (node.edges.size() > 2) return false;
  for (const Held& held : node.held) {
    Cost one = -1;
    for (Index k = 0; k < node.costs.size(); ++k) {
      if (!node.alive[k]) continue;
      if (one >= 0 && held.usage[k] != one) return false;
      one = held.usage[k];
    }
  }
  return true;
}

void eliminate(Working& work, int number) {
  Node& node = work.nodes[Index(number)];
  const std::vector<int> around = node.edges;
  std::vector<int> next;
  for (const int e : around) next.push_back(other(work.edges[Index(e)], number));
  const Index rows = next.empty() ? 1 : work.nodes[Index(next[0])].costs.size();
  const Index columns = next.size() < 2 ? 1 : work.nodes[Index(next[1])].costs.size();
  std::vector<Cost> least(rows * columns, kForbidden);
  std::vector<int> best(rows * columns, -1);
  for (Index k = 0; k < node.costs.size(); ++k) {
    if (!node.alive[k]) continue;
    for (Index i = 0; i < rows; ++i) {
      const Cost left =
          next.empty() ? node.costs[k] : add(node.costs[k], work.at(work.edges[Index(around[0])], number, k, i));
      for (Index j = 0; j < columns; ++j) {
        const Cost sum = next.size() < 2 ? left : add(left, work.at(work.edges[Index(around[1])], number, k, j));
        if (sum < least[i * columns + j]) {
          least[i * columns + j] = sum;
          best[i * columns + j] = static_cast<int>(k);
        }
      }
    }
  }
  const Index k = work.first_alive(number);
  for (const Held& held : node.held) work.moments.take(held.from, held.to, held.usage[k]);
  for (const int e : around) work.unlink(e);
  work.leave(number, next.empty() ? -1 : next[0], next.size() < 2 ? -1 : next[1], columns, std::move(best));
  ++work.out.eliminated;
  if (next.empty()) {
    work.out.program.constant = add(work.out.program.constant, least[0]);
  } else if (next.size() == 1) {
    for (Index i = 0; i < rows; ++i) work.charge(next[0], i, least[i]);
  } else {
    work.join(next[0], next[1], std::move(least));
  }
  for (const int to : next) work.push(to);
}

bool dominate(Working& work) {
  const std::size_t before = work.out.dominated;
  for (Index number = 0; number < work.nodes.size(); ++number) {
    Node& node = work.nodes[number];
    if (node.gone) continue;
    bool changed = false;
    for (Index bad = 0; bad < node.costs.size(); ++bad) {
      if (!node.alive[bad]) continue;
      for (Index good = 0; good < node.costs.size(); ++good) {
        if (good == bad || !node.alive[good] || !better(work, static_cast<int>(number), good, bad)) continue;
        work.kill(static_cast<int>(number), bad);
        node.instead[bad] = static_cast<int>(good);
        ++work.out.dominated;
        changed = true;
        break;
      }
    }
    if (!changed) continue;
    work.push(static_cast<int>(number));
    for (const int e : node.edges) work.push(other(work.edges[Index(e)], static_cast<int>(number)));
  }
  return work.out.dominated > before;
}

}  // namespace fxpar::search
