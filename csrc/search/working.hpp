// The strategy graph while it is being reduced: strategies keep their numbers, dead ones are only marked.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "moments.hpp"
#include "program.hpp"
#include "reduce.hpp"

namespace fxpar::search {

struct Node {
  std::vector<Cost> costs;
  std::vector<char> alive;
  std::vector<int> instead;  // of strategies that another is better than: that one; else -1
  std::vector<Held> held;  // moments; may overlap
  std::vector<int> edges;  // numbers in Working::edges
  std::size_t left = 0;    // strategies alive
  bool gone = false, queued = false;
};

struct Working {
  Working(const Input& input, Cost forbidden);

  // Adds a table over (a, b); one edge is kept per pair.
  void join(int a, int b, std::vector<Cost> table);
  void unlink(int edge);

  // Nodes to look at again. pop() is -1 when there are none.
  void push(int node);
  int pop();

  void kill(int node, std::size_t k);
  void charge(int node, std::size_t k, Cost cost);
  // The node is gone; it follows from p and q as a Step says.
  void leave(int node, int p, int q, std::size_t stride, std::vector<int> best);

  // The entry of an edge seen from one of its ends.
  const Cost& at(const Edge& edge, int from, std::size_t k, std::size_t j) const {
    const std::size_t columns = nodes[static_cast<std::size_t>(edge.b)].costs.size();
    return edge.a == from ? edge.costs[k * columns + j] : edge.costs[j * columns + k];
  }
  std::size_t first_alive(int node) const;

  // Writes what is left as the program of `out`.
  void finish();

  std::vector<Node> nodes;
  std::vector<Edge> edges;  // those that are gone have a = b = -1
  Moments moments;
  Reduced out;

 private:
  void read_node(const Input& input, std::size_t node, Cost forbidden);
  void read_edge(const Input& input, std::size_t edge, Cost forbidden);

  std::unordered_map<std::uint64_t, int> pairs_;
  std::deque<int> queue_;
};

inline int other(const Edge& edge, int from) { return edge.a == from ? edge.b : edge.a; }

}  // namespace fxpar::search
