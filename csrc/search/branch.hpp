// Branch and bound: what variables may hold is split in two again and again, and each half gets its own bound.
#pragma once

#include <atomic>
#include <vector>

#include "ascent.hpp"
#include "cuts.hpp"

namespace fxpar::search {

// Some of all choices: those without the barred ones.
struct Part {
  Ascent::State state;
  Allowed allowed;
  double bound = -kInfinite;
};

// Splits parts; one for each thread.
class Brancher {
 public:
  Brancher(const Program& program, const Tables& tables, const Ascent& ascent);

  Part root() const;

  // Parts that hold everything in `part` that costs at most `most`: two, none, or one if there is nothing to gain from
  // splitting it by memory.
  std::vector<Part> split(Part part, double most);

  // Makes split() return soon, with its part as it is. From any thread.
  void stop() { stopped_ = true; }

  // The best choice within the limit that was met; empty if there was none.
  const std::vector<int>& best() const { return best_; }
  double best_cost() const { return best_cost_; }

 private:
  enum class Outcome { kNothing, kPart, kHalves };

  bool climb(Part& part, double most, int steps);
  bool prune(Part& part, double most);
  Outcome probe(Part& part, double most, std::vector<Part>& halves);

  const Program& program_;
  const Tables& tables_;
  Ascent ascent_;
  std::vector<double> bounds_;
  std::vector<int> best_;
  double best_cost_ = kInfinite;
  std::atomic<bool> stopped_{false};
};

}  // namespace fxpar::search
