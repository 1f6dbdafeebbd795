// Lower bounds and choices for a program whose memory has a price: small nodes are eliminated exactly, the rest sends
// messages (sequential tree-reweighted message passing; Kolmogorov 2006).
#pragma once

#include <vector>

#include "program.hpp"

namespace fxpar::search {

constexpr double kInfinite = 1e25;
inline bool infinite(double cost) { return cost > kInfinite / 2; }

// The program in doubles. Tables are there from both sides, so that the inner loops run over neighbouring entries.
struct Tables {
  explicit Tables(const Program& program);

  struct Link {
    int a, b;
    std::vector<double> forward, backward;  // [a][b] and [b][a]
  };

  std::vector<std::size_t> first;  // of each variable, in arrays that have an entry per choice
  std::vector<double> costs;
  std::vector<Link> links;

  std::size_t choices(int v) const { return first[static_cast<std::size_t>(v) + 1] - first[static_cast<std::size_t>(v)]; }
};

class Relaxation {
 public:
  // `largest` bounds the table that eliminating one variable may take.
  Relaxation(const Tables& tables, std::size_t largest);

  // Eliminates at these costs (one per choice), sends messages there and back `sweeps` times, and writes a choice for
  // every variable. Returns a lower bound of the least total cost. Messages are kept for the next call.
  double run(const std::vector<double>& costs, int sweeps, std::vector<int>& choice);

  // After run(): by how much the bound is known to grow at least if a choice is taken, for every choice.
  std::vector<double> slack();

  std::size_t core() const { return core_.size(); }

 private:
  struct Step {
    int v, p, q;       // p, q: -1 if there are fewer neighbours
    int vp, vq, pq;    // links
  };
  struct Adjacent {
    int link;
    int to;
    bool is_a;      // this variable is the link's a
    std::size_t in, out;  // places of the messages to this variable and to the other
  };

  void plan(std::size_t largest);
  void decode(std::vector<int>& choice) const;
  void eliminate();
  double backward();
  void forward(std::vector<int>& choice);
  void total(int v, std::vector<double>& sum) const;
  double send(const Adjacent& edge, std::size_t from, std::size_t to, const std::vector<double>& sum, double part);

  const Tables& tables_;
  std::vector<Tables::Link> links_;  // with what eliminations add; the first are those of the tables
  std::vector<int> touched_;         // links that eliminations change
  std::vector<Step> steps_;
  std::vector<int> core_;            // variables that remain, in the order of the sweeps
  std::vector<std::vector<Adjacent>> before_, after_;
  std::vector<double> costs_, messages_;
  double constant_ = 0;
};

}  // namespace fxpar::search
