#include "branch.hpp"

#include <algorithm>

namespace fxpar::search {
namespace {

using Index = std::size_t;
constexpr int kSweeps = 10;        // of messages, before prices move
constexpr double kScale = 0.02;    // of the first steps: the prices of the whole are nearly right
constexpr int kSteps = 200;        // for the bound of a part
constexpr int kCheck = 50;         // steps that must close at least
constexpr double kLeast = 0.005;   // of the gap
constexpr Index kProbes = 8;       // cuts that are tried
constexpr int kProbeSteps = 30;    // for the bound of either side
constexpr double kWorth = 0.02;    // of the gap, that a cut must gain

}  // namespace

Brancher::Brancher(const Program& program, const Tables& tables, const Ascent& ascent)
    : program_(program), tables_(tables), ascent_(ascent) {}

Part Brancher::root() const { return {ascent_.state(), Allowed(tables_.costs.size(), 1), ascent_.bound()}; }

// Raises the bound. False if nothing in the part costs at most `most`.
bool Brancher::climb(Part& part, double most, int steps) {
  part.state.extra.resize(part.allowed.size());
  for (Index k = 0; k < part.allowed.size(); ++k) part.state.extra[k] = part.allowed[k] ? 0.0 : kInfinite;
  ascent_.resume(part.state, kScale);
  ascent_.sweep(kSweeps);
  double mark = ascent_.bound();
  for (int step = 0; step < steps && ascent_.bound() <= most && !ascent_.converged() && !stopped_; ++step) {
    ascent_.step(most);
    if (ascent_.feasible() && ascent_.cost() < best_cost_) {
      best_cost_ = ascent_.cost();
      best_ = ascent_.choice();
    }
    if (step % kCheck != kCheck - 1) continue;
    if (ascent_.bound() - mark < kLeast * (most - mark)) break;
    mark = ascent_.bound();
  }
  part.state = ascent_.state();
  part.bound = std::max(part.bound, ascent_.bound());
  return ascent_.bound() <= most;
}

// After climb(): bars what costs or holds too much. False if nothing is left.
bool Brancher::prune(Part& part, double most) {
  bounds_ = ascent_.bounds();
  for (Index k = 0; k < bounds_.size(); ++k) {
    if (bounds_[k] > most) part.allowed[k] = 0;
  }
  return fit(program_, tables_, part.allowed);
}

// Tries the cuts that look best. kPart: one side of one of them is empty, the other is the part now.
Brancher::Outcome Brancher::probe(Part& part, double most, std::vector<Part>& halves) {
  std::vector<Cut> found = cuts(program_, tables_, part.allowed, bounds_, part.state.prices);
  const double gap = std::max(most - part.bound, 1e-9 * std::max(1.0, most));
  // Memory that is dear should be split where both sides cost the same, or where both cost more.
  const auto score = [&](const Cut& cut) {
    const double low = std::min(cut.low - part.bound, gap), high = std::min(cut.high - part.bound, gap);
    return cut.price / (kWorth * gap + std::max(low, high)) + 4 * std::min(low, high) / gap;
  };
  std::stable_sort(found.begin(), found.end(), [&](const Cut& a, const Cut& b) { return score(a) > score(b); });
  if (found.size() > kProbes) found.resize(kProbes);
  double best = kWorth * kWorth * gap * gap;
  for (const Cut& cut : found) {
    Part sides[2] = {part, part};
    bool open[2];
    double gain = 1;
    for (const int side : {0, 1}) {
      bar(program_, tables_, cut, side == 0, sides[side].allowed);
      open[side] = fit(program_, tables_, sides[side].allowed) && climb(sides[side], most, kProbeSteps);
      gain *= std::max(open[side] ? sides[side].bound - part.bound : gap, 1e-3 * gap);
    }
    if (stopped_) return Outcome::kHalves;
    if (!open[0] && !open[1]) return Outcome::kNothing;
    if (!open[0] || !open[1]) {
      part = std::move(sides[open[0] ? 0 : 1]);
      return Outcome::kPart;
    }
    if (gain > best) {
      best = gain;
      halves = {std::move(sides[0]), std::move(sides[1])};
    }
  }
  return Outcome::kHalves;
}

std::vector<Part> Brancher::split(Part part, double most) {
  if (!fit(program_, tables_, part.allowed)) return {};
  while (climb(part, most, kSteps) && !stopped_ && prune(part, most)) {
    std::vector<Part> halves;
    const Outcome outcome = probe(part, most, halves);
    if (outcome == Outcome::kNothing) return {};
    if (outcome == Outcome::kPart) continue;
    if (halves.empty() || stopped_) return {std::move(part)};
    return halves;
  }
  if (stopped_) return {std::move(part)};
  return {};
}

}  // namespace fxpar::search
