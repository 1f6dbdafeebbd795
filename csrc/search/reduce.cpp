#include "reduce.hpp"

#include <algorithm>
#include <deque>
#include <unordered_map>

#include "moments.hpp"

namespace fxpar::search {
namespace {

using Index = std::size_t;

struct Node {
  std::vector<Cost> costs;
  std::vector<char> alive;
  std::vector<Held> held;  // moments; may overlap
  std::vector<int> edges;  // numbers in Graph::edges; may be stale
  Index left = 0;
  bool gone = false, queued = false;
};

// Nodes and edges while they are being reduced. Strategies keep their numbers; dead ones are only marked.
class Reducer {
 public:
  Reducer(const Input& input, Cost forbidden) : input_(input), moments_(input) {
    nodes_.resize(input.nodes);
    for (Index at = 0; at < input.nodes; ++at) read_node(at, forbidden);
    for (Index at = 0; at < input.edges; ++at) read_edge(at, forbidden);
    out_.nodes = input.nodes;
  }

  Reduced run(bool reductions) {
    for (Index at = 0; at < nodes_.size(); ++at) push(static_cast<int>(at));
    drain(reductions);
    while (reductions && out_.feasible && dominate()) drain(true);
    if (out_.feasible) finish();
    return std::move(out_);
  }

 private:
  void read_node(Index at, Cost forbidden) {
    Node& node = nodes_[at];
    const auto begin = static_cast<Index>(input_.first[at]), end = static_cast<Index>(input_.first[at + 1]);
    node.costs.assign(input_.costs + begin, input_.costs + end);
    node.alive.assign(node.costs.size(), 1);
    node.left = node.costs.size();
    const auto [from, to] = moments_.span(at);
    if (from < to) node.held.push_back({from, to, {input_.usages + begin, input_.usages + end}});
    for (Index k = 0; k < node.costs.size(); ++k) {
      if (node.costs[k] >= forbidden || (input_.allowed && !input_.allowed[begin + k])) kill(static_cast<int>(at), k);
    }
  }

  void read_edge(Index at, Cost forbidden) {
    const int a = static_cast<int>(input_.tail[at]), b = static_cast<int>(input_.head[at]);
    const Cost* costs = input_.edge_costs + input_.place[at];
    const Index rows = nodes_[Index(a)].costs.size(), columns = nodes_[Index(b)].costs.size();
    if (a == b) {
      for (Index k = 0; k < rows; ++k) charge(a, k, costs[k * columns + k] >= forbidden ? kForbidden : costs[k * columns + k]);
      return;
    }
    std::vector<Cost> table(costs, costs + rows * columns);
    for (Cost& cost : table) {
      if (cost >= forbidden) cost = kForbidden;
    }
    join(a, b, std::move(table));
  }

  static std::uint64_t key(int a, int b) {
    return (static_cast<std::uint64_t>(std::min(a, b)) << 32) | static_cast<std::uint32_t>(std::max(a, b));
  }

  // Adds a table over (a, b); one edge is kept per pair.
  void join(int a, int b, std::vector<Cost> table) {
    const auto [found, fresh] = pairs_.try_emplace(key(a, b), static_cast<int>(edges_.size()));
    if (fresh) {
      for (const int end : {a, b}) nodes_[Index(end)].edges.push_back(found->second);
      edges_.push_back({a, b, std::move(table)});
      return;
    }
    Edge& edge = edges_[Index(found->second)];
    const Index columns = nodes_[Index(edge.b)].costs.size(), rows = nodes_[Index(edge.a)].costs.size();
    for (Index i = 0; i < rows; ++i) {
      for (Index j = 0; j < columns; ++j) {
        Cost& cost = edge.costs[i * columns + j];
        cost = add(cost, edge.a == a ? table[i * columns + j] : table[j * rows + i]);
      }
    }
  }

  void unlink(int number) {
    Edge& edge = edges_[Index(number)];
    pairs_.erase(key(edge.a, edge.b));
    for (const int end : {edge.a, edge.b}) {
      auto& list = nodes_[Index(end)].edges;
      list.erase(std::find(list.begin(), list.end(), number));
    }
    edge.costs = {};
    edge.a = edge.b = -1;
  }

  void push(int number) {
    Node& node = nodes_[Index(number)];
    if (node.gone || node.queued) return;
    node.queued = true;
    queue_.push_back(number);
  }

  void kill(int number, Index k) {
    Node& node = nodes_[Index(number)];
    if (!node.alive[k]) return;
    node.alive[k] = 0;
    if (--node.left == 0) out_.feasible = false;
  }

  void charge(int number, Index k, Cost cost) {
    Node& node = nodes_[Index(number)];
    node.costs[k] = add(node.costs[k], cost);
    if (node.costs[k] >= kForbidden && node.alive[k]) {
      ++out_.impossible;
      kill(number, k);
    }
  }

  // The entry of an edge seen from one of its ends.
  Cost at(const Edge& edge, int from, Index k, Index j) const {
    const Index columns = nodes_[Index(edge.b)].costs.size();
    return edge.a == from ? edge.costs[k * columns + j] : edge.costs[j * columns + k];
  }

  static int other(const Edge& edge, int from) { return edge.a == from ? edge.b : edge.a; }

  void drain(bool reductions) {
    while (!queue_.empty() && out_.feasible) {
      const int number = queue_.front();
      queue_.pop_front();
      nodes_[Index(number)].queued = false;
      if (nodes_[Index(number)].gone) continue;
      support(number);
      if (!out_.feasible || !reductions) continue;
      if (nodes_[Index(number)].left == 1) {
        fix(number);
        continue;
      }
      if (tie(number)) continue;
      if (idle(number)) eliminate(number);
    }
  }

  // Strategies that fit with none of a neighbour's are impossible.
  void support(int number) {
    Node& node = nodes_[Index(number)];
    for (const int e : node.edges) {
      const Edge& edge = edges_[Index(e)];
      const int to = other(edge, number);
      const Node& next = nodes_[Index(to)];
      bool changed = false;
      for (Index j = 0; j < next.costs.size(); ++j) {
        if (!next.alive[j]) continue;
        bool some = false;
        for (Index k = 0; k < node.costs.size() && !some; ++k) some = node.alive[k] && at(edge, number, k, j) < kForbidden;
        if (some) continue;
        ++out_.impossible;
        kill(to, j);
        changed = true;
        if (!out_.feasible) return;
      }
      if (changed) push(to);
    }
  }

  void fix(int number) {
    Node& node = nodes_[Index(number)];
    const auto k = static_cast<Index>(std::find(node.alive.begin(), node.alive.end(), 1) - node.alive.begin());
    while (!node.edges.empty()) {
      const int e = node.edges.back();
      const Edge edge = edges_[Index(e)];
      const int to = other(edge, number);
      std::vector<Cost> row(nodes_[Index(to)].costs.size());
      for (Index j = 0; j < row.size(); ++j) row[j] = at(edge, number, k, j);
      unlink(e);
      for (Index j = 0; j < row.size(); ++j) charge(to, j, row[j]);
      push(to);
    }
    for (const Held& held : node.held) moments_.take(held.from, held.to, held.usage[k]);
    out_.program.constant = add(out_.program.constant, node.costs[k]);
    leave(number, -1, -1, 1, {static_cast<int>(k)});
  }

  void leave(int number, int p, int q, Index stride, std::vector<int> best) {
    Node& node = nodes_[Index(number)];
    node.gone = true;
    node.held.clear();
    out_.steps.push_back({number, p, q, stride, std::move(best)});
  }

  // For each strategy of `from` the only one of `to` that fits, or nothing if some has several.
  std::vector<int> function(const Edge& edge, int from, int to) const {
    const Node &left = nodes_[Index(from)], &right = nodes_[Index(to)];
    std::vector<int> only(left.costs.size(), -1);
    for (Index k = 0; k < only.size(); ++k) {
      if (!left.alive[k]) continue;
      for (Index j = 0; j < right.costs.size(); ++j) {
        if (!right.alive[j] || at(edge, from, k, j) >= kForbidden) continue;
        if (only[k] >= 0) return {};
        only[k] = static_cast<int>(j);
      }
      if (only[k] < 0) return {};
    }
    return only;
  }

  // A node whose strategy follows from a neighbour's becomes part of it (equality edges).
  bool tie(int number) {
    for (const int e : std::vector<int>(nodes_[Index(number)].edges)) {
      const Edge& edge = edges_[Index(e)];
      const int to = other(edge, number);
      const bool smaller = nodes_[Index(number)].edges.size() <= nodes_[Index(to)].edges.size();
      for (const bool first : {smaller, !smaller}) {
        const int into = first ? to : number, from = first ? number : to;
        const std::vector<int> map = function(edge, into, from);
        if (map.empty()) continue;
        merge(e, from, into, map);
        if (from == number) return true;
        break;
      }
    }
    return false;
  }

  void merge(int e, int from, int into, const std::vector<int>& map) {
    Node& node = nodes_[Index(from)];
    const Edge tied = edges_[Index(e)];
    const Index size = map.size();
    unlink(e);
    const auto image = [&](Index k) { return static_cast<Index>(map[k]); };
    for (Index k = 0; k < size; ++k) {
      if (map[k] >= 0) charge(into, k, add(node.costs[image(k)], at(tied, into, k, image(k))));
    }
    while (!node.edges.empty()) {
      const int number = node.edges.back();
      const Edge edge = edges_[Index(number)];
      const int to = other(edge, from);
      const Index columns = nodes_[Index(to)].costs.size();
      std::vector<Cost> table(size * columns, kForbidden);
      for (Index k = 0; k < size; ++k) {
        if (map[k] < 0) continue;
        for (Index j = 0; j < columns; ++j) table[k * columns + j] = at(edge, from, image(k), j);
      }
      unlink(number);
      join(into, to, std::move(table));
      push(to);
    }
    for (Held& held : node.held) {
      std::vector<Cost> usage(size, 0);
      for (Index k = 0; k < size; ++k) {
        if (map[k] >= 0) usage[k] = held.usage[image(k)];
      }
      nodes_[Index(into)].held.push_back({held.from, held.to, std::move(usage)});
    }
    leave(from, into, -1, 1, map);
    push(into);
    ++out_.equal;
  }

  // Whether all that is left of a node uses the same memory, so that its cost alone decides.
  bool idle(int number) const {
    const Node& node = nodes_[Index(number)];
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

  void eliminate(int number) {
    Node& node = nodes_[Index(number)];
    const std::vector<int> around = node.edges;
    std::vector<int> next;
    for (const int e : around) next.push_back(other(edges_[Index(e)], number));
    const Index rows = next.empty() ? 1 : nodes_[Index(next[0])].costs.size();
    const Index columns = next.size() < 2 ? 1 : nodes_[Index(next[1])].costs.size();
    std::vector<Cost> least(rows * columns, kForbidden);
    std::vector<int> best(rows * columns, -1);
    for (Index k = 0; k < node.costs.size(); ++k) {
      if (!node.alive[k]) continue;
      for (Index i = 0; i < rows; ++i) {
        const Cost left = next.empty() ? node.costs[k] : add(node.costs[k], at(edges_[Index(around[0])], number, k, i));
        for (Index j = 0; j < columns; ++j) {
          const Cost sum = next.size() < 2 ? left : add(left, at(edges_[Index(around[1])], number, k, j));
          if (sum < least[i * columns + j]) {
            least[i * columns + j] = sum;
            best[i * columns + j] = static_cast<int>(k);
          }
        }
      }
    }
    const auto k = static_cast<Index>(std::find(node.alive.begin(), node.alive.end(), 1) - node.alive.begin());
    for (const Held& held : node.held) moments_.take(held.from, held.to, held.usage[k]);
    for (const int e : around) unlink(e);
    leave(number, next.empty() ? -1 : next[0], next.size() < 2 ? -1 : next[1], columns, std::move(best));
    ++out_.eliminated;
    if (next.empty()) {
      out_.program.constant = add(out_.program.constant, least[0]);
    } else if (next.size() == 1) {
      for (Index i = 0; i < rows; ++i) charge(next[0], i, least[i]);
    } else {
      join(next[0], next[1], std::move(least));
    }
    for (const int to : next) push(to);
  }

  // Whether taking `good` in place of `bad` never costs and never holds more, whatever the neighbours choose.
  bool better(int number, Index good, Index bad) const {
    const Node& node = nodes_[Index(number)];
    Cost spare = node.costs[bad] - node.costs[good];
    if (spare < 0) return false;
    for (const Held& held : node.held) {
      if (held.usage[good] > held.usage[bad]) return false;
    }
    for (const int e : node.edges) {
      const Edge& edge = edges_[Index(e)];
      const Node& next = nodes_[Index(other(edge, number))];
      Cost least = kForbidden;  // of what `bad` costs more than `good`
      for (Index j = 0; j < next.costs.size(); ++j) {
        if (!next.alive[j]) continue;
        const Cost worse = at(edge, number, bad, j);
        if (worse >= kForbidden) continue;
        least = std::min(least, worse - at(edge, number, good, j));
        if (least < -spare) return false;
      }
      if (least < kForbidden) spare += least;
      if (spare < 0) return false;
    }
    return true;
  }

  bool dominate() {
    const std::size_t before = out_.dominated;
    for (Index number = 0; number < nodes_.size(); ++number) {
      Node& node = nodes_[number];
      if (node.gone) continue;
      bool changed = false;
      for (Index bad = 0; bad < node.costs.size(); ++bad) {
        if (!node.alive[bad]) continue;
        for (Index good = 0; good < node.costs.size(); ++good) {
          if (good == bad || !node.alive[good] || !better(static_cast<int>(number), good, bad)) continue;
          kill(static_cast<int>(number), bad);
          ++out_.dominated;
          changed = true;
          break;
        }
      }
      if (!changed) continue;
      push(static_cast<int>(number));
      for (const int e : node.edges) push(other(edges_[Index(e)], static_cast<int>(number)));
    }
    return out_.dominated > before;
  }

  void finish() {
    std::vector<int> variable(nodes_.size(), -1);
    Program& program = out_.program;
    for (Index number = 0; number < nodes_.size(); ++number) {
      Node& node = nodes_[number];
      if (node.gone) continue;
      variable[number] = static_cast<int>(out_.node.size());
      out_.node.push_back(static_cast<int>(number));
      std::vector<int> labels;
      Variable made;
      for (Index k = 0; k < node.costs.size(); ++k) {
        if (!node.alive[k]) continue;
        labels.push_back(static_cast<int>(k));
        made.costs.push_back(node.costs[k]);
      }
      for (Held& held : node.held) {
        std::vector<Cost> usage;
        for (const int k : labels) usage.push_back(held.usage[Index(k)]);
        made.held.push_back({held.from, held.to, std::move(usage)});
      }
      out_.labels.push_back(std::move(labels));
      program.variables.push_back(std::move(made));
    }
    for (const Edge& edge : edges_) {
      if (edge.a < 0) continue;
      Edge made{variable[Index(edge.a)], variable[Index(edge.b)], {}};
      const Index columns = nodes_[Index(edge.b)].costs.size();
      for (const int k : out_.labels[Index(made.a)]) {
        for (const int j : out_.labels[Index(made.b)]) made.costs.push_back(edge.costs[Index(k) * columns + Index(j)]);
      }
      program.edges.push_back(std::move(made));
    }
    moments_.finish(program);
  }

  const Input& input_;
  Moments moments_;
  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  std::unordered_map<std::uint64_t, int> pairs_;
  std::deque<int> queue_;
  Reduced out_;
};

}  // namespace

std::vector<int> Reduced::expand(const std::vector<int>& choice) const {
  std::vector<int> all(nodes, 0);
  for (std::size_t v = 0; v < node.size(); ++v) {
    all[static_cast<std::size_t>(node[v])] = labels[v][static_cast<std::size_t>(choice[v])];
  }
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::size_t entry = 0;
    if (step->p >= 0) entry = static_cast<std::size_t>(all[static_cast<std::size_t>(step->p)]) * step->stride;
    if (step->q >= 0) entry += static_cast<std::size_t>(all[static_cast<std::size_t>(step->q)]);
    all[static_cast<std::size_t>(step->node)] = step->best[entry];
  }
  return all;
}

Reduced reduce(const Input& input, Cost forbidden, bool reductions) {
  return Reducer(input, forbidden).run(reductions);
}

}  // namespace fxpar::search
