#include "eliminate.hpp"

#include <algorithm>
#include <memory>

namespace fxpar {
namespace {

using Values = std::unique_ptr<double[]>;

// What one elimination leaves behind: the best choice of `variable` for every choice of `scope`.
struct Step {
  int variable;
  std::vector<int> scope;
  std::vector<int> best;
};

// A table laid over a wider scope: how far to move in it per step of each axis of that scope (0 if it lacks it).
std::vector<std::size_t> strides(const std::vector<int>& sizes, const Table& table, const std::vector<int>& scope) {
  std::vector<std::size_t> result(scope.size(), 0);
  std::size_t stride = 1;
  for (std::size_t axis = table.scope.size(); axis-- > 0;) {
    const auto at = std::find(scope.begin(), scope.end(), table.scope[axis]);
    result[static_cast<std::size_t>(at - scope.begin())] = stride;
    stride *= static_cast<std::size_t>(sizes[static_cast<std::size_t>(table.scope[axis])]);
  }
  return result;
}

// Adds the parts over (scope..., variable), minimises over the variable, and writes the minima and where they are.
void minimise(const std::vector<int>& sizes, const std::vector<const Table*>& parts, const Step& step, double* least,
              int* best) {
  std::vector<int> scope = step.scope;
  scope.push_back(step.variable);
  const std::size_t outer = step.scope.size(), count = parts.size();
  const int choices = sizes[static_cast<std::size_t>(step.variable)];
  std::vector<std::vector<std::size_t>> moves;
  for (const Table* part : parts) moves.push_back(strides(sizes, *part, scope));
  std::vector<std::size_t> offset(count, 0);
  std::vector<int> digit(outer, 0);
  for (std::size_t entry = 0;; ++entry) {
    double low = 0.0;
    int where = 0;
    for (int choice = 0; choice < choices; ++choice) {
      double sum = 0.0;
      for (std::size_t part = 0; part < count; ++part) {
        const double value = parts[part]->values[offset[part] + static_cast<std::size_t>(choice) * moves[part][outer]];
        sum = part == 0 ? value : sum + value;
      }
      if (choice == 0 || sum < low) {
        low = sum;
        where = choice;
      }
    }
    least[entry] = low;
    best[entry] = where;
    std::size_t axis = outer;
    while (axis-- > 0) {
      const int size = sizes[static_cast<std::size_t>(scope[axis])];
      if (++digit[axis] < size) {
        for (std::size_t part = 0; part < count; ++part) offset[part] += moves[part][axis];
        break;
      }
      digit[axis] = 0;
      for (std::size_t part = 0; part < count; ++part) {
        offset[part] -= static_cast<std::size_t>(size - 1) * moves[part][axis];
      }
    }
    if (axis == static_cast<std::size_t>(-1)) return;
  }
}

}  // namespace

std::pair<std::vector<int>, double> eliminate(const std::vector<int>& sizes, const std::vector<Table>& tables,
                                              const std::vector<int>& order) {
  std::vector<Table> all;
  std::vector<Values> owned;
  std::vector<bool> gone;
  std::vector<std::vector<std::size_t>> having(sizes.size());
  double total = 0.0;
  const auto add = [&](Table table, Values values) {
    if (table.scope.empty()) {
      total += table.values[0];
      return;
    }
    for (const int variable : table.scope) having[static_cast<std::size_t>(variable)].push_back(all.size());
    all.push_back(std::move(table));
    owned.push_back(std::move(values));
    gone.push_back(false);
  };
  for (const Table& table : tables) add(table, nullptr);

  std::vector<Step> steps;
  for (const int variable : order) {
    Step step{variable, {}, {}};
    std::vector<const Table*> parts;
    for (const std::size_t number : having[static_cast<std::size_t>(variable)]) {
      if (gone[number]) continue;
      parts.push_back(&all[number]);
      for (const int other : all[number].scope) {
        if (other != variable) step.scope.push_back(other);
      }
    }
    std::sort(step.scope.begin(), step.scope.end());
    step.scope.erase(std::unique(step.scope.begin(), step.scope.end()), step.scope.end());
    std::size_t entries = 1;
    for (const int other : step.scope) entries *= static_cast<std::size_t>(sizes[static_cast<std::size_t>(other)]);
    Values least(new double[entries]);
    step.best.resize(entries);
    minimise(sizes, parts, step, least.get(), step.best.data());
    for (const std::size_t number : having[static_cast<std::size_t>(variable)]) {
      gone[number] = true;
      owned[number].reset();
    }
    const double* values = least.get();
    add(Table{step.scope, values}, std::move(least));
    steps.push_back(std::move(step));
  }

  std::vector<int> choice(sizes.size(), 0);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::size_t entry = 0;
    for (const int other : step->scope) {
      const auto at = static_cast<std::size_t>(other);
      entry = entry * static_cast<std::size_t>(sizes[at]) + static_cast<std::size_t>(choice[at]);
    }
    choice[static_cast<std::size_t>(step->variable)] = step->best[entry];
  }
  return {choice, total};
}

}  // namespace fxpar
