#include "fronts.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace fxpar {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

struct Front {
  std::vector<double> costs;
  std::vector<int> made;
};

struct Live {
  std::vector<int> scope;
  std::vector<Front> entries;
};

// What a point is: two other points (first, second), a variable's choice, or a table's point.
struct Made {
  enum Kind { kBoth, kChoice, kPoint, kNothing } kind;
  int first, second;
};

class Work {
 public:
  Work(std::size_t width, const std::vector<double>& prices, const std::vector<double>& grid, std::size_t most)
      : width_(width), prices_(prices), grid_(grid), most_(most) {}

  int create(Made::Kind kind, int first, int second) {
    made.push_back({kind, first, second});
    return static_cast<int>(made.size()) - 1;
  }

  // Without points that others beat in everything; of the rest, those that cost least at the prices.
  void thin(Front& front) {
    const std::size_t count = front.made.size();
    if (count <= 1) return;
    order_.resize(count);
    std::iota(order_.begin(), order_.end(), 0);
    const double* costs = front.costs.data();
    const std::size_t width = width_;
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
      const double *left = costs + at(a) * width, *right = costs + at(b) * width;
      return std::lexicographical_compare(left, left + width, right, right + width);
    });
    kept_.clear();
    for (const int point : order_) {
      const double* here = costs + at(point) * width;
      const auto beats = [&](int other) {
        const double* there = costs + at(other) * width;
        for (std::size_t row = 1; row < width; ++row) {
          if (there[row] > here[row]) return false;
        }
        return true;
      };
      // With one row the last that was kept holds least.
      const bool beaten = width == 2 ? !kept_.empty() && beats(kept_.back()) : std::any_of(kept_.begin(), kept_.end(), beats);
      const auto beside = [&](int other) {
        const double* there = costs + at(other) * width;
        for (std::size_t row = 1; row < width; ++row) {
          if (std::floor(there[row] / grid_[row - 1]) != std::floor(here[row] / grid_[row - 1])) return false;
        }
        return true;
      };
      if (beaten || (width == 2 ? !kept_.empty() && beside(kept_.back()) : std::any_of(kept_.begin(), kept_.end(), beside))) {
        continue;
      }
      kept_.push_back(point);
    }
    if (kept_.size() > most_) {
      value_.resize(kept_.size());
      rank_.resize(kept_.size());
      std::iota(rank_.begin(), rank_.end(), 0);
      for (std::size_t index = 0; index < kept_.size(); ++index) {
        const double* here = costs + at(kept_[index]) * width;
        value_[index] = here[0];
        for (std::size_t row = 1; row < width; ++row) value_[index] += here[row] * prices_[row - 1];
      }
      std::stable_sort(rank_.begin(), rank_.end(), [&](int a, int b) { return value_[at(a)] < value_[at(b)]; });
      rank_.resize(most_);
      std::sort(rank_.begin(), rank_.end());
      for (std::size_t index = 0; index < most_; ++index) kept_[index] = kept_[at(rank_[index])];
      kept_.resize(most_);
    }
    Front result;
    for (const int point : kept_) {
      result.costs.insert(result.costs.end(), costs + at(point) * width, costs + (at(point) + 1) * width);
      result.made.push_back(front.made[at(point)]);
    }
    front = std::move(result);
  }

  Front both(const Front& left, const Front& right) {
    Front result;
    result.costs.reserve(left.costs.size() * right.made.size());
    for (std::size_t one = 0; one < left.made.size(); ++one) {
      for (std::size_t other = 0; other < right.made.size(); ++other) {
        for (std::size_t row = 0; row < width_; ++row) {
          result.costs.push_back(left.costs[one * width_ + row] + right.costs[other * width_ + row]);
        }
        result.made.push_back(static_cast<int>(one * right.made.size() + other));
      }
    }
    thin(result);
    for (int& pair : result.made) {
      pair = create(Made::kBoth, left.made[at(pair) / right.made.size()], right.made[at(pair) % right.made.size()]);
    }
    return result;
  }

  std::vector<Made> made;

 private:
  std::size_t width_;
  const std::vector<double>&prices_, &grid_;
  std::size_t most_;
  std::vector<int> order_, kept_, rank_;
  std::vector<double> value_;
};

}  // namespace

FrontResult fronts(const std::vector<int>& sizes, const std::vector<std::vector<double>>& own,
                   const std::vector<FrontTable>& tables, const std::vector<int>& order,
                   const std::vector<double>& prices, const std::vector<double>& grid, std::size_t most) {
  const std::size_t width = prices.size() + 1;
  Work work(width, prices, grid, most);
  std::vector<Live> live;
  std::vector<char> gone;
  for (std::size_t number = 0; number < tables.size(); ++number) {
    Live table{tables[number].scope, {}};
    const auto& starts = tables[number].starts;
    for (std::size_t entry = 0; entry + 1 < starts.size(); ++entry) {
      Front front;
      for (int point = starts[entry]; point < starts[entry + 1]; ++point) {
        const double* costs = tables[number].costs + at(point) * width;
        front.costs.insert(front.costs.end(), costs, costs + width);
        front.made.push_back(work.create(Made::kPoint, static_cast<int>(number), point));
      }
      work.thin(front);
      table.entries.push_back(std::move(front));
    }
    live.push_back(std::move(table));
    gone.push_back(0);
  }
  Front whole{std::vector<double>(width, 0.0), {work.create(Made::kNothing, 0, 0)}};
  for (const int variable : order) {
    std::vector<std::size_t> mine;
    std::vector<int> scope;
    for (std::size_t number = 0; number < live.size(); ++number) {
      const auto& other = live[number].scope;
      if (gone[number] || std::find(other.begin(), other.end(), variable) == other.end()) continue;
      mine.push_back(number);
      for (const int neighbour : other) {
        if (neighbour != variable) scope.push_back(neighbour);
      }
    }
    std::sort(scope.begin(), scope.end());
    scope.erase(std::unique(scope.begin(), scope.end()), scope.end());
    std::size_t entries = 1;
    for (const int other : scope) entries *= at(sizes[at(other)]);
    Live table{scope, {}};
    std::vector<int> digit(sizes.size(), 0);
    for (std::size_t entry = 0; entry < entries; ++entry) {
      std::size_t rest = entry;
      for (std::size_t axis = scope.size(); axis-- > 0;) {
        digit[at(scope[axis])] = static_cast<int>(rest % at(sizes[at(scope[axis])]));
        rest /= at(sizes[at(scope[axis])]);
      }
      Front best;
      for (int choice = 0; choice < sizes[at(variable)]; ++choice) {
        digit[at(variable)] = choice;
        const double* costs = own[at(variable)].data() + at(choice) * width;
        if (!(costs[0] < std::numeric_limits<double>::infinity())) continue;
        Front front{{costs, costs + width}, {work.create(Made::kChoice, variable, choice)}};
        for (const std::size_t number : mine) {
          std::size_t index = 0;
          for (const int other : live[number].scope) index = index * at(sizes[at(other)]) + at(digit[at(other)]);
          front = work.both(front, live[number].entries[index]);
        }
        best.costs.insert(best.costs.end(), front.costs.begin(), front.costs.end());
        best.made.insert(best.made.end(), front.made.begin(), front.made.end());
      }
      work.thin(best);
      table.entries.push_back(std::move(best));
    }
    for (const std::size_t number : mine) {
      gone[number] = 1;
      live[number].entries.clear();
    }
    if (scope.empty()) {
      whole = work.both(whole, table.entries[0]);
    } else {
      live.push_back(std::move(table));
      gone.push_back(0);
    }
  }
  FrontResult result{whole.costs, {}, {}};
  for (const int point : whole.made) {
    std::vector<int> choice(sizes.size(), 0), pick(tables.size(), 0), todo{point};
    while (!todo.empty()) {
      const Made what = work.made[at(todo.back())];
      todo.pop_back();
      if (what.kind == Made::kBoth) {
        todo.push_back(what.first);
        todo.push_back(what.second);
      } else if (what.kind == Made::kChoice) {
        choice[at(what.first)] = what.second;
      } else if (what.kind == Made::kPoint) {
        pick[at(what.first)] = what.second;
      }
    }
    result.choices.push_back(std::move(choice));
    result.picks.push_back(std::move(pick));
  }
  return result;
}

}  // namespace fxpar
