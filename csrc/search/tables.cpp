#include "tables.hpp"

namespace fxpar::search {
namespace {

using Index = std::size_t;

std::vector<double> transposed(const std::vector<double>& table, Index rows, Index columns) {
  std::vector<double> result(table.size());
  for (Index i = 0; i < rows; ++i) {
    for (Index j = 0; j < columns; ++j) result[j * rows + i] = table[i * columns + j];
  }
  return result;
}

double number(Cost cost) { return cost >= kForbidden ? kInfinite : static_cast<double>(cost); }

}  // namespace

Tables::Tables(const Program& program) {
  first.push_back(0);
  for (const Variable& variable : program.variables) {
    for (const Cost cost : variable.costs) costs.push_back(number(cost));
    first.push_back(costs.size());
  }
  for (const Edge& edge : program.edges) {
    Link link{edge.a, edge.b, {}, {}};
    for (const Cost cost : edge.costs) link.forward.push_back(number(cost));
    link.backward = transposed(link.forward, choices(edge.a), choices(edge.b));
    links.push_back(std::move(link));
  }
}

}  // namespace fxpar::search
