// The strategy graph as it comes in, and the smaller program that the reductions leave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fxpar::search {

using Cost = std::int64_t;

// Two of them still fit into 64 bits, so sums that saturate here never overflow.
constexpr Cost kForbidden = INT64_MAX / 4;

inline Cost add(Cost left, Cost right) {
  const Cost sum = left + right;
  return sum < kForbidden ? sum : kForbidden;
}

// Node i has the entries first[i] to first[i + 1] of `costs` and `usages`, and holds its usage from `from[i]` up to,
// but not at, `to[i]`. Edge e joins tail[e] and head[e]; its matrix, row by row over the tail, starts at place[e].
struct Input {
  std::size_t nodes = 0, edges = 0;
  const std::int64_t* first = nullptr;
  const Cost* costs = nullptr;
  const Cost* usages = nullptr;
  const std::int64_t* from = nullptr;
  const std::int64_t* to = nullptr;
  const std::int64_t* tail = nullptr;
  const std::int64_t* head = nullptr;
  const std::int64_t* place = nullptr;
  const Cost* edge_costs = nullptr;
  Cost limit = 0;
  const char* allowed = nullptr;  // an entry per strategy; 0: it may not be taken. All may if there is none
};

// What a variable's choices hold over the moments [from, to).
struct Held {
  int from, to;
  std::vector<Cost> usage;
};

// `held` is sorted and does not overlap; the least usage of each part is already taken from `room`.
struct Variable {
  std::vector<Cost> costs;
  std::vector<Held> held;
};

struct Edge {
  int a, b;
  std::vector<Cost> costs;  // row by row over a; kForbidden where a and b cannot go together
};

struct Program {
  std::vector<Variable> variables;
  std::vector<Edge> edges;
  std::vector<Cost> room;   // what is left of the limit at each moment
  std::vector<int> moment;  // for each moment of the graph its number here, or -1 where memory cannot bind
  Cost constant = 0;

  std::size_t choices(int variable) const { return variables[static_cast<std::size_t>(variable)].costs.size(); }
};

}  // namespace fxpar::search
