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
  std::vector<double> prices_, best_prices_, excess_, direction_, running_, costs_;
  std::vector<int> choice_;
  double bound_ = -kInfinite, cost_ = kInfinite, worst_ = kInfinite, scale_ = 1;
  bool feasible_ = false;
  int stalled_ = 0;
};

}  // namespace fxpar::search
