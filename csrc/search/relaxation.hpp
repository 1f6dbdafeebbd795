// Lower bounds and choices for a program whose memory has a price: small nodes are eliminated exactly, the rest sends
// messages (sequential tree-reweighted message passing; Kolmogorov 2006).
#pragma once

#include <vector>

#include "elimination.hpp"
#include "tables.hpp"

namespace fxpar::search {

class Relaxation {
 public:
  // `largest` bounds the table that eliminating one variable may take.
  Relaxation(const Tables& tables, std::size_t largest);

  // Eliminates at these costs (one per choice), sends messages there and back `sweeps` times, and writes a choice for
  // every variable. Returns a lower bound of the least total cost. Messages are kept for the next call.
  double run(const std::vector<double>& costs, int sweeps, std::vector<int>& choice);

  // After run(): by how much the bound is known to grow at least if a choice is taken, for every choice.
  std::vector<double> slack();

  // The bound is valid whatever the messages are.
  const std::vector<double>& messages() const { return messages_; }
  void set_messages(const std::vector<double>& messages) { messages_ = messages; }

  std::size_t core() const { return elimination_.core().size(); }

 private:
  struct Adjacent {
    int link;
    int to;
    std::size_t in, out;  // places of the messages to this variable and to the other
  };

  double backward();
  void forward(std::vector<int>& choice);
  double centre(int v, std::vector<double>& sum) const;
  double part(int v) const;
  double send(int v, const Adjacent& edge, const std::vector<double>& sum, double part);

  const Tables& tables_;
  Elimination elimination_;
  std::vector<std::vector<Adjacent>> before_, after_;
  std::vector<double> messages_;
  double constant_ = 0;
};

}  // namespace fxpar::search
