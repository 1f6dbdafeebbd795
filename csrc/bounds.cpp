#include "bounds.hpp"

#include <algorithm>
#include <cstdint>
#include <queue>
#include <limits>

namespace fxpar {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

std::size_t at(int index) { return static_cast<std::size_t>(index); }

void lower(std::vector<double>& values, const std::vector<double>& left, const std::vector<double>& right) {
  for (std::size_t node = 0; node < values.size(); ++node) values[node] = std::min(values[node], left[node] + right[node]);
}

}  // namespace

Bounds::Bounds(const std::vector<std::vector<double>>& costs)
    : own_(costs), excess_(costs), least_(costs.size(), kInfinite), places_(costs.size()) {
  for (std::size_t variable = 0; variable < costs.size(); ++variable) {
    alive_.emplace_back(costs[variable].size(), 0);
    for (std::size_t choice = 0; choice < costs[variable].size(); ++choice) {
      alive_[variable][choice] = costs[variable][choice] < kInfinite;
      least_[variable] = std::min(least_[variable], costs[variable][choice]);
    }
  }
}

int Bounds::add_graph(Graph graph) {
  back_.push_back(reversed(graph));
  forward_.push_back(std::move(graph));
  return static_cast<int>(forward_.size()) - 1;
}

void Bounds::set_costs(int graph, const std::vector<double>& arcs) {
  forward_[at(graph)].costs = arcs;
  back_[at(graph)] = reversed(forward_[at(graph)]);
  for (Part& part : parts_) {
    if (part.graph != graph) continue;
    ++part.version;
    const auto& alive = alive_[at(part.leaves[0].variable)];
    const std::vector<double> found = marginal(part, 0);
    part.least = kInfinite;
    for (std::size_t choice = 0; choice < found.size(); ++choice) {
      if (alive[choice]) part.least = std::min(part.least, found[choice]);
    }
  }
}

void Bounds::add_tree(int graph, std::vector<Leaf> leaves) { add({graph, std::move(leaves), {}, 0.0}); }

void Bounds::add_table(std::vector<Leaf> leaves, std::vector<double> values) {
  const double least = values.empty() ? 0.0 : *std::min_element(values.begin(), values.end());
  add({-1, std::move(leaves), std::move(values), least});
}

void Bounds::add(Part part) {
  for (std::size_t leaf = 0; leaf < part.leaves.size(); ++leaf) {
    const std::size_t variable = at(part.leaves[leaf].variable);
    part.leaves[leaf].shift.assign(own_[variable].size(), 0.0);
    places_[variable].push_back({parts_.size(), leaf});
  }
  parts_.push_back(std::move(part));
  toward_.clear();
}

// A variable that hangs on the rest by one part of two leaves gives that part all it has, and gets nothing back: what
// is left without such variables has all the cycles, and converges faster alone.
void Bounds::find_trees() {
  toward_.assign(own_.size(), kNone);
  hanging_.clear();
  std::vector<std::size_t> left(own_.size());
  std::queue<std::size_t> ends;
  for (std::size_t variable = 0; variable < own_.size(); ++variable) {
    left[variable] = places_[variable].size();
    if (left[variable] == 1) ends.push(variable);
  }
  std::vector<char> gone(parts_.size(), 0);
  for (; !ends.empty(); ends.pop()) {
    const std::size_t variable = ends.front();
    for (const Place& place : places_[variable]) {
      const Part& part = parts_[place.part];
      if (gone[place.part] || part.leaves.size() != 2) continue;
      gone[place.part] = 1;
      toward_[variable] = place.part;
      hanging_.push_back(variable);
      const std::size_t other = at(part.leaves[1 - place.leaf].variable);
      if (--left[other] == 1) ends.push(other);
    }
  }
}

void Bounds::add_costs(int variable, const std::vector<double>& more) {
  auto& own = own_[at(variable)];
  least_[at(variable)] = kInfinite;
  for (std::size_t choice = 0; choice < own.size(); ++choice) {
    own[choice] += more[choice];
    if (alive_[at(variable)][choice]) least_[at(variable)] = std::min(least_[at(variable)], own[choice]);
  }
}

double Bounds::total() const {
  double sum = 0.0;
  for (const double least : least_) sum += least;
  for (const Part& part : parts_) sum += part.least;
  return sum;
}

double Bounds::sweep(double limit, bool backwards) {
  const int count = static_cast<int>(own_.size());
  if (toward_.size() != own_.size()) find_trees();
  for (int step = 0; step < count; ++step) {
    if (!visit(backwards ? count - 1 - step : step, limit, backwards)) return kInfinite;
  }
  return total();
}

std::vector<std::vector<double>> Bounds::excess() {
  for (std::size_t number = toward_.size() == own_.size() ? hanging_.size() : 0; number-- > 0;) {
    const std::size_t variable = hanging_[number];
    Part& part = parts_[toward_[variable]];
    const std::size_t leaf = at(part.leaves[0].variable) == variable ? 0 : 1;
    Leaf& other = part.leaves[1 - leaf];
    const std::vector<double> before = other.shift;
    for (std::size_t choice = 0; choice < before.size(); ++choice) {
      other.shift[choice] += excess_[at(other.variable)][choice];
    }
    const std::vector<double> found = marginal(part, leaf);
    other.shift = before;
    for (std::size_t choice = 0; choice < found.size(); ++choice) {
      excess_[variable][choice] = alive_[variable][choice] ? found[choice] : kInfinite;
    }
  }
  return excess_;
}

bool Bounds::visit(int variable, double limit, bool backwards) {
  auto &own = own_[at(variable)], &excess = excess_[at(variable)];
  auto& alive = alive_[at(variable)];
  std::size_t before = 0, after = 0;
  std::vector<Place> on;
  for (const Place& place : places_[at(variable)]) {
    Part& part = parts_[place.part];
    if (toward_[at(variable)] == place.part) {
      on.push_back(place);
      continue;
    }
    auto& shift = part.leaves[place.leaf].shift;
    const bool changed = part.leaves[place.leaf].seen != part.version;
    const std::vector<double> marginal = changed ? this->marginal(part, place.leaf) : std::vector<double>();
    for (std::size_t choice = 0; changed && choice < own.size(); ++choice) {
      if (!(marginal[choice] < kInfinite)) {  // with this choice the part has no finite cost
        alive[choice] = 0;
        own[choice] = kInfinite;
      }
      if (!alive[choice]) continue;
      own[choice] += marginal[choice];
      shift[choice] -= marginal[choice];
    }
    if (changed) {
      part.least = 0.0;
      part.leaves[place.leaf].seen = ++part.version;
    }
    bool tree = false;  // the other variable hangs on this one
    for (const Leaf& leaf : part.leaves) tree |= toward_[at(leaf.variable)] == place.part;
    if (tree) continue;
    bool earlier = false, later = false;
    for (const Leaf& leaf : part.leaves) {
      earlier |= leaf.variable < variable;
      later |= leaf.variable > variable;
    }
    before += earlier;
    after += later;
    if (backwards ? earlier : later) on.push_back(place);
  }
  double least = kInfinite;
  for (std::size_t choice = 0; choice < own.size(); ++choice) {
    if (alive[choice]) least = std::min(least, own[choice]);
  }
  least_[at(variable)] = least;
  if (!(least < kInfinite)) return false;
  const double rest = total();
  bool fewer = false;
  for (std::size_t choice = 0; choice < own.size(); ++choice) {
    excess[choice] = alive[choice] ? own[choice] - least : kInfinite;
    if (alive[choice] && !(rest + excess[choice] <= limit)) {
      alive[choice] = 0;
      excess[choice] = kInfinite;
      fewer = true;
    }
  }
  if (!(rest <= limit)) return false;
  for (const Place& place : places_[at(variable)]) {
    Part& part = parts_[place.part];
    auto& seen = part.leaves[place.leaf].seen;
    const bool same = seen == part.version;
    if (fewer) ++part.version;
    if (same) seen = part.version;
  }
  const double share = 1.0 / static_cast<double>(std::max({before, after, std::size_t{1}}));
  std::vector<double> given(own.size(), 0.0);
  for (std::size_t choice = 0; choice < own.size(); ++choice) {
    if (alive[choice]) given[choice] = share * own[choice];
  }
  for (const Place& place : on) {
    ++parts_[place.part].version;
    auto& shift = parts_[place.part].leaves[place.leaf].shift;
    for (std::size_t choice = 0; choice < own.size(); ++choice) {
      shift[choice] += given[choice];
      own[choice] -= given[choice];
    }
    parts_[place.part].least += share * least;
    least_[at(variable)] -= share * least;
  }
  return true;
}

// Of a table or tree with its shifts, the least cost with each choice of one leaf.
std::vector<double> Bounds::marginal(const Part& part, std::size_t leaf) {
  return part.graph < 0 ? table_marginal(part, leaf) : tree_marginal(part, leaf);
}

std::vector<double> Bounds::table_marginal(const Part& part, std::size_t leaf) const {
  const std::size_t axes = part.leaves.size();
  std::vector<double> result(part.leaves[leaf].shift.size(), kInfinite);
  std::vector<std::size_t> digit(axes, 0);
  for (const double value : part.values) {
    double sum = value;
    bool live = true;
    for (std::size_t axis = 0; axis < axes; ++axis) {
      sum += part.leaves[axis].shift[digit[axis]];
      live = live && alive_[at(part.leaves[axis].variable)][digit[axis]];
    }
    if (live) result[digit[leaf]] = std::min(result[digit[leaf]], sum);
    for (std::size_t axis = axes; axis-- > 0;) {
      if (++digit[axis] < part.leaves[axis].shift.size()) break;
      digit[axis] = 0;
    }
  }
  return result;
}

// At each node, the least shift of a choice of the leaf that is there.
std::vector<double> Bounds::entry(const Part& part, std::size_t leaf) const {
  const Leaf& item = part.leaves[leaf];
  std::vector<double> values(forward_[at(part.graph)].nodes(), kInfinite);
  const auto& alive = alive_[at(item.variable)];
  for (std::size_t choice = 0; choice < item.shift.size(); ++choice) {
    double& value = values[at(item.states[choice])];
    if (alive[choice]) value = std::min(value, item.shift[choice]);
  }
  return values;
}

std::vector<double> Bounds::tree_marginal(const Part& part, std::size_t leaf) {
  const Graph &forward = forward_[at(part.graph)], &back = back_[at(part.graph)];
  const std::size_t nodes = forward.nodes();
  std::vector<std::size_t> others;
  for (std::size_t other = 1; other < part.leaves.size(); ++other) {
    if (other != leaf) others.push_back(other);
  }
  const std::uint32_t sets = std::uint32_t{1} << others.size();
  // Below each node: the tree that reaches a set of the other leaves.
  std::vector<std::vector<double>> below(sets);
  for (std::uint32_t set = 1; set < sets; ++set) {
    auto& values = below[set];
    if ((set & (set - 1)) == 0) {
      std::size_t bit = 0;
      while ((set >> bit) != 1) ++bit;
      values = entry(part, others[bit]);
    } else {
      values.assign(nodes, kInfinite);
      for (std::uint32_t half = (set - 1) & set; half > (set ^ half); half = (half - 1) & set) {
        lower(values, below[half], below[set ^ half]);
      }
    }
    spread_(back, values);
  }
  std::vector<double> values;
  if (leaf == 0) {
    values = sets == 1 ? std::vector<double>(nodes, 0.0) : below[sets - 1];
  } else {  // Above each node: the tree from the root that reaches a set of the other leaves, and the node.
    std::vector<std::vector<double>> above(sets);
    for (std::uint32_t set = 0; set < sets; ++set) {
      if (set == 0) {
        above[set] = entry(part, 0);
      } else {
        above[set].assign(nodes, kInfinite);
        for (std::uint32_t half = set; half != 0; half = (half - 1) & set) lower(above[set], above[set ^ half], below[half]);
      }
      spread_(forward, above[set]);
    }
    values = above[sets - 1];
  }
  const Leaf& item = part.leaves[leaf];
  std::vector<double> result(item.shift.size());
  for (std::size_t choice = 0; choice < result.size(); ++choice) result[choice] = values[at(item.states[choice])] + item.shift[choice];
  return result;
}

}  // namespace fxpar
