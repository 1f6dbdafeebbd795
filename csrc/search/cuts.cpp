#include "cuts.hpp"

#include <algorithm>

namespace fxpar::search {
namespace {

using Index = std::size_t;

// The least and the largest usage of allowed choices; the least is beyond the largest if there are none.
std::pair<Cost, Cost> range(const Held& held, const char* allowed) {
  Cost least = kForbidden, most = 0;
  for (Index k = 0; k < held.usage.size(); ++k) {
    if (!allowed[k]) continue;
    least = std::min(least, held.usage[k]);
    most = std::max(most, held.usage[k]);
  }
  return {least, most};
}

// The room less what is held at every moment, when every variable holds its least (or its most).
std::vector<Cost> left(const Program& program, const Tables& tables, const Allowed& allowed, bool most) {
  std::vector<Cost> result = program.room, change(result.size() + 1, 0);
  for (Index v = 0; v < program.variables.size(); ++v) {
    for (const Held& held : program.variables[v].held) {
      const auto ends = range(held, allowed.data() + tables.first[v]);
      const Cost usage = most ? ends.second : ends.first;
      change[Index(held.from)] += usage;
      change[Index(held.to)] -= usage;
    }
  }
  Cost taken = 0;
  for (Index at = 0; at < result.size(); ++at) result[at] -= (taken += change[at]);
  return result;
}

}  // namespace

bool fit(const Program& program, const Tables& tables, Allowed& allowed) {
  for (Index v = 0; v < program.variables.size(); ++v) {
    const char* own = allowed.data() + tables.first[v];
    const char* end = allowed.data() + tables.first[v + 1];
    if (std::find(own, end, 1) == end) return false;
  }
  for (bool changed = true; changed;) {
    changed = false;
    const std::vector<Cost> free = left(program, tables, allowed, false);
    if (!free.empty() && *std::min_element(free.begin(), free.end()) < 0) return false;
    for (Index v = 0; v < program.variables.size(); ++v) {
      char* own = allowed.data() + tables.first[v];
      for (const Held& held : program.variables[v].held) {
        const Cost room = *std::min_element(free.begin() + held.from, free.begin() + held.to) + range(held, own).first;
        for (Index k = 0; k < held.usage.size(); ++k) {
          if (!own[k] || held.usage[k] <= room) continue;
          own[k] = 0;
          changed = true;
        }
      }
    }
  }
  return true;
}

std::vector<Cut> cuts(const Program& program, const Tables& tables, const Allowed& allowed,
                      const std::vector<double>& bounds, const std::vector<double>& prices) {
  const std::vector<Cost> free = left(program, tables, allowed, true);
  std::vector<int> scarce(free.size() + 1, 0);  // moments before at which memory can run out
  std::vector<double> paid(free.size() + 1, 0.0);
  for (Index at = 0; at < free.size(); ++at) {
    scarce[at + 1] = scarce[at] + (free[at] < 0 ? 1 : 0);
    paid[at + 1] = paid[at] + prices[at];
  }
  std::vector<Cut> result;
  std::vector<std::pair<Cost, double>> levels;
  for (Index v = 0; v < program.variables.size(); ++v) {
    const char* own = allowed.data() + tables.first[v];
    for (Index number = 0; number < program.variables[v].held.size(); ++number) {
      const Held& held = program.variables[v].held[number];
      if (scarce[Index(held.to)] == scarce[Index(held.from)]) continue;
      levels.clear();
      for (Index k = 0; k < held.usage.size(); ++k) {
        if (own[k]) levels.push_back({held.usage[k], bounds[tables.first[v] + k]});
      }
      std::sort(levels.begin(), levels.end());
      std::vector<double> above(levels.size() + 1, kInfinite);
      for (Index at = levels.size(); at-- > 0;) above[at] = std::min(above[at + 1], levels[at].second);
      double below = kInfinite;
      for (Index at = 1; at < levels.size(); ++at) {
        below = std::min(below, levels[at - 1].second);
        if (levels[at - 1].first == levels[at].first) continue;
        const double step = static_cast<double>(levels[at].first - levels[at - 1].first);
        const double price = (paid[Index(held.to)] - paid[Index(held.from)]) * step;
        result.push_back({static_cast<int>(v), number, levels[at].first, below, above[at], price});
      }
    }
  }
  return result;
}

void bar(const Program& program, const Tables& tables, const Cut& cut, bool high, Allowed& allowed) {
  const auto& usage = program.variables[Index(cut.variable)].held[cut.held].usage;
  char* own = allowed.data() + tables.first[Index(cut.variable)];
  for (Index k = 0; k < usage.size(); ++k) {
    if ((usage[k] >= cut.usage) == high) own[k] = 0;
  }
}

}  // namespace fxpar::search
