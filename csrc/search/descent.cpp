#include "descent.hpp"

#include <algorithm>
#include <cmath>

namespace fxpar::search {
namespace {

using Index = std::size_t;
constexpr int kAttempts = 6;      // re-solves with dearer memory before a move is given up
constexpr Index kLargestHub = 12;  // of a variable's neighbours only so many are looked at

Cost usage_at(const Variable& variable, int moment, Index k) {
  const auto after = std::upper_bound(variable.held.begin(), variable.held.end(), moment,
                                      [](int at, const Held& held) { return at < held.from; });
  if (after == variable.held.begin() || moment >= std::prev(after)->to) return 0;
  return std::prev(after)->usage[k];
}

}  // namespace

Descent::Descent(const Program& program, const Tables& tables, std::uint64_t seed)
    : program_(program), tables_(tables), near_(program.variables.size()), random_(seed), profile_(program.room),
      priced_(tables.costs.size(), 0.0), choice_(program.variables.size(), 0),
      position_(program.variables.size(), -1), blocked_(program.variables.size(), 0) {
  for (Index number = 0; number < tables.links.size(); ++number) {
    const auto& link = tables.links[number];
    near_[Index(link.a)].push_back({link.b, static_cast<int>(number), true});
    near_[Index(link.b)].push_back({link.a, static_cast<int>(number), false});
  }
}

void Descent::place(int v, int choice, Cost sign) {
  for (const Held& held : program_.variables[Index(v)].held) {
    profile_.add(held.from, held.to, sign * held.usage[Index(choice)]);
  }
}

void Descent::start(const std::vector<int>& choice) {
  profile_ = Profile(program_.room);
  choice_ = choice;
  cost_ = static_cast<double>(program_.constant);
  for (Index v = 0; v < choice_.size(); ++v) {
    place(static_cast<int>(v), choice_[v], 1);
    cost_ += tables_.costs[tables_.first[v] + Index(choice_[v])];
  }
  for (const auto& link : tables_.links) {
    cost_ += link.forward[Index(choice_[Index(link.a)]) * tables_.choices(link.b) + Index(choice_[Index(link.b)])];
  }
}

void Descent::set_prices(const std::vector<double>& prices) {
  running_.assign(prices.size() + 1, 0.0);
  for (Index at = 0; at < prices.size(); ++at) running_[at + 1] = running_[at] + prices[at];
  unit_ = running_.back();
  if (unit_ <= 0 && !program_.room.empty()) {
    unit_ = std::max(1.0, std::abs(cost_)) / std::max<double>(1.0, static_cast<double>(program_.room[0]));
  }
  std::fill(priced_.begin(), priced_.end(), 0.0);
  for (Index v = 0; v < program_.variables.size(); ++v) {
    for (const Held& held : program_.variables[v].held) {
      const double price = running_[Index(held.to)] - running_[Index(held.from)];
      for (Index k = 0; k < held.usage.size(); ++k) {
        priced_[tables_.first[v] + k] += price * static_cast<double>(held.usage[k]);
      }
    }
  }
}

// The costs of an edge by this variable's choice when the other end has `other_choice`.
const double* Descent::line(const Near& edge, int other_choice) const {
  const auto& link = tables_.links[Index(edge.link)];
  const Index size = tables_.choices(edge.is_a ? link.a : link.b);
  return (edge.is_a ? link.backward : link.forward).data() + Index(other_choice) * size;
}

// A random tree: every variable after the first of its part has exactly one neighbour among those before it.
void Descent::grow(Index size) {
  for (const int v : tree_) position_[Index(v)] = -1;
  tree_.clear();
  parent_.clear();
  link_.clear();
  ++round_;
  std::vector<std::pair<int, const Near*>> frontier;  // place of the parent in the tree, edge from it
  while (tree_.size() < size) {
    int v = -1, parent = -1;
    const Near* edge = nullptr;
    if (frontier.empty() || random_.unit() < 0.05) {
      v = static_cast<int>(random_.below(choice_.size()));
    } else {
      const Index pick = random_.below(frontier.size());
      std::swap(frontier[pick], frontier.back());
      parent = frontier.back().first;
      edge = frontier.back().second;
      v = edge->to;
      frontier.pop_back();
    }
    if (position_[Index(v)] >= 0 || blocked_[Index(v)] == round_) {
      if (edge == nullptr && tree_.size() + 4 > choice_.size()) break;
      if (edge == nullptr && random_.unit() < 0.2) break;
      continue;
    }
    int inside = 0;
    const Near* up = nullptr;
    for (const Near& near : near_[Index(v)]) {
      if (position_[Index(near.to)] < 0) continue;
      ++inside;
      up = &near;
      parent = position_[Index(near.to)];
    }
    if (inside > 1) {
      blocked_[Index(v)] = round_;
      continue;
    }
    if (inside == 0) parent = -1;
    position_[Index(v)] = static_cast<int>(tree_.size());
    tree_.push_back(v);
    parent_.push_back(parent);
    link_.push_back(up);
    const auto& around = near_[Index(v)];
    const Index count = std::min(around.size(), kLargestHub);
    const Index shift = random_.below(std::max<Index>(around.size(), 1));
    for (Index at = 0; at < count; ++at) {
      frontier.push_back({static_cast<int>(tree_.size()) - 1, &around[(shift + at) % around.size()]});
    }
  }
}

// The cheapest choices of the tree at the costs in sum_, into found_.
void Descent::solve() {
  best_ = sum_;
  for (Index at = tree_.size(); at-- > 0;) {
    if (parent_[at] < 0) continue;
    const Index to = Index(parent_[at]);
    const Index rows = tables_.choices(tree_[to]), size = tables_.choices(tree_[at]);
    const double* own = best_.data() + offset_[at];
    double* up = best_.data() + offset_[to];
    for (Index i = 0; i < rows; ++i) {
      const double* costs = line(*link_[at], static_cast<int>(i));
      double least = kInfinite * 4;
      int where = 0;
      for (Index k = 0; k < size; ++k) {
        if (own[k] + costs[k] < least) {
          least = own[k] + costs[k];
          where = static_cast<int>(k);
        }
      }
      up[i] += least;
      back_[back_offset_[at] + i] = where;
    }
  }
  for (Index at = 0; at < tree_.size(); ++at) {
    if (parent_[at] >= 0) {
      found_[at] = back_[back_offset_[at] + Index(found_[Index(parent_[at])])];
    } else {
      const double* own = best_.data() + offset_[at];
      found_[at] = static_cast<int>(std::min_element(own, own + tables_.choices(tree_[at])) - own);
    }
  }
}

bool Descent::move(Index size, double weight, double temperature) {
  grow(size);
  const Index count = tree_.size();
  offset_.assign(count + 1, 0);
  back_offset_.assign(count + 1, 0);
  for (Index at = 0; at < count; ++at) {
    offset_[at + 1] = offset_[at] + tables_.choices(tree_[at]);
    back_offset_[at + 1] = back_offset_[at] + (parent_[at] < 0 ? 0 : tables_.choices(tree_[Index(parent_[at])]));
  }
  fixed_.resize(offset_[count]);
  back_.resize(back_offset_[count]);
  found_.assign(count, 0);
  double before = 0, memory = 0;
  for (Index at = 0; at < count; ++at) {
    const int v = tree_[at];
    double* own = fixed_.data() + offset_[at];
    const Index choices = tables_.choices(v);
    std::copy_n(tables_.costs.data() + tables_.first[Index(v)], choices, own);
    for (const Near& near : near_[Index(v)]) {
      if (position_[Index(near.to)] >= 0) continue;
      const double* costs = line(near, choice_[Index(near.to)]);
      for (Index k = 0; k < choices; ++k) own[k] += costs[k];
    }
    before += own[Index(choice_[Index(v)])];
    memory += priced_[tables_.first[Index(v)] + Index(choice_[Index(v)])];
    if (parent_[at] >= 0) before += line(*link_[at], choice_[Index(tree_[Index(parent_[at])])])[choice_[Index(v)]];
  }
  sum_ = fixed_;
  for (Index at = 0; at < count; ++at) {
    const double* prices = priced_.data() + tables_.first[Index(tree_[at])];
    for (Index k = offset_[at]; k < offset_[at + 1]; ++k) sum_[k] += weight * prices[k - offset_[at]];
  }
  const Cost allowed = std::max<Cost>(0, profile_.excess());
  std::vector<int> now(count);
  for (Index at = 0; at < count; ++at) now[at] = choice_[Index(tree_[at])];
  std::vector<std::pair<int, double>> extra;  // moments at which this move pays more
  bool fits = false;
  for (int attempt = 0; attempt < kAttempts && !fits; ++attempt) {
    solve();
    for (Index at = 0; at < count; ++at) {
      if (found_[at] == now[at]) continue;
      const auto& held = program_.variables[Index(tree_[at])].held;
      for (const Held& part : held) profile_.add(part.from, part.to, part.usage[Index(found_[at])] - part.usage[Index(now[at])]);
      now[at] = found_[at];
    }
    fits = profile_.excess() <= allowed;
    if (fits) break;
    const int peak = profile_.peak();
    const auto known = std::find_if(extra.begin(), extra.end(), [&](const auto& one) { return one.first == peak; });
    const double step = known == extra.end() ? unit_ * (0.1 + 0.4 * random_.unit()) : known->second;
    if (known == extra.end()) {
      extra.push_back({peak, step});
    } else {
      known->second += 2 * step;
    }
    for (Index at = 0; at < count; ++at) {
      const Variable& variable = program_.variables[Index(tree_[at])];
      for (Index k = offset_[at]; k < offset_[at + 1]; ++k) {
        const double more = static_cast<double>(usage_at(variable, peak, k - offset_[at]));
        sum_[k] += (known == extra.end() ? 1.0 : 2.0) * step * more;
      }
    }
  }
  double after = 0, memory_after = 0;
  for (Index at = 0; at < count; ++at) {
    after += fixed_[offset_[at] + Index(now[at])];
    memory_after += priced_[tables_.first[Index(tree_[at])] + Index(now[at])];
    if (parent_[at] >= 0) after += line(*link_[at], now[Index(parent_[at])])[now[at]];
  }
  const double change = after - before + weight * (memory_after - memory);
  const bool taken =
      fits && (change <= 0 || (temperature > 0 && random_.unit() < std::exp(-change / temperature)));
  bool changed = false;
  for (Index at = 0; at < count; ++at) {
    int& old = choice_[Index(tree_[at])];
    if (now[at] == old) continue;
    if (taken) {
      old = now[at];
      changed = true;
    } else {
      const auto& held = program_.variables[Index(tree_[at])].held;
      for (const Held& part : held) profile_.add(part.from, part.to, part.usage[Index(old)] - part.usage[Index(now[at])]);
    }
  }
  if (taken) cost_ += after - before;
  return changed;
}

}  // namespace fxpar::search
