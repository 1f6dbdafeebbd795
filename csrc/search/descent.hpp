// Search from one feasible choice to better ones: trees of variables are re-solved exactly with the rest held fast.
#pragma once

#include <cstdint>
#include <vector>

#include "profile.hpp"
#include "program.hpp"
#include "relaxation.hpp"

namespace fxpar::search {

// The same numbers on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {  // splitmix64 (Steele, Lea and Flood 2014)
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(next() % count); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  std::uint64_t state_;
};

class Descent {
 public:
  Descent(const Program& program, const Tables& tables, std::uint64_t seed);

  // Starts again from `choice`.
  void start(const std::vector<int>& choice);

  // The price of a byte at every moment.
  void set_prices(const std::vector<double>& prices);

  // Re-solves one tree; taken if cost + weight * price of the memory does not grow by more than chance allows at
  // `temperature`. True if the choice changed.
  bool move(std::size_t size, double weight, double temperature);

  bool feasible() const { return profile_.excess() <= 0; }
  Cost excess() const { return profile_.excess(); }
  double cost() const { return cost_; }
  const std::vector<int>& choice() const { return choice_; }

 private:
  struct Near {
    int to;
    int link;
    bool is_a;
  };

  void grow(std::size_t size);
  void solve();
  void place(int v, int choice, Cost sign);
  double row(const Near& edge, int choice, std::size_t k) const;
  const double* line(const Near& edge, int other_choice) const;

  const Program& program_;
  const Tables& tables_;
  std::vector<std::vector<Near>> near_;
  Random random_;
  Profile profile_;
  std::vector<double> priced_;  // price of the memory of each choice
  std::vector<double> running_;
  double unit_ = 0;             // a price that matters
  std::vector<int> choice_;
  double cost_ = 0;
  // The tree of the move at hand.
  std::vector<int> tree_, parent_;  // variables; places of the parents in `tree_`, -1 for roots
  std::vector<const Near*> link_;   // to the parent
  std::vector<int> position_;       // of each variable in `tree_`, or -1
  std::vector<int> blocked_;        // round in which the variable was found to close a cycle
  int round_ = 0;
  std::vector<std::size_t> offset_;
  std::vector<double> fixed_, sum_, best_;
  std::vector<int> found_, back_;
  std::vector<std::size_t> back_offset_;
};

}  // namespace fxpar::search
