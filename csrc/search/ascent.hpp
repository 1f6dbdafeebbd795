// Prices for memory: subgradient steps on the dual, and the choices found on the way.
#pragma once

#include <vector>

#include "program.hpp"
#include "relaxation.hpp"

namespace fxpar::search {

class Ascent {
 public:
  Ascent(const Program& program, const Tables& tables);

  // One step. `known` is the cost of the best choice known, or infinite; it sets the length of steps.
  void step(double known);

  // A lower bound of the cost of every choice within the limit; rounding errors are taken off.
  double bound() const { return bound_; }
  // The prices that gave it, a byte at each moment.
  const std::vector<double>& prices() const { return best_prices_; }
  // Starts from other prices, and forgets how short steps have become.
  void start(const std::vector<double>& prices);

  // From where another search can go on. `extra` is added to the costs of choices; infinite bars one.
  struct State {
    std::vector<double> prices, direction, messages, extra;
    double bound = -kInfinite;
  };
  State state() const { return {best_prices_, direction_, best_messages_, extra_, bound_}; }
  void resume(const State& state, double scale);
  // Sends messages at the best prices.
  void sweep(int count);
  // A lower bound for every choice at those prices. The next step starts from them.
  std::vector<double> bounds();
  // Steps have become so short that the bound no longer moves.
  bool converged() const { return scale_ < 1e-7; }
  // The last choice, its cost, and whether it is within the limit.
  const std::vector<int>& choice() const { return choice_; }
  double cost() const { return cost_; }
  bool feasible() const { return feasible_; }
  // By how much the choice is over the limit at the worst moment; infinite if it is forbidden.
  double excess() const { return worst_; }
  std::size_t core() const { return relaxation_.core(); }

 private:
  void price();
  double relax(int sweeps);
  void measure();

  const Program& program_;
  const Tables& tables_;
  Relaxation relaxation_;
  std::vector<double> prices_, best_prices_, excess_, direction_, running_, costs_, extra_, best_messages_;
  std::vector<int> choice_;
  double bound_ = -kInfinite, cost_ = kInfinite, worst_ = kInfinite, scale_ = 1;
  bool feasible_ = false;
  int stalled_ = 0;
};

}  // namespace fxpar::search
