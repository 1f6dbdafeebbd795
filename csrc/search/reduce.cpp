#include "reduce.hpp"

#include "rules.hpp"

namespace fxpar::search {
namespace {

// The cheap rules, until no node is left to look at.
void drain(Working& work, bool reductions) {
  for (int node = work.pop(); node >= 0 && work.out.feasible; node = work.pop()) {
    support(work, node);
    if (!work.out.feasible || !reductions) continue;
    if (work.nodes[static_cast<std::size_t>(node)].left == 1) {
      fix(work, node);
    } else if (!tie(work, node) && idle(work, node)) {
      eliminate(work, node);
    }
  }
}

}  // namespace

std::vector<int> Reduced::expand(const std::vector<int>& choice) const {
  std::vector<int> all(nodes, 0);
  for (std::size_t v = 0; v < node.size(); ++v) {
    all[static_cast<std::size_t>(node[v])] = labels[v][static_cast<std::size_t>(choice[v])];
  }
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::size_t entry = 0;
    if (step->p >= 0) entry = static_cast<std::size_t>(all[static_cast<std::size_t>(step->p)]) * step->stride;
    if (step->q >= 0) entry += static_cast<std::size_t>(all[static_cast<std::size_t>(step->q)]);
    all[static_cast<std::size_t>(step->node)] = step->best[entry];
  }
  return all;
}

Reduced reduce(const Input& input, Cost forbidden, bool reductions) {
  Working work(input, forbidden);
  drain(work, reductions);
  while (reductions && work.out.feasible && (dominate(work) || overfill(work))) drain(work, true);
  if (work.out.feasible) work.finish();
  return std::move(work.out);
}

}  // namespace fxpar::search
