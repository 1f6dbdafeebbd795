#include "moments.hpp"

#include <algorithm>
#include <map>

namespace fxpar::search {
namespace {

using Index = std::size_t;

bool nothing(const std::vector<Cost>& usage) {
  return std::all_of(usage.begin(), usage.end(), [](Cost cost) { return cost == 0; });
}

// Neighbouring parts with the same usage become one.
void merge(std::vector<Held>& parts) {
  std::vector<Held> result;
  for (Held& part : parts) {
    if (part.from >= part.to || nothing(part.usage)) continue;
    if (!result.empty() && result.back().to == part.from && result.back().usage == part.usage) {
      result.back().to = part.to;
    } else {
      result.push_back(std::move(part));
    }
  }
  parts = std::move(result);
}

}  // namespace

std::vector<Held> disjoint(const std::vector<Held>& parts, Index choices) {
  std::map<int, std::vector<Cost>> change;
  for (const Held& part : parts) {
    auto& up = change.try_emplace(part.from, choices, 0).first->second;
    for (Index k = 0; k < choices; ++k) up[k] += part.usage[k];
    auto& down = change.try_emplace(part.to, choices, 0).first->second;
    for (Index k = 0; k < choices; ++k) down[k] -= part.usage[k];
  }
  std::vector<Held> result;
  std::vector<Cost> level(choices, 0);
  for (auto step = change.begin(); step != change.end(); ++step) {
    for (Index k = 0; k < choices; ++k) level[k] += step->second[k];
    const auto next = std::next(step);
    if (next != change.end()) result.push_back({step->first, next->first, level});
  }
  return result;
}

Moments::Moments(const Input& input) : spans_(input.nodes, {0, 0}), limit_(input.limit) {
  std::vector<std::pair<std::int64_t, int>> events;  // at one time ends come before starts
  for (Index node = 0; node < input.nodes; ++node) {
    const bool holds = std::any_of(input.usages + input.first[node], input.usages + input.first[node + 1],
                                   [](Cost usage) { return usage > 0; });
    if (input.from[node] >= input.to[node] || !holds) continue;
    events.push_back({input.from[node], 1});
    events.push_back({input.to[node], 0});
  }
  std::sort(events.begin(), events.end());
  std::vector<std::int64_t> kept;
  for (Index at = 0; at + 1 < events.size(); ++at) {
    if (events[at].second == 1 && events[at + 1].second == 0) kept.push_back(events[at].first);
  }
  for (Index node = 0; node < input.nodes; ++node) {
    if (input.from[node] >= input.to[node]) continue;
    const auto from = std::lower_bound(kept.begin(), kept.end(), input.from[node]);
    const auto to = std::lower_bound(kept.begin(), kept.end(), input.to[node]);
    spans_[node] = {static_cast<int>(from - kept.begin()), static_cast<int>(to - kept.begin())};
  }
  change_.assign(kept.size() + 1, 0);
}

void Moments::take(int from, int to, Cost usage) {
  change_[Index(from)] += usage;
  change_[Index(to)] -= usage;
}

std::vector<Cost> Moments::room() const {
  std::vector<Cost> result(change_.size() - 1);
  Cost taken = 0;
  for (Index at = 0; at < result.size(); ++at) result[at] = limit_ - (taken += change_[at]);
  return result;
}

void Moments::finish(Program& program) {
  const Index count = change_.size() - 1;
  std::vector<Cost> most(count + 1, 0);
  for (Variable& variable : program.variables) {
    variable.held = disjoint(variable.held, variable.costs.size());
    for (Held& held : variable.held) {
      const Cost least = *std::min_element(held.usage.begin(), held.usage.end());
      take(held.from, held.to, least);
      for (Cost& usage : held.usage) usage -= least;
      const Cost largest = *std::max_element(held.usage.begin(), held.usage.end());
      most[Index(held.from)] += largest;
      most[Index(held.to)] -= largest;
    }
    merge(variable.held);
  }
  std::vector<char> edge(count + 1, 0);  // something starts or ends here
  for (const Variable& variable : program.variables) {
    for (const Held& held : variable.held) edge[Index(held.from)] = edge[Index(held.to)] = 1;
  }
  program.moment.assign(count, -1);
  std::vector<int> number(count + 1, 0);  // of the kept moment at or after this one
  Cost taken = 0, peak = 0;
  bool open = false;
  for (Index at = 0; at < count; ++at) {
    taken += change_[at];
    peak += most[at];
    if (edge[at]) open = false;
    number[at] = static_cast<int>(program.room.size()) - (open ? 1 : 0);
    const Cost room = limit_ - taken;
    if (peak <= room && room >= 0) continue;
    if (open) {
      program.room.back() = std::min(program.room.back(), room);
    } else {
      program.room.push_back(room);
      open = true;
    }
    program.moment[at] = static_cast<int>(program.room.size()) - 1;
  }
  number[count] = static_cast<int>(program.room.size());
  for (Variable& variable : program.variables) {
    for (Held& held : variable.held) {
      held.from = number[Index(held.from)];
      held.to = number[Index(held.to)];
    }
    merge(variable.held);
  }
}

}  // namespace fxpar::search
