#include "conversion.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <tuple>

namespace fxpar {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

Graph reversed(const Graph& graph) {
  const std::size_t nodes = graph.nodes();
  Graph result{std::vector<int>(nodes + 1, 0), std::vector<int>(graph.ends.size()),
               std::vector<double>(graph.ends.size())};
  for (const int end : graph.ends) ++result.start[at(end) + 1];
  for (std::size_t node = 0; node < nodes; ++node) result.start[node + 1] += result.start[node];
  std::vector<int> next(result.start.begin(), result.start.end() - 1);
  for (std::size_t node = 0; node < nodes; ++node) {
    for (int arc = graph.start[node]; arc < graph.start[node + 1]; ++arc) {
      const int place = next[at(graph.ends[at(arc)])]++;
      result.ends[at(place)] = static_cast<int>(node);
      result.costs[at(place)] = graph.costs[at(arc)];
    }
  }
  return result;
}

void Spread::operator()(const Graph& graph, std::vector<double>& values) {
  // Starting from the least value, most values are right the first time they are passed on.
  first_.clear();
  queued_.assign(values.size(), 0);
  for (std::size_t node = 0; node < values.size(); ++node) {
    if (values[node] < kInfinite) first_.emplace_back(values[node], static_cast<int>(node));
  }
  std::sort(first_.begin(), first_.end());
  queue_.clear();
  for (const auto& entry : first_) {
    queue_.push_back(entry.second);
    queued_[at(entry.second)] = 1;
  }
  while (!queue_.empty()) {
    const int node = queue_.front();
    queue_.pop_front();
    queued_[at(node)] = 0;
    const double here = values[at(node)];
    for (int arc = graph.start[at(node)]; arc < graph.start[at(node) + 1]; ++arc) {
      const std::size_t end = at(graph.ends[at(arc)]);
      const double there = here + graph.costs[at(arc)];
      if (!(there < values[end])) continue;
      values[end] = there;
      if (queued_[end]) continue;
      queued_[end] = 1;
      queue_.push_back(static_cast<int>(end));
    }
  }
}

void tree_costs(const Graph& graph, const std::vector<int>& roots, const std::vector<std::vector<int>>& sets,
                double* costs) {
  const Graph back = reversed(graph);
  const std::size_t nodes = graph.nodes();
  Spread spread;
  std::map<std::vector<int>, std::vector<double>> known;  // of each set that is a part of another, from every node
  std::function<const std::vector<double>&(const std::vector<int>&)> part;
  const auto grow = [&](const std::vector<int>& set) {
    std::vector<double> values(nodes, kInfinite);
    if (set.size() == 1) values[at(set[0])] = 0.0;
    const std::uint32_t all = (std::uint32_t{1} << set.size()) - 1;
    for (std::uint32_t half = (all - 1) & all; half != 0 && set.size() > 1; half = (half - 1) & all) {
      if ((half & 1) == 0) continue;  // each way to part the set once: one half has the first target
      std::vector<int> left, right;
      for (std::size_t bit = 0; bit < set.size(); ++bit) (half >> bit & 1 ? left : right).push_back(set[bit]);
      const std::vector<double>&one = part(left), &other = part(right);
      for (std::size_t node = 0; node < nodes; ++node) values[node] = std::min(values[node], one[node] + other[node]);
    }
    spread(back, values);
    return values;
  };
  part = [&](const std::vector<int>& set) -> const std::vector<double>& {
    const auto found = known.find(set);
    return found != known.end() ? found->second : known.emplace(set, grow(set)).first->second;
  };
  for (std::size_t number = 0; number < sets.size(); ++number) {
    const auto& set = sets[number];
    std::vector<double> whole;
    if (set.empty()) whole.assign(nodes, 0.0);
    else if (set.size() > 1) whole = grow(set);
    const std::vector<double>& values = set.size() == 1 ? part(set) : whole;
    for (std::size_t root = 0; root < roots.size(); ++root) costs[root * sets.size() + number] = values[at(roots[root])];
  }
}

std::pair<double, std::vector<std::pair<int, int>>> cheapest_tree(const Graph& graph, int root,
                                                                  const std::vector<int>& targets) {
  struct Label {
    double cost = kInfinite;
    int arcs = 0;
    int next = -1;            // the node to go on to, or
    std::uint32_t half = 0;   // the part of the set that one of two trees from here reaches
  };
  std::vector<std::pair<int, int>> arcs;
  if (targets.empty()) return {0.0, arcs};
  const Graph back = reversed(graph);
  const std::size_t nodes = graph.nodes();
  const std::uint32_t all = (std::uint32_t{1} << targets.size()) - 1;
  std::vector<std::vector<Label>> labels(all + 1);
  using Entry = std::tuple<double, int, int>;
  for (std::uint32_t set = 1; set <= all; ++set) {
    auto& here = labels[set];
    here.resize(nodes);
    if ((set & (set - 1)) == 0) {
      std::size_t bit = 0;
      while ((set >> bit) != 1) ++bit;
      here[at(targets[bit])].cost = 0.0;
    }
    for (std::uint32_t half = 1; half < set; ++half) {
      if ((half & set) != half || half > (set ^ half)) continue;
      for (std::size_t node = 0; node < nodes; ++node) {
        const Label &left = labels[half][node], &right = labels[set ^ half][node];
        const double cost = left.cost + right.cost;
        const int count = left.arcs + right.arcs;
        if (cost < here[node].cost || (cost == here[node].cost && cost < kInfinite && count < here[node].arcs)) {
          here[node] = {cost, count, -1, half};
        }
      }
    }
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
    for (std::size_t node = 0; node < nodes; ++node) {
      if (here[node].cost < kInfinite) queue.emplace(here[node].cost, here[node].arcs, static_cast<int>(node));
    }
    while (!queue.empty()) {
      const auto [cost, count, node] = queue.top();
      queue.pop();
      if (cost != here[at(node)].cost || count != here[at(node)].arcs) continue;
      for (int arc = back.start[at(node)]; arc < back.start[at(node) + 1]; ++arc) {
        const int before = back.ends[at(arc)];
        Label& there = here[at(before)];
        const double more = cost + back.costs[at(arc)];
        if (more > there.cost || (more == there.cost && count + 1 > there.arcs)) continue;
        if (more == there.cost && count + 1 == there.arcs) {
          if (more < kInfinite && there.next > node) there.next = node;
          continue;
        }
        there = {more, count + 1, node, 0};
        queue.emplace(more, count + 1, before);
      }
    }
  }
  const double cost = labels[all][at(root)].cost;
  if (!(cost < kInfinite)) return {cost, arcs};
  std::vector<std::pair<std::uint32_t, int>> todo{{all, root}};
  while (!todo.empty()) {
    auto [set, node] = todo.back();
    todo.pop_back();
    const Label& label = labels[set][at(node)];
    if (label.half != 0) {
      todo.emplace_back(set ^ label.half, node);
      todo.emplace_back(label.half, node);
    } else if (label.next >= 0) {
      arcs.emplace_back(node, label.next);
      todo.emplace_back(set, label.next);
    }
  }
  return {cost, arcs};
}

}  // namespace fxpar
