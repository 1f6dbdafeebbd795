// A reduced strategy graph with its bound, its prices and the best choice met; choices go out as strategies of nodes.
#pragma once

#include <memory>
#include <vector>

#include "ascent.hpp"
#include "branch.hpp"
#include "descent.hpp"
#include "reduce.hpp"

namespace fxpar::search {

class Problem {
 public:
  Problem(const Input& input, Cost forbidden, bool reductions);

  bool feasible() const { return reduced_.feasible; }
  const Reduced& reduced() const { return reduced_; }
  const Program& program() const { return reduced_.program; }
  const Tables& tables() const { return *tables_; }
  Ascent& ascent() { return *ascent_; }
  const Ascent& ascent() const { return *ascent_; }

  // Improves the bound until the time or the steps are spent. Returns how many steps were made.
  long ascend(double seconds, long steps);

  // For every strategy of the graph, a lower bound of what a choice with it costs.
  std::vector<double> bounds();

  // The prices of memory, at every moment of the graph: what every problem of this graph understands.
  std::vector<double> prices() const;
  void start(const std::vector<double>& prices);

  // For every strategy of the graph, whether the part allows it.
  std::vector<char> allowed(const Part& part) const;

  // The strategies of all nodes.
  std::vector<int> expand(const std::vector<int>& choice) const;

  // Takes strategies of all nodes as the best choice if they are, or as the one nearest to the limit. False if the
  // reduced graph has nothing that stands for them.
  bool adopt(const std::vector<int>& strategies);

  // Takes a choice that is within the limit, if it is cheaper than the best.
  void offer(const std::vector<int>& choice, double cost);
  void set_cost(double cost) { best_cost_ = cost; }
  double cost() const { return best_cost_; }
  // The best choice, or the one that came nearest to the limit. Empty if there is none.
  const std::vector<int>& best() const { return best_; }
  const std::vector<int>& nearest() const { return best_.empty() ? nearest_ : best_; }

 private:
  std::vector<std::int64_t> first_;
  std::vector<char> allowed_;
  Reduced reduced_;
  std::unique_ptr<Tables> tables_;
  std::unique_ptr<Ascent> ascent_;
  std::vector<int> best_, nearest_;
  double best_cost_ = kInfinite, least_excess_ = kInfinite;
};

// One thread's search from the problem's best choice and its prices, which no other thread may change meanwhile.
class Walk {
 public:
  Walk(const Problem& problem, std::uint64_t seed);

  // Moves of trees of up to `size` variables until the time or the moves are spent; returns how many were made.
  long run(double seconds, long moves, std::size_t size, double weight, double temperature);

  bool feasible() const { return descent_.feasible(); }
  double cost() const { return descent_.cost(); }
  double best_cost() const { return best_cost_; }
  const std::vector<int>& best() const { return best_; }

 private:
  Random random_;
  Descent descent_;
  std::vector<int> best_;
  double best_cost_;
};

}  // namespace fxpar::search
