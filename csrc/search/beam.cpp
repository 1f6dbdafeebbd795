// Relaxation::beam: partial choices side by side, with the messages as an estimate of what is still to come.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <unordered_map>

#include "relaxation.hpp"

namespace fxpar::search {
namespace {

using Index = std::size_t;

constexpr Index kGrades = 48;    // of the memory at a moment
constexpr Index kComplete = 256;  // choices handed back

Cost usage_at(const Variable& variable, int moment, Index k) {
  for (const Held& held : variable.held) {
    if (held.from <= moment && moment < held.to) return held.usage[k];
  }
  return 0;
}

// A partial choice: its bound, and the last choice made with where it came from.
struct Partial {
  double bound;
  int parent;
  int choice;
};

}  // namespace

void Relaxation::beam(const Program& program, const std::vector<int>& moments, Index width,
                      std::vector<std::vector<int>>& choices) {
  // The core anew as a bound plus terms that are not negative (see slack()).
  std::vector<std::vector<double>> own(costs_.size() ? before_.size() : 0);
  std::vector<std::vector<double>> left(links_.size());
  std::vector<double> sum;
  for (auto v = core_.rbegin(); v != core_.rend(); ++v) {
    const auto &before = before_[Index(*v)], &after = after_[Index(*v)];
    total(*v, sum);
    const double least = *std::min_element(sum.begin(), sum.end());
    for (double& cost : sum) cost = infinite(cost) ? kInfinite : cost - least;
    const double part = 1.0 / static_cast<double>(std::max<Index>({before.size(), after.size(), 1}));
    for (const Adjacent& edge : before) {
      const Index to = tables_.choices(edge.to);
      const double base = send(edge, sum.size(), to, sum, part);
      const auto& link = links_[Index(edge.link)];
      const double* table = (edge.is_a ? link.forward : link.backward).data();
      auto& terms = left[Index(edge.link)];  // [a][b]
      terms.assign(sum.size() * to, kInfinite);
      for (Index k = 0; k < sum.size(); ++k) {
        for (Index j = 0; j < to; ++j) {
          const double out = messages_[edge.out + j];
          if (infinite(sum[k]) || infinite(out) || infinite(table[k * to + j])) continue;
          const double term = part * sum[k] - messages_[edge.in + k] + table[k * to + j] - out - base;
          terms[edge.is_a ? k * to + j : j * sum.size() + k] = std::max(0.0, term);
        }
      }
    }
    for (double& cost : sum) cost = std::min(kInfinite, cost * (1.0 - part * static_cast<double>(before.size())));
    own[Index(*v)] = sum;
  }
  std::vector<std::vector<Adjacent>> near(before_.size());
  std::vector<Index> open(before_.size(), 0);  // neighbours still to come
  for (const int v : core_) {
    near[Index(v)] = before_[Index(v)];
    near[Index(v)].insert(near[Index(v)].end(), after_[Index(v)].begin(), after_[Index(v)].end());
    open[Index(v)] = near[Index(v)].size();
  }
  std::vector<char> done(before_.size(), 0);
  std::vector<int> frontier, order;
  std::vector<std::vector<Partial>> levels;
  std::vector<std::u16string> states{u""};
  std::vector<double> bounds{0.0};
  std::vector<std::vector<Cost>> used{std::vector<Cost>(moments.size(), 0)};
  while (order.size() < core_.size()) {
    // The variable that leaves the fewest open ends, by the number of their choices.
    int v = -1;
    double fewest = std::numeric_limits<double>::infinity();
    for (const int candidate : core_) {
      if (done[Index(candidate)]) continue;
      double growth = 0;
      bool joined = frontier.empty();
      Index coming = open[Index(candidate)];
      for (const Adjacent& edge : near[Index(candidate)]) {
        if (!done[Index(edge.to)]) continue;
        joined = true;
        if (open[Index(edge.to)] == 1) growth -= std::log2(static_cast<double>(tables_.choices(edge.to)));
      }
      if (!joined) continue;
      if (coming > 0) growth += std::log2(static_cast<double>(tables_.choices(candidate)));
      if (growth < fewest) {
        fewest = growth;
        v = candidate;
      }
    }
    if (v < 0) {  // another part of the graph
      v = *std::find_if(core_.begin(), core_.end(), [&](int other) { return !done[Index(other)]; });
    }
    const Index size = tables_.choices(v);
    std::vector<std::pair<Index, const std::vector<double>*>> joins;  // place in the frontier, terms
    std::vector<char> v_is_a;
    for (const Adjacent& edge : near[Index(v)]) {
      if (!done[Index(edge.to)]) continue;
      const auto at = std::find(frontier.begin(), frontier.end(), edge.to);
      joins.push_back({static_cast<Index>(at - frontier.begin()), &left[Index(edge.link)]});
      v_is_a.push_back(edge.is_a);
      --open[Index(edge.to)];
    }
    done[Index(v)] = 1;
    open[Index(v)] -= joins.size();
    std::vector<Index> kept;
    for (Index at = 0; at < frontier.size(); ++at) {
      if (open[Index(frontier[at])] > 0) kept.push_back(at);
    }
    std::vector<Partial> made;
    std::vector<double> cost(size);
    for (Index state = 0; state < states.size(); ++state) {
      cost = own[Index(v)];
      for (Index number = 0; number < joins.size(); ++number) {
        const auto& [place, terms] = joins[number];
        const Index other = states[state][place];
        const Index others = terms->size() / size;
        for (Index k = 0; k < size; ++k) cost[k] += (*terms)[v_is_a[number] ? k * others + other : other * size + k];
      }
      for (Index k = 0; k < size; ++k) {
        if (!infinite(cost[k])) made.push_back({bounds[state] + cost[k], static_cast<int>(state), static_cast<int>(k)});
      }
    }
    std::sort(made.begin(), made.end(), [](const Partial& one, const Partial& two) {
      return one.bound != two.bound ? one.bound < two.bound
             : one.parent != two.parent ? one.parent < two.parent : one.choice < two.choice;
    });
    std::vector<std::u16string> next;
    std::vector<double> next_bounds;
    std::vector<Partial> level;
    std::vector<std::vector<Cost>> next_used;
    std::unordered_map<std::u16string, char> seen;
    std::vector<Cost> usage(moments.size() * size), now(moments.size());
    for (Index at = 0; at < moments.size(); ++at) {
      for (Index k = 0; k < size; ++k) usage[at * size + k] = usage_at(program.variables[Index(v)], moments[at], k);
    }
    for (const Partial& one : made) {
      std::u16string state;
      for (const Index at : kept) state.push_back(states[Index(one.parent)][at]);
      if (open[Index(v)] > 0) state.push_back(static_cast<char16_t>(one.choice));
      std::u16string key = state;
      bool fits = true;
      for (Index at = 0; at < moments.size() && fits; ++at) {
        const Cost room = program.room[Index(moments[at])];
        now[at] = used[Index(one.parent)][at] + usage[at * size + Index(one.choice)];
        fits = now[at] <= room;
        const double share = static_cast<double>(now[at]) / std::max(1.0, static_cast<double>(room));
        key.push_back(static_cast<char16_t>(share * static_cast<double>(kGrades)));
      }
      if (!fits || !seen.try_emplace(std::move(key), 1).second) continue;
      next.push_back(std::move(state));
      next_used.push_back(now);
      next_bounds.push_back(one.bound);
      level.push_back(one);
      if (level.size() >= width) break;
    }
    if (level.empty()) return;  // every partial choice met a forbidden entry
    std::vector<int> ends;
    for (const Index at : kept) ends.push_back(frontier[at]);
    if (open[Index(v)] > 0) ends.push_back(v);
    frontier = std::move(ends);
    states = std::move(next);
    bounds = std::move(next_bounds);
    used = std::move(next_used);
    levels.push_back(std::move(level));
    order.push_back(v);
  }
  for (Index end = 0; end < std::min(kComplete, levels.empty() ? 0 : levels.back().size()); ++end) {
    std::vector<int> choice(before_.size(), 0);
    for (Index at = levels.size(), state = end; at-- > 0;) {
      choice[Index(order[at])] = levels[at][state].choice;
      state = static_cast<Index>(levels[at][state].parent);
    }
    choices.push_back(std::move(choice));
  }
}

}  // namespace fxpar::search
