#include "problem.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace fxpar::search {
namespace {

using Index = std::size_t;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Problem::Problem(const Input& input, Cost forbidden, bool reductions)
    : first_(input.first, input.first + input.nodes + 1), reduced_(reduce(input, forbidden, reductions)) {
  allowed_.assign(static_cast<Index>(first_.back()), 1);
  if (input.allowed) std::copy_n(input.allowed, allowed_.size(), allowed_.begin());
  for (const Cost room : reduced_.program.room) reduced_.feasible = reduced_.feasible && room >= 0;
  if (!reduced_.feasible) return;
  tables_ = std::make_unique<Tables>(reduced_.program);
  ascent_ = std::make_unique<Ascent>(reduced_.program, *tables_);
}

long Problem::ascend(double seconds, long steps) {
  const auto start = Clock::now();
  long made = 0;
  while (made < steps && !ascent_->converged() && (made == 0 || since(start) < seconds)) {
    ascent_->step(best_cost_);
    ++made;
    if (ascent_->excess() < least_excess_) {
      least_excess_ = ascent_->excess();
      nearest_ = ascent_->choice();
    }
    if (ascent_->feasible()) offer(ascent_->choice(), ascent_->cost());
  }
  return made;
}

std::vector<double> Problem::bounds() {
  const std::vector<double> bounds = ascent_->bounds();
  std::vector<double> result(static_cast<Index>(first_.back()), ascent_->bound());
  for (Index v = 0; v < reduced_.node.size(); ++v) {
    const Index node = static_cast<Index>(reduced_.node[v]);
    std::fill(result.begin() + first_[node], result.begin() + first_[node + 1], kInfinite);
    for (Index k = 0; k < reduced_.labels[v].size(); ++k) {
      result[static_cast<Index>(first_[node] + reduced_.labels[v][k])] = bounds[tables_->first[v] + k];
    }
  }
  return result;
}

std::vector<double> Problem::prices() const {
  const std::vector<int>& moment = reduced_.program.moment;
  std::vector<double> result(moment.size(), 0.0);
  for (Index at = 0; at < moment.size(); ++at) {
    if (moment[at] < 0 || (at > 0 && moment[at] == moment[at - 1])) continue;
    result[at] = ascent_->prices()[static_cast<Index>(moment[at])];
  }
  return result;
}

void Problem::start(const std::vector<double>& prices) {
  const Program& program = reduced_.program;
  if (prices.size() != program.moment.size()) throw std::invalid_argument("a price per moment is needed");
  std::vector<double> own(program.room.size(), 0.0);
  for (Index at = 0; at < prices.size(); ++at) {
    if (program.moment[at] >= 0) own[static_cast<Index>(program.moment[at])] += prices[at];
  }
  ascent_->start(own);
}

std::vector<char> Problem::allowed(const Part& part) const {
  std::vector<char> result = allowed_;
  for (Index v = 0; v < reduced_.node.size(); ++v) {
    const Index node = static_cast<Index>(reduced_.node[v]);
    std::fill(result.begin() + first_[node], result.begin() + first_[node + 1], 0);
    for (Index k = 0; k < reduced_.labels[v].size(); ++k) {
      result[static_cast<Index>(first_[node] + reduced_.labels[v][k])] = part.allowed[tables_->first[v] + k];
    }
  }
  return result;
}

std::vector<int> Problem::expand(const std::vector<int>& choice) const {
  if (choice.size() != reduced_.node.size()) throw std::invalid_argument("a choice per variable is needed");
  for (Index v = 0; v < choice.size(); ++v) {
    if (choice[v] < 0 || static_cast<Index>(choice[v]) >= reduced_.labels[v].size()) {
      throw std::out_of_range("there is no such choice");
    }
  }
  return reduced_.expand(choice);
}

bool Problem::adopt(const std::vector<int>& strategies) {
  if (strategies.size() + 1 != first_.size()) throw std::invalid_argument("a strategy per node is needed");
  std::vector<int> choice(reduced_.node.size());
  for (Index v = 0; v < choice.size(); ++v) {
    const int picked = strategies[static_cast<Index>(reduced_.node[v])];
    if (picked < 0 || static_cast<Index>(picked) >= reduced_.places[v].size()) {
      throw std::out_of_range("there is no such strategy");
    }
    choice[v] = reduced_.places[v][static_cast<Index>(picked)];
    if (choice[v] < 0) return false;
  }
  Descent descent(reduced_.program, *tables_, 0);
  descent.start(choice);
  if (infinite(descent.cost())) return false;
  if (descent.feasible()) {
    offer(choice, descent.cost());
  } else {
    nearest_ = choice;
    least_excess_ = static_cast<double>(descent.excess());
  }
  return true;
}

void Problem::offer(const std::vector<int>& choice, double cost) {
  if (cost >= best_cost_) return;
  best_cost_ = cost;
  best_ = choice;
}

Walk::Walk(const Problem& problem, std::uint64_t seed)
    : random_(seed ^ 0x5851f42d4c957f2du), descent_(problem.program(), problem.tables(), seed), best_(problem.best()),
      best_cost_(problem.cost()) {
  if (problem.nearest().size() != problem.program().variables.size()) {
    throw std::invalid_argument("there is no choice to start from");
  }
  descent_.start(problem.nearest());
  descent_.set_prices(problem.ascent().prices());
}

long Walk::run(double seconds, long moves, Index size, double weight, double temperature) {
  const auto start = Clock::now();
  long made = 0;
  while (made < moves && ((made & 15) != 0 || made == 0 || since(start) < seconds)) {
    descent_.move(1 + random_.below(size), weight, temperature);
    ++made;
    if (descent_.cost() < best_cost_ && descent_.feasible()) {
      best_cost_ = descent_.cost();
      best_ = descent_.choice();
    }
  }
  return made;
}

}  // namespace fxpar::search
