// Variables with few neighbours, eliminated at given costs; what they leave is the core.
#pragma once

#include <vector>

#include "tables.hpp"

namespace fxpar::search {

class Elimination {
 public:
  // `largest` bounds the table that eliminating one variable may take.
  Elimination(const Tables& tables, std::size_t largest);

  // Eliminates at these costs, an entry per choice. What this adds to the core's variables is in costs(), what it adds
  // to links is in links(); returns what is added to every choice.
  double run(const std::vector<double>& costs);

  // Choices of the eliminated variables, from those of the core.
  void decode(std::vector<int>& choice) const;

  // By how much every choice of the eliminated variables is known to cost more, from that of the core's.
  void slack(std::vector<double>& slack) const;

  const std::vector<int>& core() const { return core_; }  // in the order of their numbers
  const std::vector<double>& costs() const { return costs_; }
  std::size_t links() const { return links_.size(); }
  const Tables::Link& link(std::size_t number) const {
    return changed_[number] ? links_[number] : tables_.links[number];
  }

 private:
  struct Step {
    int v, p, q;     // p, q: -1 if there are fewer neighbours
    int vp, vq, pq;  // links
  };

  void plan(std::size_t largest);
  void reset();

  const Tables& tables_;
  std::vector<Tables::Link> links_;  // the first are those of the tables: tables only where eliminations change them
  std::vector<char> changed_;
  std::vector<Step> steps_;
  std::vector<int> core_;
  std::vector<double> costs_;
};

}  // namespace fxpar::search
