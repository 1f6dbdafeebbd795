#include "elimination.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace fxpar::search {
namespace {

using Index = std::size_t;

}  // namespace

Elimination::Elimination(const Tables& tables, Index largest) : tables_(tables), changed_(tables.links.size(), 0) {
  for (const auto& link : tables.links) links_.push_back({link.a, link.b, {}, {}});
  plan(largest);
}

// Always the variable whose elimination takes the smallest table, among those with at most two neighbours.
void Elimination::plan(Index largest) {
  const int count = static_cast<int>(tables_.variables());
  std::vector<std::map<int, int>> near(static_cast<Index>(count));
  for (Index number = 0; number < links_.size(); ++number) {
    near[Index(links_[number].a)][links_[number].b] = static_cast<int>(number);
    near[Index(links_[number].b)][links_[number].a] = static_cast<int>(number);
  }
  const auto work = [&](int v) {
    Index entries = tables_.choices(v);
    if (near[Index(v)].size() > 2) return largest + 1;
    for (const auto& [other, link] : near[Index(v)]) entries *= tables_.choices(other);
    return near[Index(v)].size() < 2 ? std::min(entries, largest) : entries;
  };
  std::set<std::pair<Index, int>> queue;
  std::vector<Index> rank(static_cast<Index>(count));
  for (int v = 0; v < count; ++v) queue.insert({rank[Index(v)] = work(v), v});
  while (largest > 0 && !queue.empty() && queue.begin()->first <= largest) {
    const int v = queue.begin()->second;
    queue.erase(queue.begin());
    Step step{v, -1, -1, -1, -1, -1};
    std::vector<int> around;
    for (const auto& [other, link] : near[Index(v)]) {
      (around.empty() ? step.p : step.q) = other;
      (around.empty() ? step.vp : step.vq) = link;
      around.push_back(other);
      near[Index(other)].erase(v);
    }
    if (step.q >= 0) {
      const auto [found, fresh] = near[Index(step.p)].try_emplace(step.q, static_cast<int>(links_.size()));
      step.pq = found->second;
      if (fresh) {
        near[Index(step.q)][step.p] = step.pq;
        links_.push_back({step.p, step.q, {}, {}});
        changed_.push_back(1);
      }
      changed_[Index(step.pq)] = 1;
    }
    steps_.push_back(step);
    for (const int other : around) {
      queue.erase({rank[Index(other)], other});
      queue.insert({rank[Index(other)] = work(other), other});
    }
  }
  for (const auto& [entries, v] : queue) core_.push_back(v);
  std::sort(core_.begin(), core_.end());
}

// Changed links as they are before anything is eliminated.
void Elimination::reset() {
  for (Index number = 0; number < links_.size(); ++number) {
    auto& link = links_[number];
    if (!changed_[number]) continue;
    if (number < tables_.links.size()) {
      link.forward = tables_.links[number].forward;
      link.backward = tables_.links[number].backward;
    } else {
      link.forward.assign(tables_.choices(link.a) * tables_.choices(link.b), 0.0);
      link.backward = link.forward;
    }
  }
}

double Elimination::run(const std::vector<double>& costs) {
  costs_ = costs;
  reset();
  double constant = 0;
  std::vector<double> least;
  for (const Step& step : steps_) {
    const Index size = tables_.choices(step.v);
    const double* own = costs_.data() + tables_.first[Index(step.v)];
    if (step.p < 0) {
      constant += *std::min_element(own, own + size);
      continue;
    }
    const Index rows = tables_.choices(step.p);
    const double* to_p = link(Index(step.vp)).of(step.v).data();  // [v][p]
    if (step.q < 0) {
      double* sum = costs_.data() + tables_.first[Index(step.p)];
      least.assign(rows, kInfinite);
      for (Index k = 0; k < size; ++k) {
        for (Index i = 0; i < rows; ++i) least[i] = std::min(least[i], own[k] + to_p[k * rows + i]);
      }
      for (Index i = 0; i < rows; ++i) sum[i] += least[i];
      continue;
    }
    const Index columns = tables_.choices(step.q);
    const double* to_q = link(Index(step.vq)).of(step.v).data();  // [v][q]
    auto& target = links_[Index(step.pq)];
    const bool straight = target.a == step.p;
    for (Index i = 0; i < rows; ++i) {
      least.assign(columns, kInfinite);
      for (Index k = 0; k < size; ++k) {
        const double base = own[k] + to_p[k * rows + i];
        if (infinite(base)) continue;
        const double* line = to_q + k * columns;
        for (Index j = 0; j < columns; ++j) least[j] = std::min(least[j], base + line[j]);
      }
      auto& rowwise = straight ? target.forward : target.backward;
      auto& columnwise = straight ? target.backward : target.forward;
      for (Index j = 0; j < columns; ++j) {
        const double sum = std::min(kInfinite, rowwise[i * columns + j] + least[j]);
        rowwise[i * columns + j] = columnwise[j * rows + i] = sum;
      }
    }
  }
  return constant;
}

void Elimination::decode(std::vector<int>& choice) const {
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    const Index size = tables_.choices(step->v);
    const double* own = costs_.data() + tables_.first[Index(step->v)];
    double least = kInfinite * 4;
    for (Index k = 0; k < size; ++k) {
      double sum = own[k];
      for (const auto& [to, number] : {std::pair{step->p, step->vp}, std::pair{step->q, step->vq}}) {
        if (to < 0) continue;
        sum += link(Index(number)).of(step->v)[k * tables_.choices(to) + Index(choice[Index(to)])];
      }
      if (sum < least) {
        least = sum;
        choice[Index(step->v)] = static_cast<int>(k);
      }
    }
  }
}

void Elimination::slack(std::vector<double>& slack) const {
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    const Index size = tables_.choices(step->v);
    const Index rows = step->p < 0 ? 1 : tables_.choices(step->p), columns = step->q < 0 ? 1 : tables_.choices(step->q);
    const double* own = costs_.data() + tables_.first[Index(step->v)];
    const auto entries = [&](int number) { return link(Index(number)).of(step->v).data(); };
    std::vector<double> least(rows * columns, kInfinite);
    const auto each = [&](auto&& with) {
      for (Index k = 0; k < size; ++k) {
        for (Index i = 0; i < rows; ++i) {
          const double left = own[k] + (step->p < 0 ? 0.0 : entries(step->vp)[k * rows + i]);
          for (Index j = 0; j < columns; ++j) {
            with(k, i * columns + j, left + (step->q < 0 ? 0.0 : entries(step->vq)[k * columns + j]));
          }
        }
      }
    };
    each([&](Index, Index entry, double cost) { least[entry] = std::min(least[entry], cost); });
    double* out = slack.data() + tables_.first[Index(step->v)];
    std::fill(out, out + size, kInfinite);
    const double* of_p = step->p < 0 ? nullptr : slack.data() + tables_.first[Index(step->p)];
    const double* of_q = step->q < 0 ? nullptr : slack.data() + tables_.first[Index(step->q)];
    each([&](Index k, Index entry, double cost) {
      if (infinite(cost)) return;
      const double rest = std::max(of_p ? of_p[entry / columns] : 0.0, of_q ? of_q[entry % columns] : 0.0);
      out[k] = std::min(out[k], cost - least[entry] + rest);
    });
  }
}

}  // namespace fxpar::search
