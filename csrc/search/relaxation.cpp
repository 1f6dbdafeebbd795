#include "relaxation.hpp"

#include <algorithm>
#include <map>
#include <set>

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

Relaxation::Relaxation(const Tables& tables, Index largest) : tables_(tables), links_(tables.links) {
  plan(largest);
  before_.resize(tables.first.size() - 1);
  after_.resize(tables.first.size() - 1);
  std::vector<char> in_core(before_.size(), 0);
  for (const int v : core_) in_core[Index(v)] = 1;
  Index place = 0;
  for (Index number = 0; number < links_.size(); ++number) {
    const auto& link = links_[number];
    if (!in_core[Index(link.a)] || !in_core[Index(link.b)]) continue;
    const Index to_a = place, to_b = place + tables.choices(link.a);
    place = to_b + tables.choices(link.b);
    auto& of_a = link.a < link.b ? after_ : before_;
    auto& of_b = link.a < link.b ? before_ : after_;
    of_a[Index(link.a)].push_back({static_cast<int>(number), link.b, true, to_a, to_b});
    of_b[Index(link.b)].push_back({static_cast<int>(number), link.a, false, to_b, to_a});
  }
  messages_.assign(place, 0.0);
}

// Always the variable whose elimination takes the smallest table, among those with at most two neighbours.
void Relaxation::plan(Index largest) {
  const int count = static_cast<int>(tables_.first.size()) - 1;
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
  std::set<int> touched;
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
        links_.push_back({step.p, step.q, std::vector<double>(tables_.choices(step.p) * tables_.choices(step.q)), {}});
        links_.back().backward = links_.back().forward;
      }
      touched.insert(step.pq);
    }
    steps_.push_back(step);
    for (const int other : around) {
      queue.erase({rank[Index(other)], other});
      queue.insert({rank[Index(other)] = work(other), other});
    }
  }
  touched_.assign(touched.begin(), touched.end());
  for (const auto& [entries, v] : queue) core_.push_back(v);
  std::sort(core_.begin(), core_.end());
}

void Relaxation::eliminate() {
  constant_ = 0;
  for (const int number : touched_) {
    auto& link = links_[Index(number)];
    if (Index(number) < tables_.links.size()) {
      link.forward = tables_.links[Index(number)].forward;
      link.backward = tables_.links[Index(number)].backward;
    } else {
      std::fill(link.forward.begin(), link.forward.end(), 0.0);
      std::fill(link.backward.begin(), link.backward.end(), 0.0);
    }
  }
  std::vector<double> row, least;
  for (const Step& step : steps_) {
    const Index size = tables_.choices(step.v);
    const double* own = costs_.data() + tables_.first[Index(step.v)];
    if (step.p < 0) {
      constant_ += *std::min_element(own, own + size);
      continue;
    }
    const auto& left = links_[Index(step.vp)];
    const Index rows = tables_.choices(step.p);
    const double* to_p = (left.a == step.v ? left.forward : left.backward).data();  // [v][p]
    if (step.q < 0) {
      double* sum = costs_.data() + tables_.first[Index(step.p)];
      least.assign(rows, kInfinite);
      for (Index k = 0; k < size; ++k) {
        for (Index i = 0; i < rows; ++i) least[i] = std::min(least[i], own[k] + to_p[k * rows + i]);
      }
      for (Index i = 0; i < rows; ++i) sum[i] += least[i];
      continue;
    }
    const auto& right = links_[Index(step.vq)];
    const Index columns = tables_.choices(step.q);
    const double* to_q = (right.a == step.v ? right.forward : right.backward).data();  // [v][q]
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
}

void Relaxation::total(int v, std::vector<double>& sum) const {
  const double* own = costs_.data() + tables_.first[Index(v)];
  sum.assign(own, own + tables_.choices(v));
  for (const auto* side : {&before_[Index(v)], &after_[Index(v)]}) {
    for (const Adjacent& edge : *side) {
      for (Index k = 0; k < sum.size(); ++k) sum[k] += messages_[edge.in + k];
    }
  }
  for (double& cost : sum) cost = std::min(cost, kInfinite);
}

// Writes the message that takes `part` of the sum along, and returns its least entry, which it takes out.
double Relaxation::send(const Adjacent& edge, Index from, Index to, const std::vector<double>& sum, double part) {
  const auto& link = links_[Index(edge.link)];
  const double* table = (edge.is_a ? link.forward : link.backward).data();
  const double* in = messages_.data() + edge.in;
  double* out = messages_.data() + edge.out;
  std::fill(out, out + to, kInfinite);
  for (Index k = 0; k < from; ++k) {
    if (infinite(sum[k])) continue;
    const double base = part * sum[k] - in[k];
    const double* row = table + k * to;
    for (Index j = 0; j < to; ++j) out[j] = std::min(out[j], base + row[j]);
  }
  const double least = *std::min_element(out, out + to);
  for (Index j = 0; j < to; ++j) out[j] = infinite(out[j]) ? kInfinite : out[j] - least;
  return least;
}

double Relaxation::backward() {
  double bound = constant_;
  std::vector<double> sum;
  for (auto v = core_.rbegin(); v != core_.rend(); ++v) {
    const auto &before = before_[Index(*v)], &after = after_[Index(*v)];
    total(*v, sum);
    const double least = *std::min_element(sum.begin(), sum.end());
    bound += least;
    for (double& cost : sum) cost = infinite(cost) ? kInfinite : cost - least;
    const double part = 1.0 / static_cast<double>(std::max<Index>({before.size(), after.size(), 1}));
    for (const Adjacent& edge : before) bound += send(edge, sum.size(), tables_.choices(edge.to), sum, part);
  }
  return bound;
}

void Relaxation::forward(std::vector<int>& choice) {
  std::vector<double> sum, local;
  for (const int v : core_) {
    const auto &before = before_[Index(v)], &after = after_[Index(v)];
    const double* own = costs_.data() + tables_.first[Index(v)];
    local.assign(own, own + tables_.choices(v));
    for (const Adjacent& edge : before) {
      const auto& link = links_[Index(edge.link)];
      const double* row = (edge.is_a ? link.backward : link.forward).data() + Index(choice[Index(edge.to)]) * local.size();
      for (Index k = 0; k < local.size(); ++k) local[k] += row[k];
    }
    for (const Adjacent& edge : after) {
      for (Index k = 0; k < local.size(); ++k) local[k] += messages_[edge.in + k];
    }
    choice[Index(v)] = static_cast<int>(std::min_element(local.begin(), local.end()) - local.begin());
    total(v, sum);
    const double least = *std::min_element(sum.begin(), sum.end());
    for (double& cost : sum) cost = infinite(cost) ? kInfinite : cost - least;
    const double part = 1.0 / static_cast<double>(std::max<Index>({before.size(), after.size(), 1}));
    for (const Adjacent& edge : after) send(edge, sum.size(), tables_.choices(edge.to), sum, part);
  }
}

// Choices of the eliminated variables, from those of the core.
void Relaxation::decode(std::vector<int>& choice) const {
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    const Index size = tables_.choices(step->v);
    const double* own = costs_.data() + tables_.first[Index(step->v)];
    double least = kInfinite * 4;
    for (Index k = 0; k < size; ++k) {
      double sum = own[k];
      for (const auto& [to, number] : {std::pair{step->p, step->vp}, std::pair{step->q, step->vq}}) {
        if (to < 0) continue;
        const auto& link = links_[Index(number)];
        const auto& table = link.a == step->v ? link.forward : link.backward;
        sum += table[k * tables_.choices(to) + Index(choice[Index(to)])];
      }
      if (sum < least) {
        least = sum;
        choice[Index(step->v)] = static_cast<int>(k);
      }
    }
  }
}

double Relaxation::run(const std::vector<double>& costs, int sweeps, std::vector<int>& choice) {
  costs_ = costs;
  eliminate();
  choice.assign(tables_.first.size() - 1, 0);
  double bound = 0;
  for (int sweep = 0; sweep < sweeps; ++sweep) {
    forward(choice);
    bound = backward();
  }
  decode(choice);
  return bound;
}

// One more pass back leaves the program written anew as the bound plus terms that are not negative: a part of each
// variable's sum and, for each link, what is left of its table. What every choice must take of them is its slack.
std::vector<double> Relaxation::slack() {
  std::vector<double> result(costs_.size(), 0.0), sum, row;
  for (auto v = core_.rbegin(); v != core_.rend(); ++v) {
    const auto &before = before_[Index(*v)], &after = after_[Index(*v)];
    total(*v, sum);
    const double least = *std::min_element(sum.begin(), sum.end());
    for (double& cost : sum) cost = infinite(cost) ? kInfinite : cost - least;
    const double part = 1.0 / static_cast<double>(std::max<Index>({before.size(), after.size(), 1}));
    double* own = result.data() + tables_.first[Index(*v)];
    for (Index k = 0; k < sum.size(); ++k) own[k] += (1.0 - part * static_cast<double>(before.size())) * sum[k];
    for (const Adjacent& edge : before) {
      const Index to = tables_.choices(edge.to);
      const double base = send(edge, sum.size(), to, sum, part);
      const auto& link = links_[Index(edge.link)];
      const double* table = (edge.is_a ? link.forward : link.backward).data();
      const double *in = messages_.data() + edge.in, *out = messages_.data() + edge.out;
      double* others = result.data() + tables_.first[Index(edge.to)];
      row.assign(to, kInfinite);
      for (Index k = 0; k < sum.size(); ++k) {
        double smallest = kInfinite;
        for (Index j = 0; j < to && !infinite(sum[k]); ++j) {
          if (infinite(out[j])) continue;
          const double left = part * sum[k] - in[k] + table[k * to + j] - out[j] - base;
          smallest = std::min(smallest, left);
          row[j] = std::min(row[j], left);
        }
        own[k] += smallest;
      }
      for (Index j = 0; j < to; ++j) others[j] += row[j];
    }
  }
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    const Index size = tables_.choices(step->v);
    const Index rows = step->p < 0 ? 1 : tables_.choices(step->p), columns = step->q < 0 ? 1 : tables_.choices(step->q);
    const double* own = costs_.data() + tables_.first[Index(step->v)];
    const auto entries = [&](int number) {
      const auto& link = links_[Index(number)];
      return (link.a == step->v ? link.forward : link.backward).data();
    };
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
    double* out = result.data() + tables_.first[Index(step->v)];
    std::fill(out, out + size, kInfinite);
    const double* of_p = step->p < 0 ? nullptr : result.data() + tables_.first[Index(step->p)];
    const double* of_q = step->q < 0 ? nullptr : result.data() + tables_.first[Index(step->q)];
    each([&](Index k, Index entry, double cost) {
      if (infinite(cost)) return;
      const double rest = std::max(of_p ? of_p[entry / columns] : 0.0, of_q ? of_q[entry % columns] : 0.0);
      out[k] = std::min(out[k], cost - least[entry] + rest);
    });
  }
  return result;
}

}  // namespace fxpar::search
