#include "relaxation.hpp"

#include <algorithm>

namespace fxpar::search {
namespace {

using Index = std::size_t;

}  // namespace

Relaxation::Relaxation(const Tables& tables, Index largest)
    : tables_(tables), elimination_(tables, largest), before_(tables.variables()), after_(tables.variables()) {
  std::vector<char> in_core(tables.variables(), 0);
  for (const int v : elimination_.core()) in_core[Index(v)] = 1;
  Index place = 0;
  for (Index number = 0; number < elimination_.links(); ++number) {
    const auto& link = elimination_.link(number);
    if (!in_core[Index(link.a)] || !in_core[Index(link.b)]) continue;
    const Index to_a = place, to_b = place + tables.choices(link.a);
    place = to_b + tables.choices(link.b);
    auto& of_a = link.a < link.b ? after_ : before_;
    auto& of_b = link.a < link.b ? before_ : after_;
    of_a[Index(link.a)].push_back({static_cast<int>(number), link.b, to_a, to_b});
    of_b[Index(link.b)].push_back({static_cast<int>(number), link.a, to_b, to_a});
  }
  messages_.assign(place, 0.0);
}

// A variable's costs with all messages to it, less their least, which is returned.
double Relaxation::centre(int v, std::vector<double>& sum) const {
  const double* own = elimination_.costs().data() + tables_.first[Index(v)];
  sum.assign(own, own + tables_.choices(v));
  for (const auto* side : {&before_[Index(v)], &after_[Index(v)]}) {
    for (const Adjacent& edge : *side) {
      for (Index k = 0; k < sum.size(); ++k) sum[k] += messages_[edge.in + k];
    }
  }
  const double least = std::min(kInfinite, *std::min_element(sum.begin(), sum.end()));
  for (double& cost : sum) cost = infinite(cost) ? kInfinite : cost - least;
  return least;
}

// The weight of each of the trees that meet in a variable.
double Relaxation::part(int v) const {
  return 1.0 / static_cast<double>(std::max<Index>({before_[Index(v)].size(), after_[Index(v)].size(), 1}));
}

// Writes the message that takes `part` of the sum along, and returns its least entry, which it takes out.
double Relaxation::send(int v, const Adjacent& edge, const std::vector<double>& sum, double part) {
  const Index from = sum.size(), to = tables_.choices(edge.to);
  const double* table = elimination_.link(Index(edge.link)).of(v).data();
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
  for (auto v = elimination_.core().rbegin(); v != elimination_.core().rend(); ++v) {
    bound += centre(*v, sum);
    for (const Adjacent& edge : before_[Index(*v)]) bound += send(*v, edge, sum, part(*v));
  }
  return bound;
}

void Relaxation::forward(std::vector<int>& choice) {
  std::vector<double> sum, local;
  for (const int v : elimination_.core()) {
    const auto &before = before_[Index(v)], &after = after_[Index(v)];
    const double* own = elimination_.costs().data() + tables_.first[Index(v)];
    local.assign(own, own + tables_.choices(v));
    for (const Adjacent& edge : before) {
      const auto& table = elimination_.link(Index(edge.link)).of(edge.to);
      const double* row = table.data() + Index(choice[Index(edge.to)]) * local.size();
      for (Index k = 0; k < local.size(); ++k) local[k] += row[k];
    }
    for (const Adjacent& edge : after) {
      for (Index k = 0; k < local.size(); ++k) local[k] += messages_[edge.in + k];
    }
    choice[Index(v)] = static_cast<int>(std::min_element(local.begin(), local.end()) - local.begin());
    centre(v, sum);
    for (const Adjacent& edge : after) send(v, edge, sum, part(v));
  }
}

double Relaxation::run(const std::vector<double>& costs, int sweeps, std::vector<int>& choice) {
  constant_ = elimination_.run(costs);
  choice.assign(tables_.variables(), 0);
  double bound = 0;
  for (int sweep = 0; sweep < sweeps; ++sweep) {
    forward(choice);
    bound = backward();
  }
  elimination_.decode(choice);
  return bound;
}

// One more pass back leaves the program written anew as the bound plus terms that are not negative: a part of each
// variable's sum and, for each link, what is left of its table. What every choice must take of them is its slack.
std::vector<double> Relaxation::slack() {
  std::vector<double> result(tables_.costs.size(), 0.0), sum, row;
  for (auto v = elimination_.core().rbegin(); v != elimination_.core().rend(); ++v) {
    const auto& before = before_[Index(*v)];
    centre(*v, sum);
    const double share = part(*v);
    double* own = result.data() + tables_.first[Index(*v)];
    for (Index k = 0; k < sum.size(); ++k) own[k] += (1.0 - share * static_cast<double>(before.size())) * sum[k];
    for (const Adjacent& edge : before) {
      const Index to = tables_.choices(edge.to);
      const double base = send(*v, edge, sum, share);
      const double* table = elimination_.link(Index(edge.link)).of(*v).data();
      const double *in = messages_.data() + edge.in, *out = messages_.data() + edge.out;
      double* others = result.data() + tables_.first[Index(edge.to)];
      row.assign(to, kInfinite);
      for (Index k = 0; k < sum.size(); ++k) {
        double smallest = kInfinite;
        for (Index j = 0; j < to && !infinite(sum[k]); ++j) {
          if (infinite(out[j])) continue;
          const double left = share * sum[k] - in[k] + table[k * to + j] - out[j] - base;
          smallest = std::min(smallest, left);
          row[j] = std::min(row[j], left);
        }
        own[k] += smallest;
      }
      for (Index j = 0; j < to; ++j) others[j] += row[j];
    }
  }
  elimination_.slack(result);
  return result;
}

}  // namespace fxpar::search
