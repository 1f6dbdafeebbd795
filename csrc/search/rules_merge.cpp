#include "rules.hpp"

#include <algorithm>

namespace fxpar::search {
namespace {

using Index = std::size_t;

// For each strategy of `from` the only one of `to` that fits, or nothing if some has several.
std::vector<int> function(const Working& work, const Edge& edge, int from, int to) {
  const Node &left = work.nodes[Index(from)], &right = work.nodes[Index(to)];
  std::vector<int> only(left.costs.size(), -1);
  for (Index k = 0; k < only.size(); ++k) {
    if (!left.alive[k]) continue;
    for (Index j = 0; j < right.costs.size(); ++j) {
      if (!right.alive[j] || work.at(edge, from, k, j) >= kForbidden) continue;
      if (only[k] >= 0) return {};
      only[k] = static_cast<int>(j);
    }
    if (only[k] < 0) return {};
  }
  return only;
}

// The node `from` has strategy map[k] where `into` has k; edge e says so.
void merge(Working& work, int e, int from, int into, const std::vector<int>& map) {
  Node& node = work.nodes[Index(from)];
  const Edge tied = work.edges[Index(e)];
  const Index size = map.size();
  work.unlink(e);
  const auto image = [&](Index k) { return static_cast<Index>(map[k]); };
  for (Index k = 0; k < size; ++k) {
    if (map[k] >= 0) work.charge(into, k, add(node.costs[image(k)], work.at(tied, into, k, image(k))));
  }
  while (!node.edges.empty()) {
    const int number = node.edges.back();
    const Edge edge = work.edges[Index(number)];
    const int to = other(edge, from);
    const Index columns = work.nodes[Index(to)].costs.size();
    std::vector<Cost> table(size * columns, kForbidden);
    for (Index k = 0; k < size; ++k) {
      if (map[k] < 0) continue;
      for (Index j = 0; j < columns; ++j) table[k * columns + j] = work.at(edge, from, image(k), j);
    }
    work.unlink(number);
    work.join(into, to, std::move(table));
    work.push(to);
  }
  for (Held& held : node.held) {
    std::vector<Cost> usage(size, 0);
    for (Index k = 0; k < size; ++k) {
      if (map[k] >= 0) usage[k] = held.usage[image(k)];
    }
    work.nodes[Index(into)].held.push_back({held.from, held.to, std::move(usage)});
  }
  work.leave(from, into, -1, 1, map);
  work.push(into);
  ++work.out.equal;
}

}  // namespace

void support(Working& work, int number) {
  Node& node = work.nodes[Index(number)];
  for (const int e : node.edges) {
    const Edge& edge = work.edges[Index(e)];
    const int to = other(edge, number);
    const Node& next = work.nodes[Index(to)];
    bool changed = false;
    for (Index j = 0; j < next.costs.size(); ++j) {
      if (!next.alive[j]) continue;
      bool some = false;
      for (Index k = 0; k < node.costs.size() && !some; ++k) {
        some = node.alive[k] && work.at(edge, number, k, j) < kForbidden;
      }
      if (some) continue;
      ++work.out.impossible;
      work.kill(to, j);
      changed = true;
      if (!work.out.feasible) return;
    }
    if (changed) work.push(to);
  }
}

void fix(Working& work, int number) {
  Node& node = work.nodes[Index(number)];
  const Index k = work.first_alive(number);
  while (!node.edges.empty()) {
    const int e = node.edges.back();
    const Edge edge = work.edges[Index(e)];
    const int to = other(edge, number);
    std::vector<Cost> row(work.nodes[Index(to)].costs.size());
    for (Index j = 0; j < row.size(); ++j) row[j] = work.at(edge, number, k, j);
    work.unlink(e);
    for (Index j = 0; j < row.size(); ++j) work.charge(to, j, row[j]);
    work.push(to);
  }
  for (const Held& held : node.held) work.moments.take(held.from, held.to, held.usage[k]);
  work.out.program.constant = add(work.out.program.constant, node.costs[k]);
  work.leave(number, -1, -1, 1, {static_cast<int>(k)});
}

bool tie(Working& work, int number) {
  for (const int e : std::vector<int>(work.nodes[Index(number)].edges)) {
    const Edge& edge = work.edges[Index(e)];
    const int to = other(edge, number);
    const bool smaller = work.nodes[Index(number)].edges.size() <= work.nodes[Index(to)].edges.size();
    for (const bool first : {smaller, !smaller}) {
      const int into = first ? to : number, from = first ? number : to;
      const std::vector<int> map = function(work, edge, into, from);
      if (map.empty()) continue;
      merge(work, e, from, into, map);
      if (from == number) return true;
      break;
    }
  }
  return false;
}

}  // namespace fxpar::search
