// Which choices still fit into memory, and where what variables may hold can be split in two.
#pragma once

#include <vector>

#include "tables.hpp"

namespace fxpar::search {

// An entry per choice of a variable: whether it may be taken.
using Allowed = std::vector<char>;

// Bars choices that hold more than there is room for when all others hold the least they can. False if nothing fits.
bool fit(const Program& program, const Tables& tables, Allowed& allowed);

// The choices of a variable that hold less than `usage` in one of its held parts, and those that hold as much or more.
struct Cut {
  int variable;
  std::size_t held;
  Cost usage;
  double low, high;  // lower bounds of the two sides
  double price;      // of the step in usage
};

// Every cut at moments at which memory can still run out. `bounds` has a lower bound per choice, `prices` a price per
// moment.
std::vector<Cut> cuts(const Program& program, const Tables& tables, const Allowed& allowed,
                      const std::vector<double>& bounds, const std::vector<double>& prices);

// Bars one side of a cut.
void bar(const Program& program, const Tables& tables, const Cut& cut, bool high, Allowed& allowed);

}  // namespace fxpar::search
