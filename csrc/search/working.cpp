#include "working.hpp"

#include <algorithm>

namespace fxpar::search {
namespace {

using Index = std::size_t;

std::uint64_t key(int a, int b) {
  return (static_cast<std::uint64_t>(std::min(a, b)) << 32) | static_cast<std::uint32_t>(std::max(a, b));
}

}  // namespace

Working::Working(const Input& input, Cost forbidden) : nodes(input.nodes), moments(input) {
  out.nodes = input.nodes;
  for (Index at = 0; at < input.nodes; ++at) read_node(input, at, forbidden);
  for (Index at = 0; at < input.edges; ++at) read_edge(input, at, forbidden);
  for (Index at = 0; at < nodes.size(); ++at) push(static_cast<int>(at));
}

void Working::read_node(const Input& input, Index at, Cost forbidden) {
  Node& node = nodes[at];
  const auto begin = static_cast<Index>(input.first[at]), end = static_cast<Index>(input.first[at + 1]);
  node.costs.assign(input.costs + begin, input.costs + end);
  node.alive.assign(node.costs.size(), 1);
  node.instead.assign(node.costs.size(), -1);
  node.left = node.costs.size();
  const auto [from, to] = moments.span(at);
  if (from < to) node.held.push_back({from, to, {input.usages + begin, input.usages + end}});
  for (Index k = 0; k < node.costs.size(); ++k) {
    if (node.costs[k] >= forbidden || (input.allowed && !input.allowed[begin + k])) kill(static_cast<int>(at), k);
  }
}

void Working::read_edge(const Input& input, Index at, Cost forbidden) {
  const int a = static_cast<int>(input.tail[at]), b = static_cast<int>(input.head[at]);
  const Cost* costs = input.edge_costs + input.place[at];
  const Index rows = nodes[Index(a)].costs.size(), columns = nodes[Index(b)].costs.size();
  if (a == b) {
    for (Index k = 0; k < rows; ++k) {
      const Cost cost = costs[k * columns + k];
      charge(a, k, cost >= forbidden ? kForbidden : cost);
    }
    return;
  }
  std::vector<Cost> table(costs, costs + rows * columns);
  for (Cost& cost : table) {
    if (cost >= forbidden) cost = kForbidden;
  }
  join(a, b, std::move(table));
}

void Working::join(int a, int b, std::vector<Cost> table) {
  const auto [found, fresh] = pairs_.try_emplace(key(a, b), static_cast<int>(edges.size()));
  if (fresh) {
    for (const int end : {a, b}) nodes[Index(end)].edges.push_back(found->second);
    edges.push_back({a, b, std::move(table)});
    return;
  }
  Edge& edge = edges[Index(found->second)];
  const Index columns = nodes[Index(edge.b)].costs.size(), rows = nodes[Index(edge.a)].costs.size();
  for (Index i = 0; i < rows; ++i) {
    for (Index j = 0; j < columns; ++j) {
      Cost& cost = edge.costs[i * columns + j];
      cost = add(cost, edge.a == a ? table[i * columns + j] : table[j * rows + i]);
    }
  }
}

void Working::unlink(int number) {
  Edge& edge = edges[Index(number)];
  pairs_.erase(key(edge.a, edge.b));
  for (const int end : {edge.a, edge.b}) {
    auto& list = nodes[Index(end)].edges;
    list.erase(std::find(list.begin(), list.end(), number));
  }
  edge.costs = {};
  edge.a = edge.b = -1;
}

void Working::push(int number) {
  Node& node = nodes[Index(number)];
  if (node.gone || node.queued) return;
  node.queued = true;
  queue_.push_back(number);
}

int Working::pop() {
  while (!queue_.empty()) {
    const int number = queue_.front();
    queue_.pop_front();
    nodes[Index(number)].queued = false;
    if (!nodes[Index(number)].gone) return number;
  }
  return -1;
}

void Working::kill(int number, Index k) {
  Node& node = nodes[Index(number)];
  if (!node.alive[k]) return;
  node.alive[k] = 0;
  if (--node.left == 0) out.feasible = false;
}

void Working::charge(int number, Index k, Cost cost) {
  Node& node = nodes[Index(number)];
  node.costs[k] = add(node.costs[k], cost);
  if (node.costs[k] >= kForbidden && node.alive[k]) {
    ++out.impossible;
    kill(number, k);
  }
}

void Working::leave(int number, int p, int q, Index stride, std::vector<int> best) {
  Node& node = nodes[Index(number)];
  node.gone = true;
  node.held.clear();
  out.steps.push_back({number, p, q, stride, std::move(best)});
}

std::size_t Working::first_alive(int number) const {
  const std::vector<char>& alive = nodes[Index(number)].alive;
  return static_cast<Index>(std::find(alive.begin(), alive.end(), 1) - alive.begin());
}

void Working::finish() {
  std::vector<int> variable(nodes.size(), -1);
  Program& program = out.program;
  for (Index number = 0; number < nodes.size(); ++number) {
    Node& node = nodes[number];
    if (node.gone) continue;
    variable[number] = static_cast<int>(out.node.size());
    out.node.push_back(static_cast<int>(number));
    std::vector<int> labels, places(node.costs.size(), -1);
    Variable made;
    for (Index k = 0; k < node.costs.size(); ++k) {
      if (!node.alive[k]) continue;
      places[k] = static_cast<int>(labels.size());
      labels.push_back(static_cast<int>(k));
      made.costs.push_back(node.costs[k]);
    }
    for (Held& held : node.held) {
      std::vector<Cost> usage;
      for (const int k : labels) usage.push_back(held.usage[Index(k)]);
      made.held.push_back({held.from, held.to, std::move(usage)});
    }
    for (Index k = 0; k < places.size(); ++k) {
      Index good = k;
      while (!node.alive[good] && node.instead[good] >= 0) good = Index(node.instead[good]);
      places[k] = places[good];
    }
    out.places.push_back(std::move(places));
    out.labels.push_back(std::move(labels));
    program.variables.push_back(std::move(made));
  }
  for (const Edge& edge : edges) {
    if (edge.a < 0) continue;
    Edge made{variable[Index(edge.a)], variable[Index(edge.b)], {}};
    const Index columns = nodes[Index(edge.b)].costs.size();
    for (const int k : out.labels[Index(made.a)]) {
      for (const int j : out.labels[Index(made.b)]) made.costs.push_back(edge.costs[Index(k) * columns + Index(j)]);
    }
    program.edges.push_back(std::move(made));
  }
  moments.finish(program);
}

}  // namespace fxpar::search
