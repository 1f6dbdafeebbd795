#include "ascent.hpp"

#include <algorithm>
#include <cmath>

namespace fxpar::search {
namespace {

using Index = std::size_t;
constexpr Index kLargestTable = 20000;  // that eliminating one variable may take
constexpr int kPatience = 20;           // steps without a better bound before they are made shorter
constexpr double kShorter = 0.7;
constexpr double kInertia = 0.7;        // of the direction, against zigzag
constexpr int kSweeps = 30;             // for the bounds of choices
constexpr double kRounding = 1e-11;     // of all that was added up, taken off the bound

}  // namespace

Ascent::Ascent(const Program& program, const Tables& tables)
    : program_(program), tables_(tables), relaxation_(tables, kLargestTable), prices_(program.room.size(), 0.0),
      best_prices_(prices_), excess_(prices_), direction_(prices_), running_(prices_.size() + 1, 0.0),
      best_messages_(relaxation_.messages()) {}

void Ascent::price() {
  for (Index at = 0; at < prices_.size(); ++at) running_[at + 1] = running_[at] + prices_[at];
  costs_ = tables_.costs;
  for (Index k = 0; k < extra_.size(); ++k) costs_[k] += extra_[k];
  for (Index v = 0; v < program_.variables.size(); ++v) {
    double* own = costs_.data() + tables_.first[v];
    for (const Held& held : program_.variables[v].held) {
      const double price = running_[Index(held.to)] - running_[Index(held.from)];
      if (price <= 0) continue;
      for (Index k = 0; k < held.usage.size(); ++k) own[k] += price * static_cast<double>(held.usage[k]);
    }
  }
}

// Cost and memory of the choice.
void Ascent::measure() {
  std::vector<Cost> change(prices_.size() + 1, 0);
  cost_ = static_cast<double>(program_.constant);
  for (Index v = 0; v < choice_.size(); ++v) {
    const Index k = Index(choice_[v]);
    cost_ += tables_.costs[tables_.first[v] + k];
    for (const Held& held : program_.variables[v].held) {
      change[Index(held.from)] += held.usage[k];
      change[Index(held.to)] -= held.usage[k];
    }
  }
  for (const auto& link : tables_.links) {
    cost_ += link.forward[Index(choice_[Index(link.a)]) * tables_.choices(link.b) + Index(choice_[Index(link.b)])];
  }
  Cost used = 0;
  feasible_ = !infinite(cost_);
  worst_ = feasible_ ? 0 : kInfinite;
  for (Index at = 0; at < prices_.size(); ++at) {
    used += change[at];
    excess_[at] = static_cast<double>(used - program_.room[at]);
    if (excess_[at] > 0) feasible_ = false;
    worst_ = std::max(worst_, excess_[at]);
  }
}

// The bound at the present prices.
double Ascent::relax(int sweeps) {
  price();
  double bound = relaxation_.run(costs_, sweeps, choice_) + static_cast<double>(program_.constant);
  double added = std::abs(bound);
  for (Index at = 0; at < prices_.size(); ++at) {
    bound -= prices_[at] * static_cast<double>(program_.room[at]);
    added += prices_[at] * std::abs(static_cast<double>(program_.room[at]));
  }
  return bound - kRounding * added;
}

void Ascent::start(const std::vector<double>& prices) {
  prices_ = best_prices_ = prices;
  scale_ = 1;
}

void Ascent::resume(const State& state, double scale) {
  prices_ = best_prices_ = state.prices;
  direction_ = state.direction;
  extra_ = state.extra;
  bound_ = state.bound;
  best_messages_ = state.messages;
  relaxation_.set_messages(state.messages);
  scale_ = scale;
  stalled_ = 0;
}

std::vector<double> Ascent::bounds() {
  prices_ = best_prices_;
  relaxation_.set_messages(best_messages_);
  const double bound = relax(kSweeps);
  if (bound >= bound_) {
    bound_ = bound;
    best_messages_ = relaxation_.messages();
  }
  std::vector<double> result = relaxation_.slack();
  for (double& cost : result) cost += bound;
  return result;
}

void Ascent::sweep(int count) {
  prices_ = best_prices_;
  relaxation_.set_messages(best_messages_);
  bound_ = std::max(bound_, relax(count));
  best_messages_ = relaxation_.messages();
}

void Ascent::step(double known) {
  const double bound = relax(1);
  measure();
  if (bound > bound_ + 1e-6 * std::abs(bound_)) {
    bound_ = bound;
    best_prices_ = prices_;
    best_messages_ = relaxation_.messages();
    stalled_ = 0;
  } else if (++stalled_ > kPatience) {
    scale_ *= kShorter;
    stalled_ = 0;
    prices_ = best_prices_;
    relaxation_.set_messages(best_messages_);
    return;
  }
  const double target = infinite(known) ? std::max(1.5 * bound_, bound_ + 1) : known;
  double length = 0;
  for (Index at = 0; at < prices_.size(); ++at) {
    const double along = prices_[at] <= 0 ? std::max(0.0, excess_[at]) : excess_[at];
    direction_[at] = kInertia * direction_[at] + (1 - kInertia) * along;
    length += direction_[at] * direction_[at];
  }
  if (length <= 0) {
    if (stalled_ > 0) scale_ *= kShorter;  // memory does not matter, messages alone raise the bound
    return;
  }
  const double step = scale_ * std::max(target - bound, 1e-3 * std::abs(bound)) / length;
  for (Index at = 0; at < prices_.size(); ++at) prices_[at] = std::max(0.0, prices_[at] + step * direction_[at]);
}

}  // namespace fxpar::search
